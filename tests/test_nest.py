from typing import NamedTuple

import numpy as np
import pytest
import torch

from alfish import nest


class _Pair(NamedTuple):
    left: object
    right: object


def _nest():
    return {"b": (torch.zeros(2, 3), None), "a": _Pair(torch.ones(2), torch.full((2, 1), 2.0))}


def test_map_keeps_the_structure_and_leaves_none_absent():
    doubled = nest.map(lambda leaf: 2 * leaf, _nest())
    assert isinstance(doubled["a"], _Pair)
    assert doubled["b"][1] is None
    assert torch.equal(doubled["a"].right, torch.full((2, 1), 4.0))
    assert nest.map(lambda leaf: leaf / 0, None) is None


def test_map_of_several_nests_pairs_leaves_of_one_place():
    sums = nest.map(torch.add, _nest(), _nest())
    assert torch.equal(sums["a"].left, torch.full((2,), 2.0))
    assert torch.equal(nest.map(torch.add, torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


def test_a_different_structure_is_refused():
    with pytest.raises(ValueError, match=r"(?i)expected|structure|key"):
        nest.map(torch.add, {"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_paths_name_the_leaves_in_the_order_of_leaves():
    assert nest.paths(_nest()) == ["a.left", "a.right", "b.0"]
    assert [leaf.shape for leaf in nest.leaves(_nest())] == [(2,), (2, 1), (2, 3)]
    assert nest.paths(torch.zeros(1)) == [""]
    assert nest.paths(None) == []


def test_leaves_of_tuples_equal_those_of_optree():
    a, b, c, d = (torch.tensor(i) for i in range(4))
    nests = [
        a,
        (a,),
        (),
        _Pair(a, None),
        (a, (), (b, None, _Pair(c, (d,)))),
        (None, {"z": a, "y": (b, c)}, [d]),
        [a, b],
        None,
    ]
    for each in nests:
        assert [int(leaf) for leaf in nest.leaves(each)] == [int(leaf) for leaf in nest.flatten(each)[0]]
    assert nest.leaves((np.ones(2), a))[1] is a
    assert nest.leaves((a, (b, c)), is_leaf=lambda part: isinstance(part, tuple) and part == (b, c)) == [a, (b, c)]


def test_a_host_view_shares_memory():
    number = torch.zeros((), dtype=torch.float64)
    view = nest.host_view(number)
    view[...] = 2
    assert number == 2 and float(view) == 2
    for unseen in (torch.zeros((), device="meta"), torch.zeros(2, dtype=torch.bfloat16)):
        assert nest.host_view(unseen) is unseen


def test_stack_then_index_gives_each_nest_back():
    nests = [nest.map(lambda leaf, k=k: leaf + k, _nest()) for k in range(3)]
    stacked = nest.stack(nests)
    assert stacked["b"][0].shape == (3, 2, 3)
    assert nest.stack(nests, 1)["b"][0].shape == (2, 3, 3)
    assert torch.equal(stacked["a"].left[2], nests[2]["a"].left)


def test_merge_leading_keeps_rows_in_order_of_time_then_environment():
    rows = torch.arange(6).view(3, 2)
    merged = nest.merge_leading({"flat": rows, "deep": rows[..., None, None].expand(3, 2, 4, 5)})
    assert merged["flat"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert merged["deep"].shape == (1, 6, 4, 5)
    assert merged["deep"][0, :, 3, 4].tolist() == [0, 1, 2, 3, 4, 5]


def test_where_chooses_per_row_whatever_the_rank():
    condition = torch.tensor([True, False])
    ones, zeros = ({"x": fill(2), "y": fill(2, 2, 2)} for fill in (torch.ones, torch.zeros))
    chosen = nest.where(condition, ones, zeros)
    assert chosen["x"].tolist() == [1, 0]
    assert chosen["y"].tolist() == [[[1, 1], [1, 1]], [[0, 0], [0, 0]]]


def test_detach_cuts_every_leaf():
    weight = torch.ones(2, requires_grad=True)
    assert not any(leaf.requires_grad for leaf in nest.leaves(nest.detach({"a": weight * 2, "b": (weight,)})))


def test_to_moves_every_leaf():
    assert all(leaf.device.type == "meta" for leaf in nest.leaves(nest.to(_nest(), "meta")))


@pytest.mark.parametrize("move", [nest.to, nest.tensors])
def test_only_copies_to_a_gpu_do_not_block(move):
    """A copy from a GPU that does not block may be read before it is complete."""
    calls = []

    class Leaf(torch.Tensor):
        def to(self, device, non_blocking=False):
            calls.append(non_blocking)
            return self

        def pin_memory(self):
            calls.append("pinned")
            return self

    move({"a": torch.zeros(1).as_subclass(Leaf)}, torch.device("cuda"))
    move({"a": torch.zeros(1).as_subclass(Leaf)}, torch.device("cpu"))
    assert calls == ["pinned", True, False]
