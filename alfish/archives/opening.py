"""The directory of a run, wherever the run is: a directory, a zip file, or a repository of the hub."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from alfish.archives import archive, hub
from alfish.archives.manifest import CARD, MANIFEST, Manifest, check_directory
from alfish.errors import UsageError
from alfish.runs.files import writing

SUFFIX = ".zip"


@contextlib.contextmanager
def as_directory(name: str | Path) -> Iterator[Path]:
    """Yields the directory of a run that is only read.

    A zip file is unpacked into a temporary directory, which is removed at the end.

    Args:
      name: of a directory, a packed run (`run.zip`), or a repository (`hf:org/name`).

    Raises:
      UsageError: the archive or repository has no packed run; see `archive.unpack` and `hub.download`.
    """
    if str(name).startswith(hub.PREFIX):
        yield hub.download(str(name))
    elif is_packed(name):
        with tempfile.TemporaryDirectory(prefix="alfish-") as temporary:
            directory = Path(temporary) / (Path(name).stem.strip(".") or "run")
            directory.mkdir()
            archive.unpack_into(Path(name), directory)
            try:
                yield directory
            except UsageError as error:  # the user knows the archive, not the directory
                error.args = (str(error).replace(str(directory), str(name)),)
                raise
    else:
        yield Path(name)


def is_packed(name: str | Path) -> bool:
    """Returns whether a name is that of a packed run or of a repository, and not of a directory."""
    return str(name).startswith(hub.PREFIX) or Path(name).suffix == SUFFIX and Path(name).is_file()


def unpack(name: str, directory: Path) -> Manifest:
    """Writes the files of a packed run into a new directory; returns their manifest.

    Args:
      name: of a zip file, or of a repository as `hf:org/name`.
      directory: new, or empty.

    Raises:
      UsageError: the archive or repository has no packed run, or the directory is not empty.
    """
    if not name.startswith(hub.PREFIX):
        return archive.unpack(Path(name), directory)
    source = hub.download(name)
    manifest = check_directory(source, name)
    with archive.new_directory(directory) as making:
        for file in (MANIFEST, *manifest.files):
            if file == CARD and not (source / file).is_file():  # it may be edited on the hub, and removed
                continue
            with writing(making / file):
                (making / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file, making / file)
    return manifest
