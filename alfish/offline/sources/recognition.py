"""Identifies files that no source can read: failed downloads, compressed files, formats of other libraries."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from alfish.errors import UsageError

BEGINNINGS = {  # kind of file, and the remedy, by a file's first bytes
    b"version https://git-lfs.": "is a Git LFS pointer instead of the data; download them with `git lfs pull`",
    b"\x1f\x8b": "is compressed with gzip; unpack it with `gunzip`",
    b"BZh": "is compressed with bzip2; unpack it with `bunzip2`",
    b"\xfd7zXZ": "is compressed with xz; unpack it with `unxz`",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it with `unzstd`",
}
HTML = (b"<!doctype html", b"<html")
PAGE = "docs/offline.md, 'Another format',"


class Foreign(NamedTuple):
    """A format of another library."""

    what: str  # name of the library's data
    reader: str  # package that returns the data as arrays
    schemes: tuple[str, ...]  # names that a user may give the format

    def __str__(self) -> str:
        return f"{self.what} are not read by alfish; {PAGE} shows how to write them as npz:FILE with {self.reader}"


ROBOMIMIC = Foreign("robomimic's HDF5 files", "h5py", ("robomimic", "robosuite", "mimicgen", "libero", "isaaclab"))
TIANSHOU = Foreign("Tianshou's HDF5 buffers", "h5py", ("tianshou",))
RLDS = Foreign("RLDS data sets (TFRecord)", "tensorflow_datasets", ("rlds", "tfds", "tfrecord", "tfrecords", "oxe"))
TORCHRL = Foreign("TorchRL's memory-mapped data sets", "tensordict", ("torchrl", "tensordict", "memmap"))
RLLIB = Foreign("RLlib's JSON files", "ray", ("rllib", "ray", "json"))
TABLE = Foreign("tables of rows", "pandas", ("parquet", "csv", "arrow", "hf", "huggingface", "datasets", "pandas"))
FOREIGN = (ROBOMIMIC, TIANSHOU, RLDS, TORCHRL, RLLIB, TABLE)
SUFFIXES = {".json": RLLIB, ".jsonl": RLLIB, ".parquet": TABLE, ".csv": TABLE, ".arrow": TABLE, ".memmap": TORCHRL}


def foreign_scheme(scheme: str) -> Foreign | None:
    """Returns the format with the name `scheme`; None if it is not known."""
    return next((foreign for foreign in FOREIGN if scheme.lower() in foreign.schemes), None)


def foreign_file(name: str) -> Foreign | None:
    """Returns the format of a file by its name; None if it is not known."""
    path = Path(name)
    return RLDS if ".tfrecord" in path.name else SUFFIXES.get(path.suffix)


def foreign_hdf5(names: Iterable[str]) -> Foreign | None:
    """Returns the format of an HDF5 file by the names of its entries; None if it is not known."""
    names = {*names}
    if {"obs", "act", "rew"} <= names:
        return TIANSHOU
    return ROBOMIMIC if "data" in names and names <= {"data", "mask"} else None


def said_of_directory(path: Path) -> str:
    """Returns a clause about the kind of a directory, or about its contents."""
    for inside, what in (
        ("data_set.json", f"it is a data set of alfish; write alfish:{path}"),
        ("meta/info.json", f"it is a LeRobot data set; write lerobot:{path}"),
        ("replay", f"it is a run of alfish; write run:{path}"),
        (
            "data/metadata.json",
            "it is a Minari data set; write minari: followed by its path relative to MINARI_DATASETS_PATH",
        ),
    ):
        if (path / inside).exists():
            return what
    names = sorted(entry.name for entry in path.iterdir())
    found = next(filter(None, map(foreign_file, names)), None)
    return str(found) if found else f"it holds {', '.join(names[:5]) or 'nothing'}"


def check_beginning(path: Path) -> None:
    """Checks that a file is neither a web page, nor a Git LFS pointer, nor compressed.

    Raises:
      UsageError: the file is one of these; the message names the remedy.
    """
    begin = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # reading the file later reports the error
        begin = file.read(256)
    for start, what in BEGINNINGS.items():
        if begin.startswith(start):
            raise UsageError(f"{path} {what}")
    if begin.lstrip().lower().startswith(HTML):
        raise UsageError(
            f"{path} is an HTML page, which a server sent instead of the file; check the address and whether it needs "
            "a login, and download it again"
        )
