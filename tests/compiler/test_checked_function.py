"""A function that runs as a graph while its results are those of plain Python."""

import pytest
import torch

from alfish.compiler.checked_function import CheckedFunction

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_results_equal_plain_python_for_each_shape(interpreted):
    lines = []
    doubled = CheckedFunction(lambda given: {"sum": given[0] + 2 * given[1]}, "a sum", lines.append)
    for size in (3, 3, 5):
        one, other = torch.randn(2, size)
        assert torch.allclose(doubled((one, other))["sum"], one + 2 * other)
    assert [line.split(";")[0][:13] for line in lines] == ["Compiling a s", "Compiled a su"] * 2
    assert not doubled.is_plain


def test_random_numbers_equal_those_of_the_plain_call():
    noisy = CheckedFunction(lambda given: given[0] + torch.rand(4), "noise")
    torch.manual_seed(0)
    found = [noisy((torch.zeros(4),)) for _ in range(3)]
    torch.manual_seed(0)
    assert torch.equal(torch.stack(found), torch.stack([torch.rand(4) for _ in range(3)]))


@pytest.mark.parametrize("kind", ["reads a value", "depends on the number of calls"])
def test_what_cannot_be_a_graph_runs_as_plain_python(kind, interpreted, caplog):
    calls = [0]

    def function(given):
        calls[0] += 1
        if kind == "reads a value":
            return given[0] * given[0].sum().item()
        return given[0] + calls[0]

    checked = CheckedFunction(function, "a function")
    one = torch.ones(2)
    assert checked((one,)).shape == (2,) and checked.is_plain
    assert "A function runs as plain Python" in caplog.text
    assert (".item()" if kind == "reads a value" else "depends on a value that changes") in caplog.text
    caplog.clear()
    assert checked((one,)).shape == (2,) and not caplog.text
