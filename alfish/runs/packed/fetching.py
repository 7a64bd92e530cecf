"""Finds a run: in a directory, a zip file, or a repository of the Hugging Face hub.

Repositories are named as `hf:org/name` or `hf:org/name@revision`.
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alfish.errors import RunError, UsageError, first_line
from alfish.runs.files import writing
from alfish.runs.packed import archive
from alfish.runs.packed.archive import CARD, MANIFEST, Manifest, check_directory

PREFIX = "hf:"  # prefix of the names of repositories
SUFFIX = ".zip"
_NAME = re.compile(r"hf:([\w\-.]+/[\w\-.]+)(?:@([\w\-./]+))?", re.ASCII)


def download(name: str) -> Path:
    """Downloads a packed run, and returns its directory in the hub's cache. Only this function uses the network.

    Args:
      name: name of the repository, `hf:org/name`, or `hf:org/name@revision` with a branch, tag or commit.

    Raises:
      UsageError: the extra 'hub' is missing, the name does not have this form, or the repository has no packed run.
      RunError: the run cannot be downloaded.
    """
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise UsageError(f"{name!r} is not a repository of the hub; write hf:org/name or hf:org/name@revision")
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"{name} needs the extra 'hub': pip install 'alfish[hub]'") from error
    repository, revision = matched.groups()
    try:
        directory = Path(huggingface_hub.snapshot_download(repository, revision=revision))
    except Exception as error:  # errors of the network, the hub, or the disk
        raise RunError(f"{name} cannot be downloaded: {first_line(error)}") from error
    check_directory(directory, name)
    return directory


@contextlib.contextmanager
def as_directory(name: str | Path) -> Iterator[Path]:
    """Yields the directory of a run, for reading only.

    A zip file is unpacked into a temporary directory that is removed on exit.

    Args:
      name: name of a directory, a packed run (`run.zip`), or a repository (`hf:org/name`).

    Raises:
      UsageError: the archive or repository has no packed run; see `archive.unpack` and `download`.
    """
    if str(name).startswith(PREFIX):
        yield download(str(name))
    elif is_packed(name):
        with tempfile.TemporaryDirectory(prefix="alfish-") as temporary:
            directory = Path(temporary) / (Path(name).stem.strip(".") or "run")
            directory.mkdir()
            archive.unpack_into(Path(name), directory)
            try:
                yield directory
            except UsageError as error:  # the user knows the archive's name, not the temporary directory's
                error.args = (str(error).replace(str(directory), str(name)),)
                raise
    else:
        yield Path(name)


def is_packed(name: str | Path) -> bool:
    """Returns whether a name refers to a packed run or a repository, not to a directory."""
    return str(name).startswith(PREFIX) or Path(name).suffix == SUFFIX and Path(name).is_file()


def unpack(name: str, directory: Path) -> Manifest:
    """Writes the files of a packed run into a new directory; returns their manifest.

    Args:
      name: name of a zip file, or of a repository, such as `hf:org/name`.
      directory: directory that is new or empty.

    Raises:
      UsageError: the archive or repository has no packed run, or the directory is not empty.
    """
    if not name.startswith(PREFIX):
        return archive.unpack(Path(name), directory)
    source = download(name)
    manifest = check_directory(source, name)
    with archive.new_directory(directory) as making:
        for file in (MANIFEST, *manifest.files):
            if file == CARD and not (source / file).is_file():  # the card may have been edited on the hub, or removed
                continue
            with writing(making / file):
                (making / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file, making / file)
    return manifest
