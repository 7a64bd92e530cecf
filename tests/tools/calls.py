"""Counts of Python calls."""

import gc
import sys


def python_calls(function):
    """How many Python functions and builtins `function()` calls."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # collecting calls the finalizers of what other tests have left
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
