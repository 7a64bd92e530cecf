"""Errors of code outside alfish, such as the user's environments and listeners, reported as one sentence.

Calls of such code are wrapped in `with calling("MyEnv.render"):`. Calls at each step use a faster try statement whose
handler calls `refuse`.
"""

import contextlib
import difflib
import functools
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from alfish.errors import RunError, UsageError, first_line, printable

T = TypeVar("T")

_ALFISH, _STANDARD = (str(directory) + os.sep for directory in (Path(__file__).parents[1], Path(os.__file__).parent))
_CLOSE = 0.85  # smallest similarity of a misspelt name, in [0, 1]; 1 means equal
_INSTALLED = ("site-packages", "dist-packages")
# Libraries that alfish calls itself. An error in such a library is the user's only if the user's code called it.
_RANK_OF_LIBRARY = {"gin": 0, **dict.fromkeys(("numpy", "torch", "optree", "absl"), 1)}
_RANK_OF_LIBRARY |= dict.fromkeys(("gymnasium", "pettingzoo", "envpool"), 2)


class CodeError(RunError):
    """An error of code outside alfish: one sentence, and the traceback of the original error."""


def package_of(env: Any) -> str:
    """Returns the name of the installed package that defines an environment's class; '' for the user's own class.

    Args:
      env: vector environment or simulator; if it contains single environments, their first one is examined.
    """
    inner = getattr(env, "envs", [env])[0]
    inner = getattr(inner, "unwrapped", inner)
    file = getattr(sys.modules.get(type(inner).__module__), "__file__", None) or ""
    return type(inner).__module__.partition(".")[0] if _rank(file) in (2, 3) else ""


class Elsewhere(Exception):
    """Cause of an error in this process: the traceback of an error in another process; see `relayed`."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


class calling(contextlib.AbstractContextManager):
    """Converts an error of code outside alfish to `CodeError`.

    Args:
      call: name of the called code, such as 'MyEnv.render'; '' means the outermost function outside alfish.
    """

    def __init__(self, call: str = ""):
        self._call = call

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            refuse(error, self._call)


def refuse(error: BaseException, call: str) -> None:
    """Raises CodeError if an error comes from code outside alfish; otherwise returns, and the caller raises the error.

    The function ignores errors with messages for the user, signals, and defects of alfish. An error is a defect if only
    alfish, and libraries that alfish called, were running. A failed assertion is a defect if it is in alfish's code.

    Args:
      error: error that was raised by a function that the caller called.
      call: name of the called code, see `calling`.
    """
    if not isinstance(error, (Exception, SystemExit)) or isinstance(error, (UsageError, RunError)):
        return
    places = _places(error)
    ranks = [place.rank for place in places]
    is_at_call = not any(rank != 1 for rank in ranks)  # the call itself failed, for example by wrong arguments
    is_own = type(error).__module__.startswith("alfish.")
    is_own |= isinstance(error, AssertionError) and ranks[-1:] == [0]
    if not is_own and (is_at_call and call or max(ranks, default=0) > 1):
        # Not `from error`, because gin keeps the traceback of an error that passes through gin, but drops the cause.
        called = call or next(place.name for place in places if place.rank > 1)
        raise in_words(error, called).with_traceback(error.__traceback__) from error.__cause__ or error.__context__


def refuse_default_dtype(call: str) -> None:
    """Sets torch's default dtype to float32, and raises UsageError if code outside alfish has changed it.

    Without this check, alfish would mix float32 and float64 tensors, and the resulting error would blame the wrong
    part.

    Args:
      call: name of the code that ran since the last check, such as 'MyEnv.reset'.
    """
    import torch  # imported here, so that a host of workers does not import torch

    found = torch.get_default_dtype()
    if found is not torch.float32:
        torch.set_default_dtype(torch.float32)
        raise UsageError(
            f"{call} has called torch.set_default_dtype({found}), which affects the whole process, but alfish computes "
            f"in float32; give the dtype where tensors are made, as in torch.zeros(3, dtype={found})"
        )


def in_words(error: BaseException, call: str = "") -> CodeError:
    """Returns a CodeError that describes an error of code outside alfish in one sentence.

    Args:
      error: exception, or SystemExit after a call of sys.exit.
      call: name of the called code, see `calling`.
    """
    place = _place(error)
    if isinstance(error, SystemExit):
        where = "" if place is None else f" in {place.function} ({place.file}:{place.line})"
        return CodeError(
            f"sys.exit({'' if error.code is None else repr(error.code)}) was called{where}, but code that runs inside "
            "alfish may not end the program; end the episode, or raise an error"
        )
    words = f": {first_line(error)}" if str(error).strip() else ""
    where = "" if place is None else f" ({place.file}:{place.line}, in {place.function})"
    return CodeError(f"{call} raised {type(error).__name__}{words}{where}")


def relayed(sentence: str, trace: str) -> CodeError:
    """Returns an error of code outside alfish that occurred in another process, with the traceback of that process."""
    error = CodeError(sentence)
    error.__cause__ = Elsewhere(trace)
    return error


def brief(function: T) -> T:
    """Decorates a function for users so that tracebacks of alfish's errors do not show the frames of alfish and gin.

    Their messages are complete without these frames. The environment variable ALFISH_FULL_TRACEBACKS keeps the frames.
    """

    @functools.wraps(function)  # type: ignore[arg-type]
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)  # type: ignore[operator]
        except (UsageError, RunError) as error:
            shown: BaseException | None = error
            while shown is not None and not os.environ.get("ALFISH_FULL_TRACEBACKS"):
                shown.__traceback__ = _outside_alfish(shown.__traceback__)
                shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
            raise

    return call  # type: ignore[return-value]


def _outside_alfish(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of alfish and gin, and of libraries that they call."""
    frames, is_outside = [], False
    while trace is not None:
        rank = _rank(trace.tb_frame.f_code.co_filename)
        is_outside |= rank > 1
        if rank > (0 if is_outside else 1):
            frames.append(trace)
        trace = trace.tb_next
    for one in reversed(frames):
        trace = TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trace


