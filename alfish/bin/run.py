"""A run's trainer, for a directory to be trained in, or for one opened again: for evaluation, films, and policies."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from alfish import random_state
from alfish.bin import configuration
from alfish.checkpoint import Checkpoints
from alfish.errors import UsageError
from alfish.offline.spaces import spaces_of_checkpoint
from alfish.policy import Policy, load_networks, make_networks
from alfish.specs import action_spec, observation_spec
from alfish.trainer import Trainer, device_named


def configured_trainer(root_dir: str | Path, files: Sequence[str], bindings: Sequence[str]) -> Trainer:
    """The trainer that gin describes now, which will save that configuration in its run directory.

    Args:
      root_dir: of the run, new or to be continued.
      files, bindings: what the user named and gin has read; errors say that a parameter was bound there.

    Raises:
      UsageError: a required parameter is not bound, or nothing reads a bound one.
    """
    text = configuration.text()
    with configuration.complete():
        trainer = Trainer(root_dir)
    configuration.refuse_unreachable(files, bindings)
    trainer.config = {
        configuration.CONFIG_FILE: text,
        configuration.OPERATIVE_FILE: configuration.operative_text(),
    }
    trainer.config_hash = configuration.digest(text)
    return trainer


@contextlib.contextmanager
def open_run(root_dir: str | Path, device: str = "cpu", allow_import: Sequence[str] = ()) -> Iterator[Trainer]:
    """The trainer of a run, built from the configuration saved in it, with nothing loaded and nothing started.

    Within the context gin is configured as the run was; at its end, as it was before, and so are the random generators
    and the number of threads.

    Args:
      root_dir: of the run.
      device: of the trainer.
      allow_import: modules that the configuration may import beside alfish's own, see `configuration.saved`.

    Raises:
      UsageError: there is no run, one that was not built from gin, or one whose configuration imports another module.
    """
    with _configured_as(Path(root_dir), allow_import):
        trainer = Trainer(root_dir, device=device, listeners=[], extra_listeners=[])
        try:
            yield trainer
        finally:
            trainer.close()


@contextlib.contextmanager
def _configured_as(root_dir: Path, allow_import: Sequence[str]) -> Iterator[None]:
    """Within the context gin is configured as a run was; see `open_run`."""
    path = root_dir / configuration.CONFIG_FILE
    if not path.is_file() and Checkpoints(root_dir / "checkpoints").steps():
        raise UsageError(
            f"{root_dir} is a run that was built without gin: build its Trainer again in Python, with this root_dir, "
            "and call load_policy"
        )
    if not path.is_file():
        runs = sorted(str(found.parent) for found in root_dir.parent.glob(f"*/{configuration.CONFIG_FILE}"))
        hint = f"; there are {', '.join(runs[:3])}" if runs else ""
        raise UsageError(f"{root_dir} is not a run of `alfish train`: it has no {configuration.CONFIG_FILE}{hint}")
    with configuration.preserved(), _generators_preserved(), configuration.saved(path, allow_import):
        yield


@contextlib.contextmanager
def _generators_preserved() -> Iterator[None]:
    """Building a trainer seeds everything; that is no business of a program that only wants a policy."""
    num_threads = torch.get_num_threads()
    try:
        with random_state.preserved():
            yield
    finally:
        torch.set_num_threads(num_threads)


def load(
    root_dir: str | Path, checkpoint: str | int = "latest", device: str = "cpu", allow_import: Sequence[str] = ()
) -> Policy:
    """The trained policy of a run.

        policy = alfish.load("runs/ppo")
        action = policy.act(observation)

    No environment is built: networks and transforms are built for the spaces that the checkpoint has. Only for
    checkpoints of older versions, which have none, the environment is built to see its spaces.

    Args:
      root_dir: of `alfish train`.
      checkpoint: 'latest', 'best' or environment steps.
      device: where it acts.
      allow_import: modules that the run's configuration may import, as `["my_lab"]`, beside alfish's own and those
        that this process has imported already.

    Raises:
      UsageError: there is no such run or checkpoint, or the configuration imports another module.
    """
    root_dir = Path(root_dir)
    with _configured_as(root_dir, allow_import):
        checkpoints = Checkpoints(root_dir / "checkpoints")
        steps, state = checkpoints.load(checkpoint, spaces_of_checkpoint)
        spaces = spaces_of_checkpoint(state)
        if spaces is None:
            with contextlib.closing(Trainer(root_dir, device=device, listeners=[], extra_listeners=[])) as trainer:
                trainer.load_policy(checkpoint)
                return trainer.policy()
        factories = {"transforms": (), **configuration.bound("alfish.Trainer", "algorithm", "transforms")}
        if "algorithm" not in factories:
            raise UsageError(f"{root_dir / configuration.CONFIG_FILE} does not bind Trainer.algorithm")
        specs = observation_spec(spaces.observation), action_spec(spaces.action), spaces.reward
        networks = make_networks(factories["algorithm"], factories["transforms"], *specs, device_named(device))
        policy = Policy(*networks, spaces.observation, spaces.action)

        def fill(state: dict[str, Any]) -> None:
            load_networks(*networks, state, root_dir)
            policy.env_steps = int(state["counters"]["env_steps"])

        checkpoints.load(steps, fill)  # again, because an error in what was built between is not one of the file
        return policy
