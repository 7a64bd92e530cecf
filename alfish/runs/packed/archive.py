"""Zip files of runs.

The zip files are not compressed, so unpacking takes no more disk space than the zip file.
"""

import contextlib
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from alfish.errors import RunError, UsageError, first_line
from alfish.runs.files import open_atomically, open_regular, temporary_of, writing
from alfish.runs.packed.manifest import MANIFEST, MAX_MANIFEST, Manifest, of_files, parse

_BLOCK = 1 << 20
_DATE = (1980, 1, 1, 0, 0, 0)  # modification time of all members, so that equal files give equal archives


def pack(path: Path, files: Mapping[str, Path | bytes], about: dict[str, Any]) -> Manifest:
    """Writes an archive; returns its manifest.

    Args:
      path: path of the archive, which is written atomically.
      files: paths or contents of the files, by name in the archive.
      about: JSON values for the manifest.

    Raises:
      DiskError, UsageError: the archive cannot be written.
    """
    manifest = of_files(files, about)
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


def _unpack(path: Path, file: BinaryIO, directory: Path) -> Manifest:
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if MANIFEST not in members:
            raise UsageError(f"{path} is not a packed run: it has no {MANIFEST}; `alfish pack` makes one")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise UsageError(f"{path} is refused: it is compressed, but packed runs are not compressed")
        with archive.open(members[MANIFEST]) as member:
            manifest = parse(member.read(MAX_MANIFEST), str(path))
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
