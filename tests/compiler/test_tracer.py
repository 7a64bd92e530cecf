"""A function as a graph: each operation once, none in place, random ones always."""

import threading

import numpy as np
import pytest
import torch

from alfish.compiler.tracer import NotRecordable, is_random, record

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


def test_in_place_operations_become_out_of_place():
    def function(given):
        y = given[0] * 2
        alias = y.detach()
        y.add_(1)
        return [alias]

    graph = record(function, [torch.ones(3)])
    assert targets(graph) == [aten.mul.Tensor, aten.add.Tensor]
    (results,) = list(graph.nodes)[-1].args
    assert results[0].target is aten.add.Tensor  # the alias sees what was written


def test_unused_random_numbers_are_still_drawn():
    graph = record(lambda given: [given[0].exp(), torch.rand(3), given[0]][2:], [torch.ones(3)])
    assert targets(graph) == [aten.rand.default]
    assert [is_random(node) for node in graph.nodes] == [False, True, False]


def test_values_can_be_read_again_afterwards():
    with pytest.raises(NotRecordable, match="reads values"):
        record(lambda given: given[0].tolist(), [torch.ones(3)])
    assert torch.ones(2).tolist() == torch.ones(2).numpy().tolist() == [1, 1]


def test_another_thread_reads_its_tensors_while_a_function_is_recorded():
    recording, done = threading.Event(), threading.Event()
    read = []

    def elsewhere():
        recording.wait(60)
        tensor = torch.ones(2)
        for reader in (torch.Tensor.tolist, torch.Tensor.numpy, np.asarray, lambda x: torch.tensor([x[0], x[1]])):
            try:
                read.append(list(map(float, reader(tensor))))
            except Exception as error:
                read.append(error)
        done.set()

    def function(given):
        recording.set()
        assert done.wait(60)
        return [given[0].exp()]

    thread = threading.Thread(target=elsewhere)
    thread.start()
    graph = record(function, [torch.ones(3)])
    thread.join()
    assert read == [[1, 1]] * 4 and targets(graph) == [aten.exp.default]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: np.asarray(x),
        lambda x: np.array([x[0], x[1]]),
        lambda x: np.from_dlpack(x),
        lambda x: float(x[0]),
        lambda x: int(x[0]),
        lambda x: x[0].item(),
        lambda x: range(x[0].long()),
        lambda x: bool(x[0]),
        lambda x: repr(x),
        lambda x: torch.tensor([x[0], x[1]]),
        lambda x: torch.as_tensor([[x[0]], [x[1]]]),
        lambda x: torch.asarray((x[0], x[1])),
        lambda x: x.new_tensor([x[0], x[1]]),
        lambda x: torch.Tensor([x[0], x[1]]),
    ],
)
def test_each_way_to_read_a_tensors_value_is_refused(read):
    with pytest.raises(NotRecordable, match="reads values"):
        record(lambda given: [given[0].exp(), read(given[0])][:1], [torch.ones(2)])


def test_a_tensor_of_a_tensor_or_of_numbers_is_recorded():
    graph = record(lambda given: [torch.as_tensor(given[0]) + torch.tensor([1.0, 2.0])], [torch.ones(2)])
    assert targets(graph)[-1] == aten.add.Tensor
