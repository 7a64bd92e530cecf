"""Source code of a run: an archive of alfish and of the user's modules, from which commands may run later."""

import os
import site
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from alfish.errors import UsageError, first_line
from alfish.runs.files import open_regular

_SUFFIXES = (".py", ".gin", ".cpp", ".h", ".typed")
_DATE = (1980, 1, 1, 0, 0, 0)  # modification time of all members, so that equal code gives equal archives
_LARGEST = 64 << 20  # maximum total size of the files in an archive, in bytes


def snapshot() -> bytes:
    """Returns a zip file with the source files of alfish, and of modules that this process imported from elsewhere.

    A module is left out if it belongs to Python or to an installed package. All source files of a package are archived,
    including files that were not imported, because a later command may import them.
    """
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        # A namespace package may have a file in two places; Python imports it from the first one.
        for name, path in sorted(dict(reversed([*_sources()])).items()):
            member = zipfile.ZipInfo(name, _DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, path.read_bytes())
    return buffer.getvalue()


def extract(path: Path, directory: Path) -> list[str]:
    """Writes the files of an archive into a directory; returns the names of the modules that the directory then has.

    Raises:
      UsageError: the archive does not exist, is damaged or too large, or has names that lead out of the directory.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            if any(name.startswith("/") or ".." in name.split("/") or "\\" in name for name in names):
                raise UsageError(f"{path} is refused: a file of it would be written outside of the directory")
            if sum(member.file_size for member in members) > _LARGEST:
                raise UsageError(f"{path} is refused: it has more than {_LARGEST >> 20} MiB of source code")
            archive.extractall(directory)
    except FileNotFoundError as error:
        raise UsageError(
            f"{path.parent} has no {path.name}; a run writes it with Trainer.extra_listeners = [@CodeSnapshot()]"
        ) from error
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    return sorted({name.partition("/")[0].removesuffix(".py") for name in names})


def _sources() -> Iterator[tuple[str, Path]]:
    """Yields the source files, each with the relative path at which it can be imported from one common directory."""
    for module, place in _own_modules():
        if place.is_file():
            yield f"{module}.py", place
        for folder, below, files in os.walk(place):
            below[:] = [one for one in below if one.isidentifier() and one != "__pycache__"]
            for file in files:
                if file.endswith(_SUFFIXES):
                    yield (Path(module) / Path(folder).relative_to(place) / file).as_posix(), Path(folder, file)


def _own_modules() -> Iterator[tuple[str, Path]]:
    """Yields names and paths of alfish, and of imported modules outside of Python and of installed packages."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or name == "__main__" or spec is None:
            continue
        for place in map(Path, spec.submodule_search_locations or [spec.origin or ""]):
            is_source = place.is_dir() or (place.suffix == ".py" and place.is_file())
            if is_source and (name == "alfish" or not any(place.is_relative_to(one) for one in installed)):
                yield name, place
