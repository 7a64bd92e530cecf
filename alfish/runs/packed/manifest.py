"""The list of a packed run's files, with their sizes and checksums."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from alfish.errors import UsageError
from alfish.runs.files import open_regular, sha256

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST = 2**24  # maximum bytes, enough for about a hundred thousand files
CARD = "README.md"
# A relative path whose names have only the listed characters; no name begins with a dot.
_NAME = re.compile(r"(?!.*(^|/)\.)[\w\-. +=,()]+(/[\w\-. +=,()]+)*", re.ASCII)


class PackedFile(NamedTuple):
    """Size in bytes and SHA-256 sum of a file."""

    size: int
    sha256: str


class Manifest(NamedTuple):
    """Files of a packed run.

    Attributes:
      files: size and checksum of each file, by its path relative to the run's directory.
      about: JSON values: version of alfish, steps of the checkpoint, and whether the replay buffer is packed.
    """

    files: dict[str, PackedFile]
    about: dict[str, Any]

    @property
    def size(self) -> int:
        """Total size of all files, in bytes."""
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> str:
        files = {name: entry._asdict() for name, entry in self.files.items()}
        return json.dumps({"format": FORMAT, **self.about, "files": files}, indent=1) + "\n"

    def check(self, name: str, size: int, checksum: str, where: str) -> None:
        """Raises UsageError if a file differs from the packed file."""
        if self.files[name] != (size, checksum):
            raise UsageError(f"{where} is damaged: {name} is not the file that was packed; download or copy it again")


def parse(content: bytes, where: str) -> Manifest:
    """Returns a manifest that `Manifest.to_json` made.

    Raises:
      UsageError: the content is not a manifest, has a newer format, or names a file outside of the run's directory.
    """
    try:
        values = json.loads(content)
        form, files = values.pop("format"), values.pop("files")
        if isinstance(form, int) and form > FORMAT:
            raise UsageError(f"{where} was packed by a newer version of alfish (format {form}); update alfish")
        entries = {name: PackedFile(int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{where} is not a packed run: its {MANIFEST} cannot be read") from error
    for name, entry in entries.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise UsageError(f"{where} is refused: it lists the file {name!r}, which cannot be part of a run")
        if entry.size < 0:
            raise UsageError(f"{where} is refused: {name} has the size {entry.size}")
    return Manifest(entries, values)


def of_files(files: Mapping[str, Path | bytes], about: dict[str, Any]) -> Manifest:
    """Returns the manifest of files, each of which is given as its path or its content.

    Raises:
      UsageError: `parse` would refuse the manifest, because of a file's name or the number of files.
    """
    check_names(files)
    entries = {}
    for name, source in files.items():
        if isinstance(source, bytes):
            entries[name] = PackedFile(len(source), hashlib.sha256(source).hexdigest())
        else:
            entries[name] = PackedFile(source.stat().st_size, sha256(source))
    manifest = Manifest(entries, about)
    if len(manifest.to_json()) > MAX_MANIFEST:
        raise UsageError(f"the run has {len(entries):,} files, too many to pack; remove old evaluations from eval/")
    return manifest


def check_names(names: Iterable[str]) -> None:
    """Raises UsageError if `parse` would refuse the name of a file."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be packed: names may have ASCII letters, digits, spaces and -_.+=,() and may not "
                "begin with a dot; rename the file"
            )


def check_directory(directory: Path, where: str) -> Manifest:
    """Checks a directory of a packed run, and returns its manifest. The card may have been edited.

    Raises:
      UsageError: the directory has no manifest, or a file is missing or differs from the packed file.
    """
    try:
        with open_regular(directory / MANIFEST) as file:
            manifest = parse(file.read(MAX_MANIFEST), where)
        for name in manifest.files:
            path = directory / name
            if name == CARD:
                continue
            manifest.check(name, path.stat().st_size, sha256(path), where)
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(directory)
        raise UsageError(f"{where} is not a complete packed run: it has no {missing}") from error
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror or error}") from error
    return manifest
