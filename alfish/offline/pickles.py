"""Reads pickles of data without executing anything of them.

A pickle is a program that calls whatever it names. This reader knows a short list of names, and gives inert stand-ins
for them: numpy's arrays and numbers are made by code in here, everything else becomes an `Inert` that holds what the
file said of it. Any other name is refused before anything is called.
"""

import collections
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np

from alfish.errors import UsageError


class Inert:
    """An object of the file: its class's name and its attributes, and no behaviour."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        made = super().__new__(cls)
        made.__dict__["arguments"] = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # attributes, and those in slots
        if all(isinstance(part, (dict, type(None))) for part in parts):
            for part in parts:
                self.__dict__.update(part or {})
        else:
            self.__dict__["state"] = state

    # An ordered dict's items, or a list's, as pickle hands them over.
    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[key] = value

    def append(self, value: Any) -> None:
        self.__dict__.setdefault("items", {})[len(self.__dict__.get("items", {}))] = value


class _Function:
    """What a file may call, and cannot change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


def numpy_dtype(name: Any, *_: Any) -> np.dtype:
    """A dtype of numbers, text or objects; a copy, since its state follows and numpy's own is shared by all."""
    if not isinstance(name, str) or not re.fullmatch(r"[biufcSUO]\d*|\?", name):
        raise pickle.UnpicklingError(f"it holds numbers of a kind that is not read ({name})")
    return np.dtype(name, copy=True)


def _frombuffer(buffer: Any, dtype: np.dtype, shape: Any, order: str, *_: Any) -> np.ndarray:
    return np.frombuffer(buffer, _plain(dtype)).reshape(shape, order="F" if order == "F" else "C")


def numpy_scalar(dtype: np.dtype, content: bytes) -> Any:
    """What `numpy.core.multiarray.scalar` returns, of numbers."""
    return np.frombuffer(content, _plain(dtype))[0]


def _plain(dtype: np.dtype) -> np.dtype:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise pickle.UnpicklingError("it holds numbers of a kind that is not read")
    return dtype


# An array that is filled by its state: numbers, or a list of objects that were themselves read here.
NUMPY = {
    "_reconstruct": _Function(lambda *_: np.ndarray((0,), np.int8)),
    "_frombuffer": _Function(_frombuffer),
    "scalar": _Function(numpy_scalar),
    "dtype": _Function(numpy_dtype),
    "ndarray": _Function(lambda *_: np.ndarray((0,), np.int8)),
}
# What bytes are in pickles of Python 2's protocols: text, encoded.
BYTES = {
    ("_codecs", "encode"): _Function(lambda text="", *_: str(text).encode("latin1")),
    ("builtins", "bytes"): _Function(lambda *_: b""),
}
NUMPY_MODULES = ("numpy", *(f"numpy.{core}.{part}" for core in ("core", "_core") for part in ("multiarray", "numeric")))


class DataUnpickler(pickle.Unpickler):
    """Reads one file.

    Args:
      file: open for reading.
      inert: `module.name` that become `Inert`s; a name that ends in `.*` stands for all names of that module.
    """

    def __init__(self, file: BinaryIO, inert: Iterable[str]):
        super().__init__(file)
        self._inert = frozenset(inert)
        self._made: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in NUMPY_MODULES and name in NUMPY:
            return NUMPY[name]
        if (module, name) in BYTES:
            return BYTES[module, name]
        if (module, name) == ("collections", "OrderedDict"):
            return _Function(lambda *args: collections.OrderedDict(*args))
        if f"{module}.{name}" in self._inert or (f"{module}.*" in self._inert and "." not in name):
            # A class of this file's own, so that nothing it does to it outlives it.
            return self._made.setdefault((module, name), type(name, (Inert,), {"path": f"{module}.{name}"}))
        raise RefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedError("an object kept elsewhere")


class RefusedError(Exception):
    """The name that a pickle wanted, and does not get."""


def load(path: Any, what: str, inert: Iterable[str]) -> Any:
    """The object in a file.

    Args:
      path: of the file.
      what: it should be, for messages.
      inert: as in `DataUnpickler`.

    Raises:
      UsageError: names what it refuses; or the file is cut off, or no pickle.
    """
    with open(path, "rb") as file:
        reader = DataUnpickler(file, inert)
        try:
            return reader.load()
        except RefusedError as error:
            raise UsageError(
                f"{path} is refused: it wants to load {error}, which {what} has no use for; nothing of it was executed"
            ) from error
        except EOFError as error:
            raise UsageError(
                f"{path} is cut off after {_size(path)} bytes: a pickle is readable as a whole only"
            ) from error
        except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError, MemoryError) as error:
            cut = "truncated" in str(error)
            fault = "is cut off" if cut else f"is not {what}"
            raise UsageError(
                f"{path} {fault}: nothing of its {_size(path)} bytes is readable ({error}); write it again"
            ) from error


def _size(path: Any) -> str:
    with open(path, "rb") as file:
        return f"{file.seek(0, 2):,}"