def check_methods(part: object, base: type) -> None:
    """Raises UsageError if a method of a part has wrong arguments or a misspelt name.

    Args:
      part: object of a class that may be the user's.
      base: base class of the part, whose public methods alfish calls. alfish also calls the public methods of its own
        subclasses of `base`.
    """
    kinds = type(part).__mro__[: type(part).__mro__.index(base)]
    shipped = [kind for kind in kinds if _is_own(kind)] + [base]
    called: dict[str, Any] = {}
    for kind in reversed(shipped):
        called |= {name: method for name, method in vars(kind).items() if name[0] != "_" and inspect.isfunction(method)}
    for name, method in called.items():
        own = getattr(part, name)
        if not callable(own):
            raise UsageError(
                f"{name} of {type(part).__name__} is {printable(repr(own))}, but alfish calls it; it must be a method"
            )
        owner = next(kind for kind in type(part).__mro__ if name in vars(kind))
        if _is_own(owner) and getattr(own, "__func__", None) is vars(owner)[name]:
            continue  # alfish calls its own method correctly, and to read a signature takes longer than all else here
        taken = inspect.signature(own)
        parameters = [*inspect.signature(method).parameters.values()][1:]
        given = [one.name for one in parameters if one.kind != one.KEYWORD_ONLY]
        keywords = {one.name: None for one in parameters if one.kind == one.KEYWORD_ONLY}
        try:
            taken.bind(*given, **keywords)
        except TypeError:
            raise UsageError(
                f"{name} of {type(part).__name__} takes ({', '.join(taken.parameters)}), but is called with "
                f"({', '.join([*given, *keywords])})"
            ) from None
    for kind in kinds:
        for name in vars(kind):
            if _is_own(kind) or name[0] == "_" or any(hasattr(one, name) for one in shipped):
                continue
            close = difflib.get_close_matches(name, called, 1, _CLOSE)
            if close and close[0] not in vars(kind):
                raise UsageError(
                    f"{kind.__name__} has a method {name!r}, which alfish never calls; did you mean {close[0]}? If "
                    f"not, rename it to _{name}"
                )


def overridden(part: object) -> list[str]:
    """Returns the methods of alfish's classes that the class of a part overrides; empty for a class of alfish."""
    kinds = type(part).__mro__
    own = [kind for kind in kinds if not _is_own(kind) and kind is not object]
    names = dict.fromkeys(name for kind in own for name in vars(kind) if inspect.isfunction(vars(kind)[name]))
    return [name for name in names if name[:2] != "__" and any(name in vars(kind) for kind in kinds if _is_own(kind))]


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("alfish.")


class _Place(NamedTuple):
    """A frame of a traceback, with its rank (see `_rank`) and the function's name (see `_name`)."""

    rank: int
    function: str
    name: str
    file: str
    line: int


def _places(error: BaseException) -> list[_Place]:
    """Returns the frames of the functions that the `try` statement called; the frame that raised the error is last."""
    return [
        _Place(_rank(frame.f_code.co_filename), frame.f_code.co_name, _name(frame), frame.f_code.co_filename, line)
        for frame, line in [*traceback.walk_tb(error.__traceback__)][1:]
    ]


def _name(frame: FrameType) -> str:
    """Returns the name of a running function; a method's name includes the class, such as 'MyPPO.calc_loss'."""
    name = frame.f_code.co_name
    first = frame.f_code.co_varnames[:1]
    owner = type(frame.f_locals.get(first[0])) if first == ("self",) else None
    return name if owner is None else f"{owner.__name__}.{name}"


def _place(error: BaseException) -> _Place | None:
    """Returns the innermost frame of the user's code, or else of a library; None if all frames are in alfish."""
    places = [place for place in _places(error) if not place.file.endswith("_sitebuiltins.py")]  # exit() and quit()
    highest = max((place.rank for place in places), default=0)
    if highest == 0:
        return None
    return [place for place in places if place.rank == highest][-1]


def _rank(file: str) -> int:
    """Returns how likely it is that a file is the user's: 0 for alfish to 4 for files outside libraries."""
    if file.startswith(_ALFISH):
        return 0
    parts = Path(file).parts
    for folder in _INSTALLED:
        if folder in parts[:-1]:
            return _RANK_OF_LIBRARY.get(parts[parts.index(folder) + 1], 3)
    return 1 if file.startswith((_STANDARD, "<frozen ")) else 4
