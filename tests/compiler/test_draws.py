"""Random numbers of graphs that are called from Python, as those for a GPU are: in the order of the plain call."""

import plain_graphs
import pytest
import torch

from alfish.compiler import inductor
from alfish.compiler.inductor import CompiledFunction
from alfish.compiler.tracer import is_random

SHAPE = (4, 6)


def compiled(function, arguments, monkeypatch, is_called_from_cpp=False):
    """Returns the compiled function, interpreted, and the names of the random operations in its graph."""
    left = []

    def compile(graph, *_):
        left.extend(node.target.overloadpacket.__name__ for node in graph.graph.nodes if is_random(node))
        graph.graph.lint()
        return plain_graphs.interpret(graph)

    monkeypatch.setattr(inductor, "_compile", compile)
    monkeypatch.setattr(inductor, "WRAPPER_FROM_TORCH", "0" if is_called_from_cpp else "99")
    return CompiledFunction(function, arguments), left


def assert_draws_alike(function, plain, arguments):
    for seed in range(2):
        torch.manual_seed(seed)
        expected, after = plain(arguments), torch.get_rng_state()
        torch.manual_seed(seed)
        found = function(arguments)
        assert torch.equal(torch.get_rng_state(), after)
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert torch.equal(one, other) and one.stride() == other.stride()


def from_nothing(given):
    noise, order = torch.randn(SHAPE), torch.randperm(6)
    return [given[0] + noise, given[0][:, order], torch.rand(6, dtype=torch.float64), torch.randint(9, (3,))]


def like_another(given):
    x = given[0].tanh().T
    return [x * torch.randn_like(x), torch.rand_like(x), torch.bernoulli(x, 0.5)]


def filled(given):
    mask = torch.empty_like(given[0]).bernoulli_(0.7).div_(0.7)
    return [given[0] * mask, torch.empty(3).uniform_(2, 5), given[0].new_empty(5).normal_(3, 2).exp()]


def dropped(given):
    """As a GPU drops."""
    x, mask = torch.native_dropout(given[0], 0.3, True)
    y, _ = torch.native_dropout(x + 1, 0.5, True)
    return [x, mask, y, torch.randn(3)]


@pytest.mark.parametrize("function", [from_nothing, like_another, filled, dropped])
def test_graphs_draw_random_numbers_in_the_order_of_plain_calls(function, monkeypatch):
    arguments = [torch.arange(24.0).reshape(SHAPE) + 1]
    made, left = compiled(function, arguments, monkeypatch)
    assert left == []
    assert_draws_alike(made, function, arguments)


def test_gradients_pass_what_was_drawn(monkeypatch):
    def gradient(given):
        with torch.enable_grad():
            x = given[0].detach().requires_grad_()
            loss = (torch.native_dropout(x, 0.4, True)[0] * torch.randn_like(x)).sum()
            return list(torch.autograd.grad(loss, [x]))

    arguments = [torch.ones(SHAPE)]
    made, left = compiled(gradient, arguments, monkeypatch)
    assert left == []
    assert_draws_alike(made, gradient, arguments)


def chosen(given):
    return [torch.randn(2), torch.multinomial(given[0], 2)]


def filled_argument(given):
    return [torch.randn(2), given[0].bernoulli_(0.5) + 1]


def filled_under_a_view(given):
    x = torch.empty(4)
    view = x.view(2, 2)
    x.bernoulli_(0.5)
    return [torch.randn(2), view + 1]


@pytest.mark.parametrize("function", [chosen, filled_argument, filled_under_a_view])
def test_draws_stay_in_a_graph_if_one_depends_on_values(function, monkeypatch):
    arguments = [torch.rand(SHAPE)]
    made, left = compiled(function, arguments, monkeypatch)
    assert len(left) == 2
    assert_draws_alike(made, function, arguments)


def test_graphs_that_are_called_from_cpp_draw_themselves(monkeypatch):
    _, left = compiled(from_nothing, [torch.ones(SHAPE)], monkeypatch, is_called_from_cpp=True)
    assert left == ["randn", "randperm", "rand", "randint"]
