"""Parameters that differ between runs, or between policies of a run, and the values that they may take.

Values are kept as gin text, so that tables, files and commands show the same text.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from alfish.errors import UsageError

LISTS = ("grid", "choice")
RANGES = ("uniform", "log", "int")
INTEGER = r"[-+]?\d[\d_]*"
NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
NAME = r"[\w./]+(?:\[[\w.'\"-]+\])?"  # a parameter, or NAME[KEY] for an entry of its value
DIGITS = 6  # significant digits of a drawn number, few enough to copy by hand


@dataclass(frozen=True)
class Parameter:
    """A parameter that differs between runs.

    Attributes:
      name: name in a gin file, such as `Learner.learning_rate`.
      kind: form of the set of values: 'grid' or 'choice' for a list; 'uniform', 'log' or 'int' for a range.
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
        """All values of a list; or the ends of a range and, unless the range is of integers, a number between them."""
        if self.kind not in ("uniform", "log"):
            return self.items
        low, high = self.ends
        return *self.items, self.text(low + (high - low) / 81)

    def has(self, text: str) -> bool:
        """Returns whether a text is a value of the parameter."""
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
        """Returns the gin text of a number in the range, rounded to an integer or to `DIGITS` digits."""
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
        """Returns the value that a gin text states, in the type that `distribution` uses."""
        return text if not self.is_range else int(text) if self.kind == "int" else float(text)


def draw_log(low: float, high: float, generator: np.random.Generator) -> float:
    """Returns a log-uniform random number between two positive numbers."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def check_range(low: float, high: float, said: str, turned: str) -> None:
    """Raises UsageError if the ends of an argument's range are in the wrong order, equal or infinite.

    Args:
      low, high: ends of the range.
      said: argument as the user wrote it.
      turned: text of the range with its ends swapped.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UsageError(f"{said}: bounds must be finite numbers")
    if low >= high:
        hint = f"write {turned}" if low > high else "to set a single value, use --gin_param"
        raise UsageError(f"{said}: the range is {'upside down' if low > high else 'empty'}; {hint}")
