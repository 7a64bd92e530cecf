"""Stand-ins for the names in a pickle of data: dtypes, arrays, and objects without behaviour.

No content of a stand-in reaches numpy before `made` has checked it. After the whole file was read, the `Resolver`
replaces the stand-ins with the objects that they represent.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from alfish.offline.pickles.faults import KEYS, MAX_DIMS, CopyBudget, PickleError, shown

BYTE_ORDERS = "<>=|"
DTYPES = frozenset({"b1", "O8", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8"})
TEXT = re.compile(r"[SU][1-9]\d{0,8}")
MAX_DEPTH = 200  # maximum depth of nested lists, tuples, dicts and objects


class DType:
    """A stand-in for a numpy dtype.

    Args:
      code: numpy's code of kind and size, for numbers ('f4'), text ('U3') or objects ('O8').

    Raises:
      PickleError: the code is malformed.
    """

    def __init__(self, code: Any, *_: Any):
        if not (isinstance(code, str) and (code in DTYPES or TEXT.fullmatch(code))):
            raise PickleError(f"it has numbers of a type that is not supported ({shown(code)})")
        self._code, self._order = code, "="

    def __setstate__(self, state: Any) -> None:
        """Sets the byte order from the state that numpy pickles. Its other entries describe structured dtypes.

        Raises:
          PickleError: the dtype is structured, or the state does not have numpy's form.
        """
        if not (isinstance(state, tuple) and len(state) >= 5 and isinstance(state[1], str) and len(state[1]) == 1):
            raise PickleError("it has a dtype that is not supported")
        if state[1] not in BYTE_ORDERS or state[2:5] != (None, None, None):
            raise PickleError("it has a dtype that is not supported")
        self._order = state[1]

    def made(self) -> np.dtype:
        """Returns numpy's dtype."""
        return np.dtype(self._code if self._code == "O8" else self._order + self._code)


class ArrayStandIn:
    """A stand-in for a numpy array, or for a numpy number (`is_number`)."""

    def __init__(self, *state: Any, is_number: bool = False):
        self._state, self._is_number = state, is_number  # shape, dtype, whether in Fortran's order, content
        self._axes: tuple[int, ...] | None = None  # order of axes of an array that is transposed in memory

    @classmethod
    def from_buffer(cls, buffer: Any, dtype: Any, shape: Any, order: Any = "C", axes: Any = None) -> "ArrayStandIn":
        """Returns a stand-in for the result of `numpy._core.numeric._frombuffer`.

        Raises:
          PickleError: numpy does not write this memory order.
        """
        made = cls(shape, dtype, order == "F", buffer)
        if order == "K":
            numbers = isinstance(axes, tuple) and all(isinstance(axis, int) for axis in axes)
            if not (numbers and isinstance(shape, tuple) and sorted(axes) == list(range(len(shape)))):
                raise PickleError("it has an array whose memory order is not supported")
            made._axes = axes
        elif order not in ("C", "F"):
            raise PickleError("it has an array whose memory order is not supported")
        return made

    def set(self, state: Any) -> None:
        """Sets the state that numpy pickles for an array: an optional version, then the constructor's arguments."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise PickleError("it has an array of a kind that is not supported")
        self._state = state[-4:]

    @property
    def objects(self) -> list[Any] | None:
        """The list whose entries fill an array of objects; None for an array of a different dtype."""
        return self._state[3] if len(self._state) == 4 and isinstance(self._state[3], list) else None

    def made(self) -> Any:
        """Returns the array.

        Raises:
          PickleError: the length of the content does not fit shape and dtype.
        """
        if not self._state:
            raise PickleError("it has an array without content")
        shape, dtype, is_fortran, content = self._state
        if not (
            isinstance(shape, tuple)
            and len(shape) <= MAX_DIMS
            and all(isinstance(size, int) and size >= 0 for size in shape)
            and isinstance(dtype, DType)
        ):
            raise PickleError("it has an array without shape or dtype")
        kind, count = dtype.made(), math.prod(shape)
        if kind.hasobject:
            if not isinstance(content, list) or len(content) != count or self._is_number:
                raise PickleError("it has an incomplete array of objects")
            made: np.ndarray = np.empty(count, object)
            for i, value in enumerate(content):  # assigned one by one, because numpy would iterate over sequences
                made[i] = value
        elif not isinstance(content, (bytes, bytearray)) or len(content) != count * kind.itemsize:
            raise PickleError(f"it has an array of shape {shown(shape)} and {kind} whose content has a different size")
        else:
            made = np.frombuffer(content, kind) if count else np.empty(0, kind)
        made = made.reshape(shape, order="F" if is_fortran else "C")
        if self._axes is not None:
            made = made.transpose(self._axes)
        return made[()] if self._is_number else made


class Inert:
    """An object of the file without behaviour: the name of its class and its attributes.

    Attributes:
      path: module and name of the class.
      attributes: values by name.
    """

    def __init__(self, path: str):
        self.path = path
        self.attributes: dict[Any, Any] = {}

    @property
    def kind(self) -> str:
        """The name of the class."""
        return self.path.rpartition(".")[2]

    def set(self, state: Any) -> None:
        """Sets attributes from a dict, or from a pair of dicts, the second for slots. Ignores any other state."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.attributes.update(part)


