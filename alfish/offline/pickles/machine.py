"""A stack machine that runs only the instructions of a pickle that build values."""

import pickletools
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from alfish.offline.pickles.faults import KEYS, MAX_WAITING, CopyBudget, PickleError, RefusedError, shown
from alfish.offline.pickles.stand_ins import CALLS, ArrayStandIn, DType, Inert, encoded

# Instructions that push their argument, and instructions that push a new value.
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
ELSEWHERE = frozenset({"PERSID", "BINPERSID", "NEXT_BUFFER"})  # instructions for objects that are not in the file


class _Name:
    """Name `module.name` of a function or class to which a pickle may refer."""

    def __init__(self, path: str):
        self.path = path


class Machine:
    """Runs the instructions of one file. A method `_x` is the instruction X of `pickletools`.

    Args:
      inert: names `module.name` of the classes that become `Inert` objects.
      copies: budget of the bytes that the instructions may copy.
    """

    def __init__(self, inert: Iterable[str], copies: CopyBudget):
        self._inert, self._copies = frozenset(inert), copies
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # for each mark, the stack below it
        self._memo: dict[int, Any] = {}

    def run(self, file: BinaryIO) -> Any:
        """Returns the object that the file holds, with stand-ins in it.

        Raises:
          PickleError, RefusedError: an instruction is damaged, or not allowed.
          ValueError, LookupError, TypeError: the file is not a pickle.
        """
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in ARGUMENTS:
                self._stack.append(argument)
            elif name in MADE:
                self._stack.append(MADE[name]())
            elif name in ELSEWHERE:
                raise RefusedError("an object stored outside of the file")
            elif name == "STOP":
                break
            else:
                step = getattr(self, f"_{name.lower()}", None)
                if step is None:
                    raise PickleError(f"its instruction {name} is not supported")
                step(argument)
            if len(self._stack) > MAX_WAITING or len(self._below) > MAX_WAITING:
                raise PickleError(f"it has more than {MAX_WAITING:,} unfinished values")
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
        elif not isinstance(self._stack[-1], Inert):  # no code reads the items of an inert object
            raise PickleError("it appends to something that is not a list")

    def _setitem(self, _: Any) -> None:
        self._set(self._take(2))

    def _setitems(self, _: Any) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], dict):
            self._stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif not isinstance(self._stack[-1], Inert):
            raise PickleError("it sets items of something that is not a dict")

    def _additems(self, _: Any) -> None:
        values = self._since_mark()
        if not isinstance(self._stack[-1], set):
            raise PickleError("it adds to something that is not a set")
        self._stack[-1].update(map(_key, values))

    # Names, and the objects made from them.

    def _global(self, path: str) -> None:
        module, _, name = path.partition(" ")
        self._named(module, name)

    def _stack_global(self, _: Any) -> None:
        self._named(*self._take(2))

    def _named(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleError("it has a name that is not text")
        path = f"{module}.{name}"
        if path not in CALLS and path not in self._inert:
            raise RefusedError(shown(path))
        self._stack.append(_Name(path))

    def _reduce(self, _: Any) -> None:
        named, arguments = self._take(2)
        if not isinstance(named, _Name) or not isinstance(arguments, tuple):
            raise PickleError("it calls something that is not a function")
        if CALLS.get(named.path) is encoded and arguments and isinstance(arguments[0], str):
            self._copies.spend(arguments[0])
        self._stack.append(CALLS[named.path](*arguments) if named.path in CALLS else Inert(named.path))

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> None:
        self._take(1)  # keyword arguments
        self._reduce(None)

    def _build(self, _: Any) -> None:
        (state,) = self._take(1)
        made = self._stack[-1]
        if isinstance(made, DType):
            made.__setstate__(state)
        elif isinstance(made, (ArrayStandIn, Inert)):
            for part in state if isinstance(state, tuple) else (state,):
                if isinstance(part, dict):
                    self._copies.spend(part)
            made.set(state)
        else:
            raise PickleError("it changes something that is not a data object")


def _key(value: Any) -> Any:
    if not isinstance(value, KEYS):
        raise PickleError("a key is neither a name nor a number")
    if isinstance(value, int) and value.bit_length() > 60:  # many larger integers could share one hash
        raise PickleError("a key is a number that is too large")
    return value
