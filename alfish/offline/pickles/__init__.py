"""A reader of pickles that does not execute them.

A pickle is a program for a small stack machine. Its instructions build values, and call functions by name. `machine`
runs only the instructions that build values. Names in a short list become inert stand-ins (`stand_ins`); all other
names are refused. The file cannot create numpy objects directly: an array stays a stand-in until the whole file was
read. The array is then made from bytes whose number matches its shape and dtype (`Resolver`).
"""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from alfish.errors import UsageError
from alfish.offline.pickles.faults import CopyBudget, PickleError, RefusedError, shown
from alfish.offline.pickles.machine import Machine
from alfish.offline.pickles.stand_ins import DType, Inert, Resolver, numpy_number

__all__ = ["DType", "Inert", "PickleError", "RefusedError", "load", "numpy_number", "read", "shown"]


def read(file: BinaryIO, inert: Iterable[str] = ()) -> Any:
    """Returns the object that a pickle holds.

    Args:
      file: file that is open for reading, at its beginning.
      inert: names `module.name` of the classes that become `Inert` objects.

    Raises:
      RefusedError: the pickle asks for a name that is not allowed.
      ValueError, LookupError, TypeError: the pickle is damaged, or does not hold data.
    """
    copies = CopyBudget(file.seek(0, io.SEEK_END))
    file.seek(0)
    return Resolver(copies).resolved(Machine(inert, copies).run(file))


def load(path: Path, what: str, inert: Iterable[str]) -> Any:
    """Returns the object in a file.

    Args:
      path: path of the file.
      what: name of the expected format, for messages.
      inert: names `module.name` of the classes that become `Inert` objects.

    Raises:
      UsageError: the file is cut off, is not a pickle of data, or asks for a name that is not allowed.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            return read(file, inert)
        except RefusedError as error:
            raise UsageError(
                f"{path} is refused: it tries to load {error}, which {what} does not need; nothing in it was executed"
            ) from error
        except (ValueError, TypeError, LookupError, MemoryError) as error:
            if file.tell() == size and not isinstance(error, PickleError):
                raise UsageError(
                    f"{path} is truncated after {size:,} bytes, and a pickle is readable only as a whole; copy it again"
                ) from error
            words = shown(str(error) or type(error).__name__)
            raise UsageError(
                f"{path} is not {what}: none of its {size:,} bytes are readable ({words}); write it again"
            ) from error
