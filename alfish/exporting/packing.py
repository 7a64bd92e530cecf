"""Packs the files that are needed to evaluate, play and continue a run, and adds a card.

The card is a README.md for the Hugging Face hub. Its front matter has the results of the run.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import alfish
from alfish.analysis.grouping import ALGORITHM
from alfish.analysis.report import command_of, provenance_of
from alfish.analysis.run_source import RunSeriesSource, read_evaluations
from alfish.analysis.tables import as_markdown
from alfish.errors import RunError, UsageError, counted, significant
from alfish.parameters import differences
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.runs import contents
from alfish.runs.checkpoints import CODE_FILE, RUN_FILE, Checkpoints, checkpoints_of
from alfish.runs.packed import archive
from alfish.runs.packed.archive import CARD, Manifest, check_names
from alfish.training.evaluations.evaluation import bootstrap_interval, mean, ranked

# Files that are packed in addition to checkpoints, replay buffer, evaluations and films. The log and the files of
# TensorBoard are not packed.
FILES = (CONFIG_FILE, OPERATIVE_FILE, RUN_FILE, CODE_FILE, "provenance.json", "done", "metrics.csv")
FILMS = (".mp4", ".gif")
CHECKPOINT = re.compile(r"checkpoints/checkpoint-(\d+)\.pt")
PREVIEW = "replay.mp4"  # name of the film that the hub shows
TASK = "reinforcement-learning"  # kind of model on the hub


def pack(root_dir: Path, output: Path, replay: bool = False) -> Manifest:
    """Packs a run into a zip file; returns the manifest.

    Args:
      root_dir: directory of the run.
      output: path of the file.
      replay: whether to pack the replay buffer, too; if so, a continued run is bit-identical to the original.

    Raises:
      UsageError: the directory is not a run, or the run has no checkpoint or no replay buffer to pack.
      RunError: training removed a file while the run was packed.
    """
    if not os.path.lexists(root_dir / CONFIG_FILE):
        raise UsageError(f"{root_dir} is not a run of `alfish train`: it has no {CONFIG_FILE}")
    if not Checkpoints(root_dir / "checkpoints").steps():
        raise UsageError(f"{root_dir} has no checkpoint yet; pack it after the first checkpoint is saved")
    if replay and not _with_rows(root_dir):
        raise UsageError(
            f"{root_dir} has no replay buffer to pack: the algorithm has none, or ReplayBatches.save is False; leave "
            "--replay out"
        )
    is_whole = replay or not _with_rows(root_dir)
    try:
        names = [path.relative_to(root_dir).as_posix() for path in _files(root_dir, replay)]
        check_names(names)
        films = [name for name in names if name.startswith("films/")]
        files: dict[str, Path | bytes] = {name: _source(root_dir, name) for name in names}
        previews = [root_dir / name for name in films if name.endswith(".mp4")]
        if previews:
            files[PREVIEW] = max(previews, key=lambda path: path.stat().st_mtime)
        files[CARD] = card(root_dir, films, is_whole).encode()
        about = {
            "alfish_version": alfish.__version__,
            "checkpoints": [max(int(one[1]) for one in map(CHECKPOINT.fullmatch, names) if one)],
            "has_replay": replay,
            "continues_equally": is_whole,
        }
        return archive.pack(output, files, about)
    except FileNotFoundError as error:
        raise RunError(f"{error.filename} was removed by training while the run was packed; try again") from error


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
    returns = read_evaluations(directory, run.evaluation)
    which = "" if run.bindings.get("Trainer.policies", "None") == "None" else ', policy="..."'
    title = f"{algorithm} on {environment}"
    command = command_of(provenance_of(directory))
    parts = [
        _head(title, algorithm, environment, returns),
        f"# {title}\n\nTrained with alfish {alfish.__version__}{f', seed {run.seed}' if run.seed else ''}.",
        _films(films),
        "## Use\n\n```python\nimport alfish\n\n"
        f'policy = alfish.load("run.zip"{which})  # or "hf:org/name", or the directory of `alfish unpack`\n'
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


def _files(root_dir: Path, replay: bool) -> Iterator[Path]:
    """Yields the files to pack, including the files of other learners."""
    yield from (root_dir / name for name in FILES if os.path.lexists(root_dir / name))
    checkpoints, replays = checkpoints_of(root_dir), checkpoints_of(root_dir, "replay")
    rows = _with_rows(root_dir)[-1:] if replay else []
    # Checkpoints are read before they are packed, to detect damage while other checkpoints may still exist.
    steps = {checkpoints.load("latest", mmap=True)[0], *(checkpoints.load(step, mmap=True)[0] for step in rows)}
    if checkpoints.best() in checkpoints.steps():
        steps.add(checkpoints.load("best", mmap=True)[0])
        yield checkpoints.directory / "best.json"
    yield from (checkpoints.path(step) for step in sorted(steps))
    yield from (replays.path(replays.load(step, mmap=True)[0]) for step in rows)
    yield from sorted((root_dir / "eval").glob("*.csv"))
    contents.check_inside(root_dir, "films")  # a link could lead the search out of the run
    films = (root_dir / "films").rglob("[!.]*")  # a name that begins with a dot belongs to an unfinished film
    yield from sorted(path for path in films if path.suffix in FILMS and path.is_file())
    for learner in sorted(root_dir.glob("ranks/rank-???")):
        yield from _files(learner, replay)


def _source(root_dir: Path, name: str) -> Path | bytes:
    """Returns the path of a large file, or the content of a small file, because training may write to it meanwhile.

    Raises:
      UsageError: the path leads out of the run, or is not a regular file.
    """
    path = root_dir / name
    contents.check_inside(root_dir, name)
    if path.suffix in (".pt", *FILMS) or name == CODE_FILE:
        return path
    if (found := contents.content(root_dir, name, contents.MAX_TABLE)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return found


def _with_rows(root_dir: Path) -> list[int]:
    """Returns the numbers of steps of the checkpoints whose replay buffer was saved, ascending."""
    rows = Checkpoints(root_dir / "replay").steps()
    return [step for step in Checkpoints(root_dir / "checkpoints").steps() if step in rows]


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
