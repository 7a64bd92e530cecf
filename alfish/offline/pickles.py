"""Reads pickles of data without executing anything of them.

A pickle is a program for a small stack machine, whose instructions build values and call what they name. This module
is such a machine with the instructions that build values only. A name of a short list becomes an inert stand-in, any
other name is refused. No object of numpy receives anything from the file: an array stays a stand-in until the whole
file was read, and is then made of bytes whose number fits its shape and dtype.
"""

import io
import math
import pickletools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from alfish.errors import UsageError

BYTE_ORDERS = "<>=|"
DTYPES = frozenset({"b1", "O8", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8"})
TEXT = re.compile(r"[SU][1-9]\d{0,8}")
MAX_DIMS = 32
MAX_SHARED = 2**20  # bytes and entries that a file may copy beside its size
WORDS = 200  # characters of a file's own words in a message


class PickleError(ValueError):
    """A pickle that is damaged, or no pickle of data; says why."""


class RefusedError(Exception):
    """The name that a pickle asks for, and does not get."""


class DType:
    """Stands in for a numpy dtype.

    Args:
      code: kind and size, as 'f4'; numbers, text, or objects ('O8').

    Raises:
      PickleError: it is another kind.
    """

    def __init__(self, code: Any, *_: Any):
        if not (isinstance(code, str) and (code in DTYPES or TEXT.fullmatch(code))):
            raise PickleError(f"it holds numbers of a kind that is not read ({shown(code)})")
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        """Takes the byte order of numpy's state, whose other entries describe structured dtypes.

        Raises:
          PickleError: the dtype is a structured one, or this is no such state.
        """
        if not (isinstance(state, tuple) and len(state) >= 5 and isinstance(state[1], str) and len(state[1]) == 1):
            raise PickleError("it holds a dtype that is not read")
        if state[1] not in BYTE_ORDERS or state[2:5] != (None, None, None):
            raise PickleError("it holds a dtype that is not read")
        self._order = state[1]

    def made(self) -> np.dtype:
        """The dtype itself."""
        return np.dtype(self._code if self._code == "O8" else self._order + self._code)


class _Array:
    """Stands in for a numpy array, or for a number of numpy's (`is_number`)."""

    def __init__(self, *state: Any, is_number: bool = False):
        self._state, self._is_number = state, is_number  # shape, dtype, whether in Fortran's order, content

    def set(self, state: Any) -> None:
        """Takes numpy's state of an array: a version, which may be left out, and what the constructor takes."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise PickleError("it holds an array that is not read")
        self._state = state[-4:]

    @property
    def objects(self) -> list[Any] | None:
        """The list that an array of objects copies; None of any other array."""
        return self._state[3] if len(self._state) == 4 and isinstance(self._state[3], list) else None

    def made(self) -> Any:
        """The array.

        Raises:
          PickleError: its content is not as long as its shape and dtype say.
        """
        if not self._state:
            raise PickleError("it holds an array without content")
        shape, dtype, is_fortran, content = self._state
        if not (
            isinstance(shape, tuple)
            and len(shape) <= MAX_DIMS
            and all(isinstance(size, int) and size >= 0 for size in shape)
            and isinstance(dtype, DType)
        ):
            raise PickleError("it holds an array without shape or dtype")
        kind, count = dtype.made(), math.prod(shape)
        if kind.hasobject:
            if not isinstance(content, list) or len(content) != count or self._is_number:
                raise PickleError("it holds an array of objects that is not whole")
            made: np.ndarray = np.empty(count, object)
            for i, value in enumerate(content):  # one by one, since numpy would look into sequences
                made[i] = value
        elif not isinstance(content, (bytes, bytearray)) or len(content) != count * kind.itemsize:
            raise PickleError(f"it holds an array of shape {shown(shape)} and {kind}, whose content has another size")
        else:
            made = np.frombuffer(content, kind) if count else np.empty(0, kind)
        made = made.reshape(shape, order="F" if is_fortran else "C")
        return made[()] if self._is_number else made


class Inert:
    """An object of the file: the name of its class, its attributes, and no behaviour.

    Attributes:
      path: module and name of the class.
      attributes: by their names.
    """

    def __init__(self, path: str):
        self.path = path
        self.attributes: dict[Any, Any] = {}

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.path.rpartition(".")[2]

    def set(self, state: Any) -> None:
        """Takes attributes, and those in slots; any other state is dropped, since nothing here would read it."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.attributes.update(part)


def numpy_number(dtype: Any, content: Any) -> Any:
    """What `numpy.core.multiarray.scalar` returns.

    Raises:
      PickleError: the content is not as long as the dtype says.
    """
    return _Array((), dtype, False, content, is_number=True).made()


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    return _Array(shape, dtype, order == "F", buffer)


def _encoded(text: Any = "", *_: Any) -> bytes:
    if not isinstance(text, str):
        raise PickleError("it holds bytes that are not read")
    return text.encode("latin1")


NUMPY_MODULES = ("numpy", *(f"numpy.{core}.{part}" for core in ("core", "_core") for part in ("multiarray", "numeric")))
# What may be called, and what is done instead.
CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda *_: {},
    # What bytes are in pickles of Python 2's protocols: text, encoded.
    "_codecs.encode": _encoded,
    "builtins.bytes": lambda *_: b"",
}
for _module in NUMPY_MODULES:
    CALLS |= {
        f"{_module}._reconstruct": lambda *_: _Array(),
        f"{_module}.ndarray": lambda *_: _Array(),
        f"{_module}._frombuffer": _from_buffer,
        f"{_module}.scalar": lambda dtype, content, *_: _Array((), dtype, False, content, is_number=True),
        f"{_module}.dtype": DType,
    }

# Instructions that push their argument, and those that push something new.
ARGUMENTS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
ELSEWHERE = frozenset({"PERSID", "BINPERSID", "NEXT_BUFFER"})
KEYS = (str, bytes, int, float, type(None))  # hashing a tuple may take for ever: its parts may be shared


class _Name:
    """A name that is on the list."""

    def __init__(self, path: str):
        self.path = path


class _Copies:
    """Counts bytes and entries that are copied, of which a file holds each at least as one byte, unless it shares them.

    Args:
      num_bytes: of the file.
    """

    def __init__(self, num_bytes: int):
        self._left = num_bytes + MAX_SHARED

    def add(self, values: Any) -> None:
        """Counts what a copy of `values` adds.

        Raises:
          PickleError: parts that are shared multiply it without end.
        """
        self._left -= len(values)
        if self._left < 0:
            raise PickleError("it makes far more of what it holds than it holds")


class _Machine:
    """Runs the instructions of one file.

    Args:
      inert: `module.name` of the classes that become `Inert`s.
      copies: counts what it copies.
    """

    def __init__(self, inert: Iterable[str], copies: _Copies):
        self._inert, self._copies = frozenset(inert), copies
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}

    def run(self, file: BinaryIO) -> Any:
        """The object that the file holds, with stand-ins in it."""
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in ARGUMENTS:
                self._stack.append(argument)
            elif name in MADE:
                self._stack.append(MADE[name]())
            elif name in ELSEWHERE:
                raise RefusedError("an object kept elsewhere")
            elif name == "STOP":
                break
            else:
                step = getattr(self, f"_{name.lower()}", None)
                if step is None:
                    raise PickleError(f"its instruction {name} is not read")
                step(argument)
        return self._stack.pop()

    def _proto(self, _: Any) -> None: ...

    def _frame(self, _: Any) -> None: ...

    # The stack.

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._below.pop()
        return above

    def _pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _dup(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _binput = _long_binput = _put

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _binget = _long_binget = _get

    # Containers.

    def _take(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise PickleError("its instructions do not fit together")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _tuple(self, _: Any) -> None:
        values = self._since_mark()
        self._stack.append(tuple(values))

    def _tuple1(self, _: Any) -> None:
        self._stack.append(tuple(self._take(1)))

    def _tuple2(self, _: Any) -> None:
        self._stack.append(tuple(self._take(2)))

    def _tuple3(self, _: Any) -> None:
        self._stack.append(tuple(self._take(3)))

    def _list(self, _: Any) -> None:
        values = self._since_mark()
        self._stack.append(values)

    def _dict(self, _: Any) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set(items)

    def _frozenset(self, _: Any) -> None:
        values = self._since_mark()
        self._stack.append(frozenset(map(_key, values)))

    def _append(self, _: Any) -> None:
        self._extend(self._take(1))

    def _appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(values)
        elif not isinstance(self._stack[-1], Inert):  # whose items nothing here would read
            raise PickleError("it adds to what is no list")

    def _setitem(self, _: Any) -> None:
        self._set(self._take(2))

    def _setitems(self, _: Any) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], dict):
            self._stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif not isinstance(self._stack[-1], Inert):
            raise PickleError("it sets items of what is no dict")

    def _additems(self, _: Any) -> None:
        values = self._since_mark()
        if not isinstance(self._stack[-1], set):
            raise PickleError("it adds to what is no set")
        self._stack[-1].update(map(_key, values))

    # Names, and objects made of them.

    def _global(self, path: str) -> None:
        module, _, name = path.partition(" ")
        self._named(module, name)

    def _stack_global(self, _: Any) -> None:
        self._named(*self._take(2))

    def _named(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleError("it names something by what is no text")
        path = f"{module}.{name}"
        if path not in CALLS and path not in self._inert:
            raise RefusedError(shown(path))
        self._stack.append(_Name(path))

    def _reduce(self, _: Any) -> None:
        named, arguments = self._take(2)
        if not isinstance(named, _Name) or not isinstance(arguments, tuple):
            raise PickleError("it calls what is no function")
        if CALLS.get(named.path) is _encoded and arguments and isinstance(arguments[0], str):
            self._copies.add(arguments[0])
        self._stack.append(CALLS[named.path](*arguments) if named.path in CALLS else Inert(named.path))

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> None:
        self._take(1)  # arguments by name
        self._reduce(None)

    def _build(self, _: Any) -> None:
        (state,) = self._take(1)
        made = self._stack[-1]
        if isinstance(made, DType):
            made.__setstate__(state)
        elif isinstance(made, (_Array, Inert)):
            for part in state if isinstance(state, tuple) else (state,):
                if isinstance(part, dict):
                    self._copies.add(part)
            made.set(state)
        else:
            raise PickleError("it changes what is no object of data")


class _Finished:
    """Puts what stand-ins stand for in their places, each once, however often the file refers to it."""

    def __init__(self, copies: _Copies) -> None:
        self._copies = copies
        self._made: dict[int, Any] = {}
        self._seen: list[Any] = []  # so that no other object gets the identity of one that is in `_made`

    def of(self, value: Any) -> Any:
        """The value without stand-ins.

        Raises:
          PickleError: a part of it is not whole, or a tuple holds itself.
        """
        if isinstance(value, KEYS):
            return value
        if id(value) in self._made:
            made = self._made[id(value)]
            if made is self:
                raise PickleError("a tuple in it holds itself")
            return made
        self._seen.append(value)
        self._made[id(value)] = self if isinstance(value, (tuple, _Array)) else value
        made = self._made[id(value)] = self._finished(value)
        return made

    def _finished(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if isinstance(value, list):
            value[:] = map(self.of, value)
        elif isinstance(value, dict):
            for key, child in value.items():
                value[key] = self.of(child)
        elif isinstance(value, Inert):
            self.of(value.attributes)
        elif isinstance(value, _Array):
            if value.objects is not None:
                self._copies.add(value.objects)
            made = value.made()
            if isinstance(made, np.ndarray) and made.dtype.hasobject:
                for i, child in enumerate(made.flat):
                    made.flat[i] = self.of(child)
            return made
        elif isinstance(value, DType):
            return value.made()
        return value


def _key(value: Any) -> Any:
    if not isinstance(value, KEYS):
        raise PickleError("a key in it is no name and no number")
    return value


def shown(value: Any) -> str:
    """A value of a file for a message: short, whatever it holds."""
    words = str(value) if isinstance(value, (str, int, float)) or _is_flat(value) else type(value).__name__
    return words if len(words) <= WORDS else f"{words[:WORDS]}..."


def _is_flat(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(isinstance(part, (int, str)) for part in value)


def read(file: BinaryIO, inert: Iterable[str] = ()) -> Any:
    """The object that a pickle holds.

    Args:
      file: open for reading, from its beginning.
      inert: `module.name` of the classes that become `Inert`s.

    Raises:
      RefusedError: it asks for another name.
      ValueError, LookupError, TypeError, RecursionError: it is damaged, or no pickle of data.
    """
    copies = _Copies(file.seek(0, io.SEEK_END))
    file.seek(0)
    return _Finished(copies).of(_Machine(inert, copies).run(file))


def load(path: Path, what: str, inert: Iterable[str]) -> Any:
    """The object in a file.

    Args:
      path: of the file.
      what: it should be, for messages.
      inert: as in `read`.

    Raises:
      UsageError: names what it refuses; or the file is cut off, or no pickle.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            return read(file, inert)
        except RefusedError as error:
            raise UsageError(
                f"{path} is refused: it wants to load {error}, which {what} has no use for; nothing of it was executed"
            ) from error
        except (ValueError, TypeError, LookupError, RecursionError, MemoryError) as error:
            if file.tell() == size and not isinstance(error, PickleError):
                raise UsageError(
                    f"{path} is cut off after {size:,} bytes: a pickle is readable as a whole only; copy it again"
                ) from error
            words = shown(str(error) or type(error).__name__)
            raise UsageError(
                f"{path} is not {what}: nothing of its {size:,} bytes is readable ({words}); write it again"
            ) from error
