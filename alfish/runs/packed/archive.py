"""Zip files of runs, and their manifests: the lists of their files, with sizes and checksums.

The zip files are not compressed, so unpacking takes no more disk space than the zip file.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from alfish.errors import RunError, UsageError, first_line
from alfish.runs.files import open_atomically, open_regular, sha256, temporary_of, writing

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST = 2**24  # maximum bytes, enough for about a hundred thousand files
CARD = "README.md"
# A relative path whose names have only the listed characters; no name begins with a dot.
_NAME = re.compile(r"(?!.*(^|/)\.)[\w\-. +=,()]+(/[\w\-. +=,()]+)*", re.ASCII)
_BLOCK = 1 << 20
_DATE = (1980, 1, 1, 0, 0, 0)  # modification time of all members, so that equal files give equal archives


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


def pack(path: Path, files: Mapping[str, Path | bytes], about: dict[str, Any]) -> Manifest:
    """Writes an archive; returns its manifest.

    Args:
      path: path of the archive, which is written atomically.
      files: paths or contents of the files, by name in the archive.
      about: JSON values for the manifest.

    Raises:
      DiskError, UsageError: the archive cannot be written.
    """
    manifest = manifest_of(files, about)
    with open_atomically(path) as target, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST, _DATE), manifest.to_json())
        for name, source in files.items():
            with archive.open(zipfile.ZipInfo(name, _DATE), "w", force_zip64=True) as member:
                if isinstance(source, bytes):
                    member.write(source)
                else:
                    with open_regular(source) as content:
                        shutil.copyfileobj(content, member, _BLOCK)
    return manifest


def unpack(path: Path, directory: Path) -> Manifest:
    """Writes the files of an archive into a directory, which must be new; returns the manifest.

    Only files in the manifest are written, each inside the directory and with the checksum in the manifest. The
    directory appears when it is complete.

    Raises:
      UsageError: the archive is truncated, damaged or not a packed run, or the directory exists and is not empty.
      DiskError: the directory cannot be written.
    """
    with new_directory(directory) as making:
        return unpack_into(path, making)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `directory` when the block ends without an error.

    Raises:
      UsageError: the directory exists and is not empty.
      DiskError: the directory cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} is not empty; choose a new directory")
    directory = directory.resolve()
    making = temporary_of(directory)
    try:
        with writing(directory):
            making.mkdir(parents=True)
        yield making
        with writing(directory):
            os.replace(making, directory)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def unpack_into(path: Path, directory: Path) -> Manifest:
    """Writes the files of an archive into an empty directory; see `unpack`."""
    try:
        with open_regular(path) as file:
            return _unpack(path, file, directory)
    except (UsageError, RunError):
        raise
    except zipfile.BadZipFile as error:
        raise UsageError(
            f"{path} is truncated or not a zip file ({first_line(error)}); download or copy it again"
        ) from error
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except (OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error


def parse_manifest(content: bytes, where: str) -> Manifest:
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


def manifest_of(files: Mapping[str, Path | bytes], about: dict[str, Any]) -> Manifest:
    """Returns the manifest of files, each of which is given as its path or its content.

    Raises:
      UsageError: `parse_manifest` would refuse the manifest, because of a file's name or the number of files.
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
    """Raises UsageError if `parse_manifest` would refuse the name of a file."""
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
            manifest = parse_manifest(file.read(MAX_MANIFEST), where)
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


def _unpack(path: Path, file: BinaryIO, directory: Path) -> Manifest:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if MANIFEST not in members:
            raise UsageError(f"{path} is not a packed run: it has no {MANIFEST}; `alfish pack` makes one")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise UsageError(f"{path} is refused: it is compressed, but packed runs are not compressed")
        with archive.open(members[MANIFEST]) as member:
            manifest = parse_manifest(member.read(MAX_MANIFEST), str(path))
        for name in manifest.files:
            if name not in members:
                raise UsageError(f"{path} is damaged: {name} is missing; download or copy it again")
        if manifest.size > os.fstat(file.fileno()).st_size:
            raise UsageError(f"{path} is refused: its files are larger than the archive")
        for name, entry in manifest.files.items():
            target = directory / name
            digest, left = hashlib.sha256(), entry.size + 1
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            # The file is closed within `writing`, because some file systems report a full disk only at closing.
            with archive.open(members[name]) as member, writing(target), open(target, "xb") as output:
                while left > 0 and (block := member.read(min(left, _BLOCK))):
                    digest.update(block)
                    left -= len(block)
                    output.write(block)
            manifest.check(name, entry.size + 1 - left, digest.hexdigest(), str(path))
        with writing(directory / MANIFEST):
            (directory / MANIFEST).write_text(manifest.to_json())
        return manifest
