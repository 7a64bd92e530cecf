"""Parts of other runs from which a new run starts.

A part is a submodule of an algorithm or of the transforms, named by the prefix of its names in a checkpoint:
`actor_encoder`, `network.actor_torso`, `critic.encoder.encoders.0`. Names of transforms begin with `transforms.`.
Values are read from a checkpoint of the other run with `weights_only`. The configuration of the other run is not read,
and its code is not executed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from alfish.errors import UsageError, counted
from alfish.networks import TargetNetwork
from alfish.runs.checkpoints import checkpoints_of, run_id
from alfish.runs.files import sha256
from alfish.runs.loading import names_below
from alfish.transforms import Transforms
from alfish.transforms.transform import Transform, has_statistics

MAX_LINES = 30  # largest number of a part's tensors that the log lists
_SOURCE = re.compile(r"(?:(?P<part>[\w.]*)@)?(?P<run>.+?)(?::(?P<checkpoint>latest|best|\d+))?")


class PartSource(NamedTuple):
    """A part of another run.

    Attributes:
      part: prefix of the part's names in the other run; None means the same prefix as in this run.
      run: directory of the run.
      checkpoint: name of the checkpoint: 'latest', 'best' or steps.
      name: name of the setting, for messages.
    """

    part: str | None
    run: Path
    checkpoint: str | int
    name: str

    @classmethod
    def parsed(cls, text: str, name: str) -> "PartSource":
        """Returns the source in a text `[PART@]DIRECTORY[:CHECKPOINT]`.

        Raises:
          UsageError: the text does not name a source.
        """
        found = _SOURCE.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{name} is {text!r}; it must be a run's directory, such as 'runs/ppo' or 'encoder@runs/ppo'"
            )
        which = found["checkpoint"] or "latest"
        return cls(found["part"], Path(found["run"]), int(which) if which.isdigit() else which, name)


class InitialParts:
    """Parts of a new run's networks, including encoders of transforms, that come from other runs.

    Args:
      sources: source of each part, by the part's prefix in the new run:
        `{'network.actor_torso': 'runs/x', 'critic.encoder': 'actor_encoder@runs/y:best'}`. The prefix '' means all
        networks. Later entries overwrite earlier entries.
      algorithm, transforms: algorithm and transforms of the new run.

    Raises:
      UsageError: the new run has no such part (the message names similar parts), or a text does not name a source.
    """

    def __init__(self, sources: Mapping[str, str], algorithm: nn.Module, transforms: Transforms):
        self._algorithm, self._transforms = algorithm, transforms
        self._sources: dict[str, PartSource] = {}
        for place, text in transforms.sources().items():
            self._sources[f"transforms.{place}"] = PartSource.parsed(text, "FrozenEncoder.source")
        for place, text in sources.items():
            self._sources[place] = source = PartSource.parsed(text, f"Trainer.initial_parts[{place!r}]")
            names_below(place, self._tensors(), f"{source.name}: {type(algorithm).__name__}")
        self._origins: list[dict[str, Any]] = []

    def keep_statistics(self) -> None:
        """Excludes transforms from a calibration if all their statistics come from other runs.

        The networks of the other run have learned from rows that were transformed with these statistics.
        """
        for transform, is_loaded in self._transforms_with_statistics():
            transform.is_calibrated = is_loaded

    def _transforms_with_statistics(self) -> Iterator[tuple[Transform, bool]]:
        """Yields transforms with statistics, and whether all tensors of each come from other runs."""
        tensors = self._tensors()
        for name, transform in self._transforms.named_modules():
            if isinstance(transform, Transform) and has_statistics(transform):
                own = [tensor for tensor in tensors if tensor.startswith(f"transforms.{name}.")]
                loaded = [tensor for tensor in own if any(_is_below(tensor, place) for place in self._sources)]
                yield transform, loaded == own

    @torch.no_grad()
    def load(self, log: Callable[[str], Any]) -> None:
        """Copies the values of all parts. Target networks become copies of the loaded networks.

        Args:
          log: function that receives the origin of each part, and the names and shapes of its tensors.

        Raises:
          UsageError: a directory is not a run, a run has no such part, or its tensors do not have the shapes of the
            tensors in the new run. No tensor has then changed.
        """
        tensors = self._tensors() if self._sources else {}
        parts = [_Part.read(place, source, tensors) for place, source in self._sources.items()]
        for part in parts:
            for name, value in part.values.items():
                tensors[name].copy_(value)
            for line in part.lines():
                log(line)
        runs = [str(part.origin["run"]) for part in parts if part.has_statistics]
        new = [type(transform).__name__ for transform, is_loaded in self._transforms_with_statistics() if not is_loaded]
        if runs and new:
            log(
                f"The statistics of {', '.join(new)} are not those with which these parts were trained; to load the "
                f"matching statistics, add 'transforms': {runs[0]!r} to Trainer.initial_parts"
            )
        self._origins = [part.origin for part in parts]
        for module in self._algorithm.modules() if parts else ():
            if isinstance(module, TargetNetwork):
                module.reset()

    def provenance(self) -> dict[str, Any]:
        """Returns the origin of each part that was loaded, in types of JSON."""
        return {"initial_parts": self._origins} if self._origins else {}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the networks' tensors by name. Each call reads the current tensors."""
        return _tensors(self._algorithm.state_dict(), self._transforms.state_dict())


