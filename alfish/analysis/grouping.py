"""Groups of runs with one configuration, found from the bindings in which the runs differ."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from alfish.analysis.series import Source
from alfish.errors import UsageError
from alfish.parameters.differences import name_of, tail

ALGORITHM, ENVIRONMENT = "Trainer.algorithm", "Trainer.environment"
# Settings that cannot change what is learned, by name or by class: the seed, where and in which parts a run is trained,
# and what it writes.
IGNORED = (
    *("Trainer.seed", "Trainer.stop_at", "Trainer.root_dir", "Trainer.device", "Trainer.num_threads"),
    *("Trainer.summary_period", "Trainer.metrics", "Trainer.extra_metrics"),
    *("Evaluate.period", "Evaluate.num_envs", "Evaluate.video_period", "Evaluate.video_episodes"),
    *("Evaluate.video_captions", "ReplayBatches.save", "ReplayBatches.directory"),
)
IGNORED_CLASSES = ("CheckpointSaver", "Summaries", "Progress", "Profile")
LISTENERS = ("Trainer.listeners", "Trainer.extra_listeners")  # ignored unless they have one of other classes
MAX_SHOWN = 4  # bindings in a label
MAX_LETTERS = 30  # of a value in a label
REFERENCE = re.compile(r"[@%](?:[\w.]+/)*([\w.]+)")

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Runs of one configuration in one environment.

    Attributes:
      label: for the legend; equal in all environments.
      environment: of the runs; '' if it is unknown.
      sources: of the runs.
      bindings: those in which the configuration differs from that of other groups with this algorithm.
    """

    label: str
    environment: str
    sources: tuple[Source, ...]
    bindings: Mapping[str, str]


def group(sources: Sequence[Source]) -> list[Group]:
    """Returns the runs by environment and configuration, in the order in which they were named.

    Raises:
      UsageError: the environment of a run is not known, while others have several.
    """
    environments = _environments(sources)
    found: list[Group] = []
    for environment in dict.fromkeys(environments):
        own = [source for source, one in zip(sources, environments) if one == environment]
        grouped: dict[str, list[Source]] = {}
        differing: dict[str, Mapping[str, str]] = {}
        for label, members, bindings in _labelled(own):
            grouped.setdefault(label, []).extend(members)
            differing.setdefault(label, bindings)
        found += [Group(label, environment, tuple(members), differing[label]) for label, members in grouped.items()]
    return found


def note_repeated_seeds(groups: Iterable[Group], note: Callable[[str], None]) -> None:
    """Notes runs of one group with the same seed, which intervals over seeds take for independent ones."""
    for one in groups:
        names: dict[str, list[str]] = {}
        for source in one.sources:
            if source.seed is not None:
                names.setdefault(source.seed, []).append(source.name)
        for seed, same in names.items():
            if len(same) > 1:
                note(f"{named(one)}: {' and '.join(same)} have seed {seed}, and count as {len(same)} seeds")


def named(one: Group) -> str:
    """Returns the label of a group and its environment, for messages."""
    return f"{one.label} in {one.environment}" if one.environment else one.label


def by_environment(
    texts: Iterable[object], environments: Sequence[str], parse: Callable[[str], T], noun: str, example: str
) -> dict[str, list[T]]:
    """Returns what the user has said of each environment, in texts such as '475' and 'CartPole-v1:475'.

    Args:
      texts: of the user.
      environments: of the runs.
      parse: reads what stands behind the colon; raises ValueError.
      noun, example: for messages.

    Raises:
      UsageError: a text cannot be read, or is not of one environment of the runs.
    """
    found: dict[str, list[T]] = {environment: [] for environment in environments}
    for text in map(str, texts):
        environment, colon, value = text.rpartition(":")
        try:
            parsed = parse(value)
            if parsed != parsed:  # nan
                raise ValueError(value)
        except ValueError as error:
            raise UsageError(
                f"the {noun} {text!r} cannot be read; write {example}, or CartPole-v1:{example}"
            ) from error
        if not colon and len(environments) > 1:
            raise UsageError(
                f"the runs are of different environments: say of which the {noun} {text} is, as "
                f"{environments[0]}:{text}"
            )
        if colon and environment not in found:
            raise UsageError(f"the {noun} {text!r} is of no environment of these runs: {', '.join(environments)}")
        found[environment if colon else environments[0]].append(parsed)
    return found


