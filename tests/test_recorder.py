"""A function as a graph: each operation once, none in place, random ones always."""

import pytest
import torch

from alfish.recorder import NotRecordable, is_random, record

aten = torch.ops.aten


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_operations_stand_in_the_order_of_the_run():
    x, y = torch.ones(2, 3), torch.zeros(3)
    graph = record(lambda given: [(given[0].exp() + given[1]).tanh(), given[1]], [x, y])
    assert targets(graph) == [aten.exp.default, aten.add.Tensor, aten.tanh.default]
    one, other, *_, tanh, output = graph.nodes
    assert (one.op, other.op, output.op) == ("placeholder", "placeholder", "output")
    assert output.args == ([tanh, other],)
    torch.testing.assert_close(tanh.meta["val"], x.exp().tanh())


def test_an_operation_in_place_becomes_one_that_makes_a_new_tensor():
    def function(given):
        y = given[0] * 2
        alias = y.detach()
        y.add_(1)
        return [alias]

    graph = record(function, [torch.ones(3)])
    assert targets(graph) == [aten.mul.Tensor, aten.add.Tensor]
    (results,) = list(graph.nodes)[-1].args
    assert results[0].target is aten.add.Tensor  # the alias sees what was written


def test_of_what_nobody_reads_random_numbers_stay():
    graph = record(lambda given: [given[0].exp(), torch.rand(3), given[0]][2:], [torch.ones(3)])
    assert targets(graph) == [aten.rand.default]
    assert [is_random(node) for node in graph.nodes] == [False, True, False]


def test_values_can_be_read_again_afterwards():
    with pytest.raises(NotRecordable, match="looks at values"):
        record(lambda given: given[0].tolist(), [torch.ones(3)])
    assert torch.ones(2).tolist() == torch.ones(2).numpy().tolist() == [1, 1]
