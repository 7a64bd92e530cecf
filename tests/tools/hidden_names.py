"""Hides a private name of torch, as a release of torch does that has moved it."""

import pytest

from alfish.compiler.torch_internals import HOMES


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Lets alfish look in vain for the name, for one test; returns the place that an error names."""
    monkeypatch.setitem(HOMES, name, f"{HOMES[name]}_moved")
    return HOMES[name].replace(":", ".")
