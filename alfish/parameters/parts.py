"""Builds the parts of a run from the classes and factories that a user gave."""

import os
import re
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from alfish.errors import UsageError, first_line
from alfish.parameters import checking

T = TypeVar("T")

# Where calls of factories pass through: a TypeError raised here is about the call, not of the factory's own code.
_CALLERS = (__file__, checking.__file__, os.path.join("gin", "config.py"))


def build(factory: Callable[..., T], kind: type, name: str, *arguments: Any, **keywords: Any) -> T:
    """Calls a class or factory, and checks what it makes.

    Args:
      factory: what the user gave.
      kind: of what it makes.
      name: of the parameter, for messages, as 'Trainer.algorithm'.
      arguments, keywords: for the factory.

    Raises:
      UsageError: it cannot be called so, or makes something else.
    """
    try:
        part = factory(*arguments, **keywords)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        is_bound = unexpected is not None and unexpected[1] not in keywords  # by gin, which knows where
        if is_bound or not traceback.extract_tb(error.__traceback__)[-1].filename.endswith(_CALLERS):
            raise
        raise UsageError(f"{name} cannot be called as {_article(kind)} is: {first_line(error)}") from error
    if not isinstance(part, kind):
        made = "None" if part is None else _article(type(part))
        raise UsageError(f"{name} made {made}; it is a class, or a function that makes {_article(kind)}")
    return part


def _article(kind: type) -> str:
    name = kind.__name__
    is_spelled = name[:2].isupper()  # as RLAlgorithm and MLP
    return f"{'an' if name[0] in ('AEFHILMNORSX' if is_spelled else 'AEIOU') else 'a'} {name}"
