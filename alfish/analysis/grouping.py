"""Groups runs with equal configurations, and labels the groups by the bindings in which they differ."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from alfish.analysis.series import SeriesSource
from alfish.errors import UsageError
from alfish.parameters.differences import name_of, tail

ALGORITHM, ENVIRONMENT = "Trainer.algorithm", "Trainer.environment"
# Settings that are ignored, by name or by class, because they do not affect learning: the seed, the machine and the
# directory, the moments at which a run stops, and the files that it writes.
IGNORED = (
    *("Trainer.seed", "Trainer.stop_at", "Trainer.root_dir", "Trainer.device", "Trainer.num_threads"),
    *("Trainer.summary_period", "Trainer.metrics", "Trainer.extra_metrics"),
    *("Evaluate.period", "Evaluate.num_envs", "Evaluate.video_period", "Evaluate.video_episodes"),
    *("Evaluate.video_captions", "ReplayBatches.save", "ReplayBatches.directory"),
)
IGNORED_CLASSES = ("EvaluateSampled", "CheckpointSaver", "Summaries", "Progress", "Profile")
# Settings that are ignored if they list only `Evaluate` and IGNORED_CLASSES.
LISTENERS = ("Trainer.listeners", "Trainer.extra_listeners")
MAX_SHOWN = 4  # largest number of bindings in a label
MAX_LETTERS = 30  # largest number of characters of a binding's value in a label
REFERENCE = re.compile(r"[@%](?:[\w.]+/)*([\w.]+)")

T = TypeVar("T")


@dataclass(frozen=True)
class SeriesGroup:
    """Runs of one configuration in one environment.

    Attributes:
      label: name of the configuration in the legend, the same in all environments.
      environment: environment of the runs; '' means unknown.
      sources: sources of the runs.
      bindings: settings in which the configuration differs from the other groups with the same algorithm.
    """

    label: str
    environment: str
    sources: tuple[SeriesSource, ...]
    bindings: Mapping[str, str]


def group(sources: Sequence[SeriesSource]) -> list[SeriesGroup]:
    """Groups the runs by environment and configuration, in the order in which the user listed the runs.

    Raises:
      UsageError: the environment of a run is unknown, and the other runs have several environments.
    """
    environments = _environments(sources)
    found: list[SeriesGroup] = []
    for environment in dict.fromkeys(environments):
        own = [source for source, one in zip(sources, environments) if one == environment]
        grouped: dict[str, list[SeriesSource]] = {}
        differing: dict[str, Mapping[str, str]] = {}
        for label, members, bindings in _labelled(own):
            grouped.setdefault(label, []).extend(members)
            differing.setdefault(label, bindings)
        found += [
            SeriesGroup(label, environment, tuple(members), differing[label]) for label, members in grouped.items()
        ]
    return found


def note_repeated_seeds(groups: Iterable[SeriesGroup], note: Callable[[str], None]) -> None:
    """Adds notes about runs of one group with equal seeds, because intervals over seeds treat runs as independent."""
    for one in groups:
        names: dict[str, list[str]] = {}
        for source in one.sources:
            if source.seed is not None:
                names.setdefault(source.seed, []).append(source.name)
        for seed, same in names.items():
            if len(same) > 1:
                note(f"{named(one)}: {' and '.join(same)} all have seed {seed}, but count as {len(same)} seeds")


def named(one: SeriesGroup) -> str:
    """Returns the label of a group and its environment, for messages."""
    return f"{one.label} in {one.environment}" if one.environment else one.label


def by_environment(
    texts: Iterable[object], environments: Sequence[str], parse: Callable[[str], T], noun: str, example: str
) -> dict[str, list[T]]:
    """Returns the user's values for each environment, from texts such as '475' and 'CartPole-v1:475'.

    Args:
      texts: texts from the user.
      environments: environments of the runs.
      parse: function that parses the text after the colon; raises ValueError.
      noun: noun for the values in messages, such as 'threshold'.
      example: valid text, such as '475', for messages.

    Raises:
      UsageError: a text cannot be read, or names an environment that the runs do not have.
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
                f"the {noun} {text!r} cannot be parsed; write {example}, or CartPole-v1:{example}"
            ) from error
        if not colon and len(environments) > 1:
            raise UsageError(
                f"the runs are of different environments: say which environment the {noun} {text} is for, as in "
                f"{environments[0]}:{text}"
            )
        if colon and environment not in found:
            raise UsageError(
                f"the {noun} {text!r} belongs to none of the environments of these runs: {', '.join(environments)}"
            )
        found[environment if colon else environments[0]].append(parsed)
    return found


def _environments(sources: Sequence[SeriesSource]) -> list[str]:
    """Returns the environment of each run.

    A table without an environment is assigned the environment that all other runs share.
    """
    known = list(dict.fromkeys(source.environment for source in sources if source.environment))
    if len(known) > 1 and (without := next((one for one in sources if not one.environment), None)):
        raise UsageError(
            f"{without.name} does not state its environment, but the other runs are of {', '.join(known)}; give it a "
            "column 'environment', or plot one environment at a time"
        )
    return [source.environment or (known[0] if known else "") for source in sources]


def _labelled(sources: Sequence[SeriesSource]) -> Iterable[tuple[str, list[SeriesSource], Mapping[str, str]]]:
    """Yields label, runs and differing bindings of each configuration, for runs of one environment."""
    by_algorithm: dict[str | None, list[SeriesSource]] = {}
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
    together: dict[tuple[str, tuple], list[SeriesSource]] = {}
    for source in sources:
        label, bindings = labels.get(id(source), (source.label or "", {}))
        together.setdefault((label, tuple(bindings.items())), []).append(source)
    names = [label for label, _ in together]
    for number, ((label, items), members) in enumerate(together.items()):
        # Configurations stay separate even if their shortened labels are equal.
        copies = names[:number].count(label)
        yield (f"{label} ({copies + 1})" if copies else label), members, dict(items)


def differences(configurations: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns, for each configuration, the bindings that differ between configurations and may affect learning.

    Bindings that some configurations lack are returned only if they separate configurations that are otherwise equal.
    For example, if a binding selects different classes, the settings of the classes are not needed.
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
    """Returns whether a binding cannot affect learning."""
    name = tail(name.rpartition("/")[2], 2)
    if name in LISTENERS:
        return {tail(one, 1) for one in REFERENCE.findall(value)} <= {"Evaluate", *IGNORED_CLASSES}
    return name in IGNORED or name.partition(".")[0] in IGNORED_CLASSES


def _count(configurations: Sequence[Mapping[str, str]], names: Sequence[str]) -> int:
    return len({tuple(one.get(name) for name in names) for one in configurations})


def _fitted(value: str) -> str:
    return value if len(value) <= MAX_LETTERS else f"{value[: MAX_LETTERS - 2]}.."
