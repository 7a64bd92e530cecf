"""Literals of Python in texts that may come from another person."""

import ast
from typing import Any


def literal(text: str) -> Any:
    """Returns the value of a literal, such as `{'a': [1, 2.5]}`.

    Raises:
      ValueError: it is not a literal, or its parts are nested too deeply.
    """
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:  # the last two: of 50,000 minus signs
        raise ValueError(f"it is not a literal of Python: {type(error).__name__}") from error
