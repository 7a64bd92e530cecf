"""Graphs of updates that run operation by operation, because to compile one takes seconds."""

import contextlib

from alfish.compiler import inductor


def interpret(graph, *_):
    """Stands in for the compiler; see `inductor._compile`."""

    def call(leaves):
        arguments = leaves[:]
        leaves.clear()  # as what is compiled does
        return graph(*arguments)

    return call


@contextlib.contextmanager
def interpreted():
    """Runs graphs operation by operation within the context."""
    compile, inductor._compile = inductor._compile, interpret
    try:
        yield
    finally:
        inductor._compile = compile
