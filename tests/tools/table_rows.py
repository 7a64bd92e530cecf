"""A table of cases in one test: hundreds of small cases take less time than hundreds of tests."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def table_row(*names: Any) -> Iterator[None]:
    """Adds the row's names to the message of what fails inside."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"row {', '.join(map(str, names))}: {error}") from error
