"""Changes parameters of a configuration during a run, for populations of policies."""

import ast
import contextlib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from alfish.errors import UsageError, first_line
from alfish.parameters import gin_internals
from alfish.parameters.checking import hints
from alfish.parameters.kinds import mistake, shown
from alfish.parameters.varied import INTEGER, NUMBER

ENTRY = re.compile(r"([\w./]+)\[([\w.'\"-]+)\]")  # form of `NAME[KEY]`


class Setting(NamedTuple):
    """A parameter in a gin scope, or an entry of a parameter whose value is a list or dict.

    Attributes:
      name: name as the user wrote it, such as 'PPO.reward_weights[1]'.
      scope, selector, parameter: scope, complete name of the class or function, and name of its parameter.
      key: index or key of the entry; None means the whole value.
    """

    name: str
    scope: str
    selector: str
    parameter: str
    key: Any

    @classmethod
    def parse(cls, name: str, scope: str) -> "Setting":
        """Returns the setting with a name.

        Args:
          name: name of a parameter as in a gin file, or `NAME[KEY]`.
          scope: scope in which the parameter is bound, if `name` has no scope.

        Raises:
          UsageError: there is no such parameter.
        """
        match = ENTRY.fullmatch(name)
        whole, key = match.groups() if match else (name, None)
        try:
            own, selector, parameter = gin_internals.parsed_name(whole)
        except ValueError as error:
            reason = first_line(error).rstrip(".")
            raise UsageError(f"{name} is not a parameter ({reason}); write its name as in a gin file") from error
        return cls(name, own or scope, selector, parameter, None if key is None else _key(key))

    @property
    def place(self) -> tuple[str, str, str]:
        """Scope, selector and parameter, for `gin_internals.rebound`."""
        return self.scope, self.selector, self.parameter

    def bound(self) -> Any:
        """Returns the value bound in exactly this scope; None if there is none."""
        return self._entry(gin_internals.bindings().get((self.scope, self.selector), {}).get(self.parameter))

    def configured(self) -> Any:
        """Returns the value that applies in the scope: the bound value, or the default."""
        return self._entry(self._whole())

    def replaced(self, number: float, whole: Any = None) -> Any:
        """Returns the value of the parameter with this setting replaced by a number.

        Args:
          number: new value of the setting.
          whole: value of the parameter whose entry is replaced; None means the configured value.

        Raises:
          UsageError: the value has no such entry.
        """
        if self.key is None:
            return number
        whole = self._whole() if whole is None else whole
        if isinstance(whole, Mapping) and self.key in whole:
            return {**whole, self.key: number}
        if isinstance(whole, (list, tuple)) and type(self.key) is int and 0 <= self.key < len(whole):
            return type(whole)(number if index == self.key else one for index, one in enumerate(whole))
        raise UsageError(f"{self.name} has no such entry: the value is {shown(whole)}; bind a list or dict that has it")

    def check(self, number: float) -> None:
        """Raises UsageError if the parameter belongs to alfish and does not accept `number`."""
        if not self.selector.startswith("alfish."):
            return  # annotations in other packages may not describe all accepted values
        wrapped = gin_internals.configurable(self.selector)
        annotations = hints(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)
        words = mistake(self.replaced(number), annotations.get(self.parameter, Any))
        if words is not None:
            raise UsageError(f"{self.name} is {number}; {words}")

    def _whole(self) -> Any:
        scopes = ["", *itertools.accumulate(self.scope.split("/"), "{}/{}".format)]
        for scope in reversed(scopes):
            bound = gin_internals.bindings().get((scope, self.selector), {})
            if self.parameter in bound:
                return bound[self.parameter]
        found = inspect.signature(gin_internals.configurable(self.selector)).parameters.get(self.parameter)
        return None if found is None or found.default is found.empty else found.default

    def _entry(self, whole: Any) -> Any:
        if self.key is None:
            return whole
        is_there = isinstance(whole, (list, tuple)) and type(self.key) is int and 0 <= self.key < len(whole)
        is_there = is_there or (isinstance(whole, Mapping) and self.key in whole)
        return whole[self.key] if is_there else None


@contextlib.contextmanager
def rebound(bindings: Mapping[str, str], scope: str, complete: bool = True) -> Iterator[None]:
    """Binds parameters within the context; restores all bindings on exit.

    Args:
      bindings: new numbers as gin text, by the name of the setting, see `Setting.parse`.
      scope: scope of parameters whose name has no scope.
      complete: whether parts built within the context must read all parameters; if not, parameters that do not exist
        are ignored.

    Raises:
      UsageError: a parameter does not exist, or was not read.
    """
    if not bindings:
        yield
        return
    settings = list(_settings(bindings, scope, complete))
    values: dict[tuple[str, str, str], Any] = {}
    for one in settings:
        values[one.place] = one.replaced(number(bindings[one.name]), values.get(one.place))
    with gin_internals.rebound(values) as is_read:
        yield
        unread = [one.name for one in settings if not is_read(*one.place)]
        if unread and complete:
            raise UsageError(
                f"no part of {scope} reads {unread[0]}: no part has this parameter, or the code that calls the part "
                "passes another value; leave the setting out"
            )


def whole_binding(binding: str) -> str:
    """Returns a binding of the whole list or dict for `NAME[KEY] = NUMBER`; returns other bindings unchanged.

    Raises:
      UsageError: the current value has no such entry.
    """
    name, _, text = (part.strip() for part in binding.partition("="))
    if not ENTRY.fullmatch(name) or not re.fullmatch(NUMBER, text):
        return binding
    return f"{name.partition('[')[0]} = {Setting.parse(name, '').replaced(number(text))!r}"


def number(text: str) -> float:
    """Returns the number in a gin text: an int if the text is an integer, else a float."""
    return int(text) if re.fullmatch(INTEGER, text) else float(text)


def _settings(names: Iterable[str], scope: str, complete: bool) -> Iterator[Setting]:
    for name in names:
        try:
            yield Setting.parse(name, scope)
        except UsageError:
            if complete:
                raise


def _key(text: str) -> Any:
    """Returns the key of an entry: a number or a text, whose quotes may be left out."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
