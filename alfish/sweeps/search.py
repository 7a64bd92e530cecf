"""The parameters in which the runs of a group differ, and the values that each may take. In a sweep these are written:

    NAME=grid(...)         each of these values; with a sampler other than the grid, any of them
    NAME=choice(...)       any of these values
    NAME=uniform(a, b)     a number between a and b
    NAME=log(a, b)         a positive number whose logarithm is uniform
    NAME=int(a, b)         an integer, both ends included

NAME is a parameter as in a gin file, and values of grid and choice are written as in a gin file: `grid('relu',
'tanh')`. In the rest of this package a value is its gin text, so that a table, a file and a command show the same text.
"""

import io
import math
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alfish.errors import UsageError

LISTS = ("grid", "choice")
RANGES = ("uniform", "log", "int")
FORMS = "grid(...), choice(...), uniform(a, b), log(a, b) or int(a, b)"
INTEGER = r"[-+]?\d[\d_]*"
NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
DIGITS = 6  # significant digits of a drawn number, so that people can copy it


@dataclass(frozen=True)
class Parameter:
    """A parameter in which runs differ.

    Attributes:
      name: name in a gin file, such as `Learner.learning_rate`.
      kind: kind of search, one of LISTS and RANGES.
      items: values of a list, or the two ends of a range, as gin texts.
    """

    name: str
    kind: str
    items: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.items)})"

    @property
    def is_range(self) -> bool:
        return self.kind in RANGES

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of a range."""
        low, high = map(float, self.items)
        return low, high

    @property
    def examples(self) -> tuple[str, ...]:
        """Each value of a list, or the ends of a range, with a fraction in between if the range has fractions."""
        if self.kind not in ("uniform", "log"):
            return self.items
        low, high = self.ends
        return *self.items, self.text(low + (high - low) / 81)

    def has(self, text: str) -> bool:
        """Returns whether a text is one of the parameter's values."""
        if not self.is_range:
            return text in self.items
        low, high = self.ends
        return re.fullmatch(INTEGER if self.kind == "int" else NUMBER, text) is not None and low <= float(text) <= high

    def draw(self, generator: np.random.Generator) -> str:
        """Returns a random value of the parameter."""
        if not self.is_range:
            return self.items[generator.integers(len(self.items))]
        low, high = self.ends
        if self.kind == "int":
            return str(generator.integers(int(low), int(high), endpoint=True))
        return self.text(draw_log(low, high, generator) if self.kind == "log" else generator.uniform(low, high))

    def text(self, value: float) -> str:
        """Returns the gin text of a number of the range, rounded to an integer or to `DIGITS` digits."""
        low, high = self.ends
        if self.kind == "int":
            return str(min(max(round(value), int(low)), int(high)))
        return repr(min(max(float(f"{value:.{DIGITS}g}"), low), high))

    def distribution(self) -> Any:
        """Returns the parameter's distribution in Optuna's form."""
        from optuna import distributions

        if not self.is_range:
            return distributions.CategoricalDistribution(self.items)
        low, high = self.ends
        if self.kind == "int":
            return distributions.IntDistribution(int(low), int(high))
        return distributions.FloatDistribution(low, high, log=self.kind == "log")

    def number(self, text: str) -> float | str:
        """Returns a value in the form in which `distribution` has it."""
        return text if not self.is_range else int(text) if self.kind == "int" else float(text)


def draw_log(low: float, high: float, generator: np.random.Generator) -> float:
    """Returns a random number between two positive numbers, with a uniform logarithm."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def corners(parameters: Sequence[Parameter]) -> list[list[str]]:
    """Returns bindings of several runs, in which each example of each parameter occurs at least once."""
    first = [parameter.items[0] for parameter in parameters]
    points = [first]
    for k, parameter in enumerate(parameters):
        points += [[*first[:k], item, *first[k + 1 :]] for item in parameter.examples[1:]]
    return [[f"{one.name}={value}" for one, value in zip(parameters, point)] for point in points]


def parse(argument: str) -> Parameter:
    """Returns the parameter of a `--search` argument.

    Raises:
      UsageError: the argument is not a search, or the ends of a range are in the wrong order or infinite.
    """
    said = f"--search={argument}"
    match = re.fullmatch(r"\s*([\w./]+)\s*=\s*(\w+)\((.*)\)\s*", argument, re.DOTALL)
    if match is None or match[2] not in (*LISTS, *RANGES) or not argument.isprintable():
        raise UsageError(f"{said} is no search: write NAME={FORMS}")
    name, kind, inner = match.groups()
    items = _split(inner, said)
    if name == "Trainer.seed":
        raise UsageError(f"{said}: seeds are repetitions of a trial; write --seeds=3 for three of each")
    if kind in LISTS:
        if not items or len(set(items)) < len(items):
            raise UsageError(f"{said}: {kind}(...) takes one or more different values")
        return Parameter(name, kind, items)
    number = INTEGER if kind == "int" else NUMBER
    if len(items) != 2 or not all(re.fullmatch(number, item) for item in items):
        raise UsageError(f"{said}: {kind}(a, b) takes two {'integers' if kind == 'int' else 'numbers'}")
    low, high = map(float, items)
    check_range(low, high, said, f"{kind}({items[1]}, {items[0]})")
    if kind == "log" and low <= 0:
        raise UsageError(f"{said}: log(a, b) takes positive numbers; uniform(a, b) takes others")
    return Parameter(name, kind, items)


def check_range(low: float, high: float, said: str, turned: str) -> None:
    """Raises UsageError if the ends of an argument's range are in the wrong order, equal or infinite.

    Args:
      low, high: ends of the range.
      said: the argument as the user wrote it.
      turned: text of the range from `high` to `low`.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError(f"{said}: bounds are finite numbers")
    if low >= high:
        hint = f"write {turned}" if low > high else "one value is a binding: --gin_param"
        raise UsageError(f"{said}: the range is {'upside down' if low > high else 'empty'}; {hint}")


def _split(text: str, said: str) -> tuple[str, ...]:
    """Returns the parts of a text between the commas outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.replace("\n", " ")).readline):
            if token.type != tokenize.OP:
                continue
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == "," and depth == 0:
                parts.append(text[start : token.start[1]])
                start = token.end[1]
    except (tokenize.TokenError, SyntaxError) as error:
        raise UsageError(f"{said}: its values are not gin ({error.args[0]})") from error
    last = text[start:]
    return tuple(part.strip() for part in [*parts, *([last] if last.strip() else [])])
