"""Packs the files that are needed to evaluate, play and continue a run, and adds a card."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import alfish
from alfish.errors import RunError, UsageError
from alfish.exporting.card import card
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.runs import contents
from alfish.runs.checkpoints import CODE_FILE, RUN_FILE, Checkpoints, checkpoints_of
from alfish.runs.packed import archive
from alfish.runs.packed.manifest import CARD, Manifest, check_names

# Files that are packed in addition to checkpoints, replay buffer, evaluations and films. The log and the files of
# TensorBoard are not packed.
FILES = (CONFIG_FILE, OPERATIVE_FILE, RUN_FILE, CODE_FILE, "provenance.json", "done", "metrics.csv")
FILMS = (".mp4", ".gif")
CHECKPOINT = re.compile(r"checkpoints/checkpoint-(\d+)\.pt")
PREVIEW = "replay.mp4"  # name of the film that the hub shows


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