class Resolver:
    """Replaces each stand-in with its object. An object to which the file refers several times is made only once."""

    def __init__(self, copies: CopyBudget) -> None:
        self._copies = copies
        self._made: dict[int, Any] = {}
        self._seen: list[Any] = []  # kept alive, so that no other object gets an id that is in `_made`
        self._depth = 0

    def resolved(self, value: Any) -> Any:
        """Returns the value without stand-ins.

        Raises:
          PickleError: a part is incomplete, a tuple holds itself, or parts are nested too deep.
        """
        if isinstance(value, KEYS):
            return value
        if id(value) in self._made:
            made = self._made[id(value)]
            if made is self:
                raise PickleError("a tuple contains itself")
            return made
        if self._depth == MAX_DEPTH:
            raise PickleError(f"its parts are nested more than {MAX_DEPTH} deep")
        self._seen.append(value)
        self._made[id(value)] = self if isinstance(value, (tuple, ArrayStandIn)) else value
        self._depth += 1
        made = self._made[id(value)] = self._replaced(value)
        self._depth -= 1
        return made

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.resolved, value))
        if isinstance(value, list):
            value[:] = map(self.resolved, value)
        elif isinstance(value, dict):
            for key, child in value.items():
                value[key] = self.resolved(child)
        elif isinstance(value, Inert):
            self.resolved(value.attributes)
        elif isinstance(value, ArrayStandIn):
            if value.objects is not None:
                self._copies.spend(value.objects)
            made = value.made()
            if isinstance(made, np.ndarray) and made.dtype.hasobject:
                for i, child in enumerate(made.flat):
                    made.flat[i] = self.resolved(child)
            return made
        elif isinstance(value, DType):
            return value.made()
        return value


def numpy_number(dtype: Any, content: Any) -> Any:
    """Returns the result of `numpy.core.multiarray.scalar`.

    Raises:
      PickleError: the length of the content does not fit the dtype.
    """
    return _number(dtype, content).made()


def encoded(text: Any = "", *_: Any) -> bytes:
    """Returns the bytes that a pickle of protocol 0, 1 or 2 stores as text."""
    if not isinstance(text, str):
        raise PickleError("it has bytes in a form that is not supported")
    return text.encode("latin1")


def _number(dtype: Any, content: Any, *_: Any) -> ArrayStandIn:
    return ArrayStandIn((), dtype, False, content, is_number=True)


def _array(*_: Any) -> ArrayStandIn:
    return ArrayStandIn()


NUMPY_MODULES = ("numpy", *(f"numpy.{core}.{part}" for core in ("core", "_core") for part in ("multiarray", "numeric")))
# Functions that a pickle may call, each with the function that is called instead.
CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda *_: {},
    "_codecs.encode": encoded,
    "builtins.bytes": lambda *_: b"",
}
for _module in NUMPY_MODULES:
    CALLS |= {
        f"{_module}._reconstruct": _array,
        f"{_module}.ndarray": _array,
        f"{_module}._frombuffer": ArrayStandIn.from_buffer,
        f"{_module}.scalar": _number,
        f"{_module}.dtype": DType,
    }