class _Part(NamedTuple):
    """Tensors of one part.

    Attributes:
      values: tensors by name in this run.
      names: name of each tensor in the other run, by its name in this run.
      origin: run and file of the values, in types of JSON.
      has_statistics: whether the transforms of the other run have tensors.
    """

    values: dict[str, torch.Tensor]
    names: dict[str, str]
    origin: dict[str, Any]
    has_statistics: bool

    @classmethod
    def read(cls, place: str, source: PartSource, tensors: Mapping[str, torch.Tensor]) -> "_Part":
        """Reads a part of a run, and checks that it fits the part of the new run with the prefix `place`."""
        checkpoints = checkpoints_of(source.run)
        if not checkpoints.steps():
            near = sorted(str(found.parent) for found in source.run.parent.glob("*/checkpoints"))
            hint = f"; there are {', '.join(near[:3])}" if near else ""
            raise UsageError(f"{source.name}: {source.run} is not a run, because it has no checkpoints{hint}")
        state: dict[str, torch.Tensor] = {}

        def take(saved: dict[str, Any]) -> None:
            state.update(_tensors(saved["algorithm"], saved["transforms"]))

        steps, _ = checkpoints.load(source.checkpoint, take)
        part = place if source.part is None else source.part
        there = names_below(part, state, f"{source.name}: {source.run}")
        here = names_below(place, tensors, source.name)
        wrong = [f"{source.run} has no {_joined(part, inner)}" for inner in here if inner not in there]
        names = {here[inner]: name for inner, name in there.items() if inner in here}
        wrong += [f"this run has no {_joined(place, inner)}" for inner in there if inner not in here]
        wrong += [
            f"{own} is {_form(tensors[own])} in this run, but {other} is {_form(state[other])} in {source.run}"
            for own, other in names.items()
            if _form(tensors[own]) != _form(state[other])
        ]
        if wrong:
            more = f" ({len(wrong)} differences in all)" if len(wrong) > 1 else ""
            raise UsageError(
                f"{source.name}: the part of {source.run} does not fit: {wrong[0]}{more}; build both runs with the "
                "same networks and spaces, or name another part"
            )
        path = checkpoints.path(steps)
        origin = {
            "place": place,
            "part": part,
            "run": str(source.run),
            "run_id": run_id(source.run),
            "steps": steps,
            "sha256": sha256(path),
            "num_tensors": len(names),
            "num_values": sum(tensors[name].numel() for name in names),
        }
        values = {own: state[other] for own, other in names.items()}
        return cls(values, names, origin, any(_is_below(name, "transforms") for name in state))

    def lines(self) -> list[str]:
        """Returns lines for the log: the origin, then a line for each tensor."""
        origin, count = self.origin, len(self.names)
        head = (
            f"{origin['place'] or 'All networks'} from {origin['run']} at {origin['steps']:,} steps: "
            f"{counted(count, 'tensor')}, {counted(origin['num_values'], 'number')}"
        )
        lines = [
            f"  {own} {list(value.shape)}" + (f" from {self.names[own]}" if self.names[own] != own else "")
            for own, value in self.values.items()
        ]
        hidden = [f"  and {count - MAX_LINES} more"] if count > MAX_LINES else []
        return [head, *lines[:MAX_LINES], *hidden]


def _is_below(name: str, place: str) -> bool:
    """Returns whether a tensor belongs to the part with the prefix `place`; '' means all tensors."""
    return not place or name == place or name.startswith(f"{place}.")


def _joined(part: str, inner: str) -> str:
    return f"{part}.{inner}" if part and inner else part or inner


def _form(tensor: torch.Tensor) -> str:
    """Returns shape and dtype, such as '[32, 4] float32'."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _tensors(algorithm: Mapping[str, Any], transforms: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of two states by name, without the progress of the run."""
    named = {**algorithm, **{f"transforms.{name}": value for name, value in transforms.items()}}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "progress"
    }
