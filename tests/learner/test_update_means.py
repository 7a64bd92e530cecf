"""Means over updates of which not all have the same numbers."""

import pytest
import torch

from alfish.learner import update_means
from alfish.learner.update_means import UpdateMeans
from alfish.learner.updates import UpdateStats


def of_critic(loss):
    extra = {"q": torch.tensor([2 * loss, 2.0])}
    return UpdateStats(["critic"], torch.tensor([loss, 1.0]), extra, None)


def of_both(loss):
    extra = {"q": torch.tensor([2 * loss, 2.0]), "entropy": torch.tensor([6.0, 2.0])}
    return UpdateStats(["critic", "actor"], torch.tensor([loss, -loss, 1.0, 1.0]), extra, None)


def test_few_records_are_kept_of_many_minibatches_in_one_call():
    means = UpdateMeans(["critic"])
    held = []

    def records():
        for k in range(200):
            held.append(len(means._records))
            yield of_critic(float(k))

    means.add(records())
    assert max(held) < update_means.MAX_RECORDS and means.take()["loss"] == 99.5


@pytest.mark.parametrize("max_records", [1, 2, 64])
def test_updates_without_rows_do_not_count_in_means_of_extras(monkeypatch, max_records):
    monkeypatch.setattr(update_means, "MAX_RECORDS", max_records)
    means = UpdateMeans(["critic"])
    nothing = UpdateStats(["critic"], torch.tensor([torch.nan, 1.0]), {"q": torch.zeros(2)}, None)
    means.add([nothing, of_critic(2.0), nothing])
    assert means.take()["q"] == 2
    means.add([nothing])
    assert means.take()["q"] == 0


@pytest.mark.parametrize("max_records", [1, 2, 64])
@pytest.mark.parametrize("last", [of_critic, of_both])
def test_partial_records_are_averaged_across_block_borders(monkeypatch, last, max_records):
    monkeypatch.setattr(update_means, "MAX_RECORDS", max_records)
    means = UpdateMeans(["critic", "actor"])
    for make, loss in [(of_both, 1.0), (of_critic, 2.0), (of_critic, 3.0), (of_both, 4.0), (last, 5.0)]:
        means.add([make(loss)])
    found = means.take()
    assert found["entropy"] == 3
    assert found["q"] == found["loss/critic"] == 3
    assert found["loss/actor"] == (-2.5 if last is of_critic else pytest.approx(-10 / 3))
    means.add([of_critic(7.0)])
    assert means.take() == {"loss/critic": 7, "grad_norm/critic": 1, "q": 7}, "each update counts once"


@pytest.mark.parametrize("max_records", [2, 5, 64])
def test_means_do_not_depend_on_where_a_run_was_saved(monkeypatch, max_records):
    monkeypatch.setattr(update_means, "MAX_RECORDS", max_records)
    nothing = UpdateStats(["critic"], torch.tensor([torch.nan, 1.0]), {"q": torch.zeros(2)}, None)
    made = [of_both(0.1), of_critic(0.2), of_critic(3e7), of_both(-0.4), nothing, of_both(1e-7)]
    whole = UpdateMeans(["critic", "actor"])
    whole.add(made)
    expected = whole.take()
    for saved in range(len(made) + 1):
        first, second = (UpdateMeans(["critic", "actor"]) for _ in range(2))
        first.add(made[:saved])
        second.load_state_dict(first.state_dict(), torch.device("cpu"))
        for means in (first, second):
            means.add(made[saved:])
            assert means.take() == expected and means.is_empty


def test_states_with_other_shapes_are_refused():
    means = UpdateMeans(["critic"])
    means.add([of_critic(1.0)])
    state = means.state_dict()
    for part in (
        {"sums": {"loss": torch.zeros(3)}},
        {"extras": {"q": torch.zeros(2, 2)}},
        {"totals": [[["a"], torch.zeros(1, 3)]]},
    ):
        with pytest.raises(ValueError, match="the saved means over updates has a wrong shape"):
            means.load_state_dict({**state, **part}, torch.device("cpu"))
    means.load_state_dict({}, torch.device("cpu"))
    assert means.is_empty