def _environments(sources: Sequence[Source]) -> list[str]:
    """Returns the environment of each run; the only one of the others for a table that names none."""
    known = list(dict.fromkeys(source.environment for source in sources if source.environment))
    if len(known) > 1 and (without := next((one for one in sources if not one.environment), None)):
        raise UsageError(
            f"{without.name} does not say its environment, and the other runs are of {', '.join(known)}; "
            "give it a column 'environment', or plot one environment at a time"
        )
    return [source.environment or (known[0] if known else "") for source in sources]


def _labelled(sources: Sequence[Source]) -> Iterable[tuple[str, list[Source], Mapping[str, str]]]:
    """Yields label, runs and differing bindings of each configuration among runs of one environment."""
    by_algorithm: dict[str | None, list[Source]] = {}
    for source in sources:
        if source.label is None:
            by_algorithm.setdefault(name_of(source.bindings.get(ALGORITHM, "")) or None, []).append(source)
    labels: dict[int, tuple[str, dict[str, str]]] = {}
    for algorithm, members in by_algorithm.items():
        for source, bindings in zip(members, differences([source.bindings for source in members])):
            shown = [f"{name}={_fitted(value)}" for name, value in bindings.items()]
            more = [f"{len(shown) - MAX_SHOWN} more"] if len(shown) > MAX_SHOWN else []
            says_algorithm = any(name.startswith(f"{algorithm}.") for name in bindings)
            needs_algorithm = not shown or (len(by_algorithm) > 1 and not says_algorithm)
            words = [algorithm or "run"] if needs_algorithm else []
            labels[id(source)] = ", ".join([*words, *shown[:MAX_SHOWN], *more]), bindings
    together: dict[tuple[str, tuple], list[Source]] = {}
    for source in sources:
        label, bindings = labels.get(id(source), (source.label or "", {}))
        together.setdefault((label, tuple(bindings.items())), []).append(source)
    names = [label for label, _ in together]
    for number, ((label, items), members) in enumerate(together.items()):
        # Two configurations whose labels are cut to the same text stay two.
        copies = names[:number].count(label)
        yield (f"{label} ({copies + 1})" if copies else label), members, dict(items)


def differences(configurations: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns the bindings of each configuration that are not the same in all of them and may change what is learned.

    A binding that some of them do not have counts only if the others do not tell all configurations apart: where one
    value chooses a part, the settings of this part say nothing more.
    """
    configurations = [{n: v for n, v in one.items() if not _is_ignored(n, v)} for one in configurations]
    names = list(dict.fromkeys(n for one in configurations for n in one))
    differing = [name for name in names if len({one.get(name) for one in configurations}) > 1]
    everywhere = [name for name in differing if all(name in one for one in configurations)]
    partial = [name for name in differing if name not in everywhere]
    kept = list(everywhere)
    for name in partial:
        if _count(configurations, kept) == _count(configurations, differing):
            break
        if _count(configurations, [*kept, name]) > _count(configurations, kept):
            kept.append(name)
    return [{name: one[name] for name in kept if name in one} for one in configurations]


def _is_ignored(name: str, value: str) -> bool:
    """Returns True if a binding cannot change what is learned."""
    name = tail(name.rpartition("/")[2], 2)
    if name in LISTENERS:
        return {tail(one, 1) for one in REFERENCE.findall(value)} <= {"Evaluate", *IGNORED_CLASSES}
    return name in IGNORED or name.partition(".")[0] in IGNORED_CLASSES


def _count(configurations: Sequence[Mapping[str, str]], names: Sequence[str]) -> int:
    return len({tuple(one.get(name) for name in names) for one in configurations})


def _fitted(value: str) -> str:
    return value if len(value) <= MAX_LETTERS else f"{value[: MAX_LETTERS - 2]}.."
