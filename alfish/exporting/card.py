"""The card of a packed run: a README.md for the Hugging Face hub. Its front matter has the run's results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import alfish
from alfish.analysis.grouping import ALGORITHM
from alfish.analysis.report import command_of, provenance_of
from alfish.analysis.run_source import RunSeriesSource, read_evaluations
from alfish.analysis.tables import as_markdown
from alfish.errors import counted, significant
from alfish.parameters import differences
from alfish.training.evaluations.evaluation import bootstrap_interval, mean, ranked

TASK = "reinforcement-learning"


def card(directory: Path, films: Sequence[str], is_whole: bool) -> str:
    """Returns the card of a run.

    Args:
      directory: directory of the run.
      films: names of the films in the packed run.
      is_whole: whether the packed run can be continued exactly, see `continuing`.
    """
    run = RunSeriesSource(directory)
    algorithm = differences.name_of(run.bindings.get(ALGORITHM, "")) or "a policy"
    environment = run.environment or "an unknown environment"
    returns = read_evaluations(directory)
    title = f"{algorithm} on {environment}"
    command = command_of(provenance_of(directory))
    parts = [
        _head(title, algorithm, environment, returns),
        f"# {title}\n\nTrained with alfish {alfish.__version__}{f', seed {run.seed}' if run.seed else ''}.",
        _films(films),
        "## Use\n\n```python\nimport alfish\n\n"
        'policy = alfish.load("run.zip")  # or "hf:org/name", or the directory of `alfish unpack`\n'
        "action = policy.act(observation)\n```\n\n```\nalfish evaluate --root_dir=run.zip\n"
        "alfish unpack --input=run.zip --root_dir=runs/mine\n```",
        continuing(is_whole),
        _results(returns),
        f"## Training\n\nThis command repeats it:\n\n```\n{command}\n```" if command else "",
        "Loading this run executes nothing that it contains: weights are tensors, and its configuration may import "
        "only modules of alfish, unless you allow others (`allow_import`).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def continuing(is_whole: bool) -> str:
    """Returns a sentence that says whether a run that continues from the package repeats the original exactly.

    Args:
      is_whole: False if the run has a replay buffer that is not packed.
    """
    if is_whole:
        return (
            "A run that continues from here makes the same updates as the original would have made. It needs the files "
            "that its configuration names, such as recorded data, which are not packed."
        )
    return (
        "The replay buffer is not packed: a run that continues from here has the same networks, optimizers and "
        "counters, but collects new experience first, so its later updates differ from those of the original."
    )


def _head(title: str, algorithm: str, environment: str, returns: Mapping[int, Sequence[float]]) -> str:
    """Returns the front matter in YAML. Values are written as JSON, which is valid YAML."""
    head: dict[str, Any] = {
        "library_name": "alfish",
        "pipeline_tag": TASK,
        "tags": ["alfish", TASK, "deep-reinforcement-learning", algorithm, environment],
    }
    result: dict[str, Any] = {
        "task": {"type": TASK, "name": TASK},
        "dataset": {"name": environment, "type": environment},
        "metrics": [
            {
                "type": "mean_reward",
                "name": f"{which} mean return of {counted(len(values), 'episode')} at {clock:,} steps, "
                f"95 % interval {_interval(values)}",
                "value": round(mean(values), 6),
                "verified": False,
            }
            for which, clock, values in _chosen(returns)
        ],
    }
    if returns:
        head["model-index"] = [{"name": title, "results": [result]}]
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    return "\n".join(["---", *lines, "---"])


def _chosen(returns: Mapping[int, Sequence[float]]) -> list[tuple[str, int, Sequence[float]]]:
    """Returns name, steps and returns of the last evaluation, and of the best evaluation if it is another one."""
    if not returns:
        return []
    last = max(returns)
    best = max(returns, key=lambda clock: (ranked(mean(returns[clock])), clock))
    chosen = [("last", last)] if best == last else [("last", last), ("best", best)]
    return [(which, clock, returns[clock]) for which, clock in chosen]


def _interval(values: Sequence[float]) -> str:
    low, high = map(significant, bootstrap_interval(values))
    return f"[{low}, {high}]"


def _results(returns: Mapping[int, Sequence[float]]) -> str:
    if not returns:
        return "## Results\n\nThe run was not evaluated while it trained."
    rows = [
        (which, f"{clock:,}", significant(mean(values)), _interval(values), f"{len(values):,}")
        for which, clock, values in _chosen(returns)
    ]
    table = as_markdown([("evaluation", "steps", "mean return", "95 % interval", "episodes"), *rows])
    return f"## Results\n\n{table}"


def _films(films: Sequence[str]) -> str:
    tags = [
        f'<video controls src="{name}"></video>' if name.endswith(".mp4") else f"![a video of an episode]({name})"
        for name in films
    ]
    return "\n\n".join(tags)
