"""One update: the sums that summaries want, and the minibatch that some columns of a chunk are."""

import math

import pytest
import torch
from torch import nn

from alfish import specs
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, Batch, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.learner.batches import Minibatches, take
from alfish.learner.optimizers import Adam
from alfish.learner.updates import Updates, extra_sums

MASK = torch.tensor([[True, False, True], [False, True, True]])


def batch_of(observation, mask=MASK):
    step = TimeStep(None, None, None, torch.as_tensor(observation), None, None)
    return Batch(Experience(step, None, None, None), mask)


def sums(value, mask=MASK):
    return extra_sums(LossInfo(torch.zeros(()), extra={"it": value}), batch_of(value, mask))["it"].tolist()


class TestExtraSums:
    def test_rows_that_train_are_summed_and_counted(self):
        assert sums(torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])) == [1 + 4 + 16 + 32, 4]

    def test_every_entry_of_a_row_counts(self):
        value = torch.arange(12.0).view(2, 3, 2)
        assert sums(value) == [(0 + 1) + (4 + 5) + (8 + 9) + (10 + 11), 8]

    def test_fewer_rows_use_the_first_mask_rows(self):
        assert sums(torch.tensor([[1.0, 2.0, 4.0]])) == [5, 2]

    def test_a_tensor_without_dimensions_is_one_row(self):
        assert sums(torch.tensor(3.5)) == [3.5, 1]

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_rows_that_do_not_train_may_be_anything(self, poison):
        assert sums(torch.tensor([[1.0, poison, 4.0], [poison, 16.0, 32.0]])) == [53, 4]

    def test_no_row_at_all(self):
        assert sums(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)) == [0, 0]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
    def test_other_dtypes_become_float32(self, dtype):
        value = torch.ones(2, 3).to(dtype).requires_grad_(dtype == torch.float64)
        found = extra_sums(LossInfo(torch.zeros(()), extra={"rows": value, "one": value[0, 0]}), batch_of(value))
        assert {leaf.dtype for leaf in found.values()} == {torch.float32}
        assert not any(leaf.requires_grad for leaf in found.values())
        assert [leaf.tolist() for leaf in found.values()] == [[4, 4], [1, 1]]

    def test_nothing_extra(self):
        assert extra_sums(LossInfo(torch.zeros(2, 3)), batch_of(torch.zeros(2, 3))) == {}


class Distance(RLAlgorithm):
    """Half the squared distance of `weight` to each row; keeps the rows that it was given."""

    on_policy = True

    def __init__(self):
        super().__init__({}, {}, specs.reward_spec())
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def rollout_step(self, time_step, state):
        return AlgStep()

    def train_step(self, experience, state):
        self.seen.append(experience.time_step.observation.clone())
        return AlgStep(info=0.5 * (self.weight - experience.time_step.observation).square())

    def calc_loss(self, experience, info):
        return LossInfo(info, extra={"seen": experience.time_step.observation})


def test_an_update_trains_on_the_minibatch_of_its_columns():
    chunk = Minibatches(batch_of(torch.arange(6.0).view(2, 3)), torch.tensor([[2, 0], [1, 1]]))
    runs = []
    for by_columns in (True, False):
        algorithm = Distance()
        updates = Updates(algorithm, Adam, max_grad_norm=None)
        if by_columns:
            parts = [(chunk, columns) for columns in chunk.index]
        else:
            parts = [(Minibatches(take(chunk.source, columns), None), None) for columns in chunk.index]
        records = [updates(*part, {"all": 0.1}, summarize=True) for part in parts]
        runs.append((algorithm.weight.item(), [record.extra["seen"].tolist() for record in records], algorithm.seen))
    assert runs[0][:2] == runs[1][:2] and runs[0][0] != 0
    assert runs[0][1] == [[0 + 2 + 5, 3], [4 + 4, 2]]
    assert [rows.tolist() for rows in runs[0][2]] == [[[2, 0], [5, 3]], [[1, 1], [4, 4]]]


def test_nothing_is_summed_up_where_no_summary_is_wanted():
    updates = Updates(Distance(), Adam, max_grad_norm=None)
    record = updates(Minibatches(batch_of(torch.ones(2, 3)), None), None, {"all": 0.1}, summarize=False)
    assert record.extra == {} and record.groups == ["all"] and record.total.shape == (2,)


class TestPriority:
    PRIORITY = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    WEIGHT = torch.ones(3)

    def of_windows(self, priority, stores_recurrent_state, weight=WEIGHT):
        algorithm = Distance()
        algorithm.replay_needs = ReplayNeeds(recurrent_state=stores_recurrent_state)
        updates = Updates(algorithm, Adam, max_grad_norm=None)
        batch = batch_of(torch.zeros(2, 3))._replace(weight=weight)
        return updates.priority(LossInfo(torch.zeros(2, 3), priority=priority), batch)

    def test_without_memory_the_first_row_has_the_priority(self):
        assert self.of_windows(self.PRIORITY, False).tolist() == [1, 2, 4]

    def test_with_memory_priorities_mix_maximum_and_mean(self):
        expected = [0.9 * 1 + 0.1 * 1, 0.9 * 16 + 0.1 * 16, 0.9 * 32 + 0.1 * 18]
        assert self.of_windows(self.PRIORITY, True).tolist() == pytest.approx(expected)

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_with_memory_rows_that_do_not_train_may_be_anything(self, poison):
        found = self.of_windows(torch.where(MASK, self.PRIORITY, poison), True)
        assert found.tolist() == pytest.approx([1, 16, 0.9 * 32 + 0.1 * 18])

    def test_fewer_rows_use_the_first_mask_rows(self):
        assert self.of_windows(self.PRIORITY[:1], True).tolist() == [1, 0, 4]

    def test_nobody_asks_where_windows_were_not_weighed(self):
        assert self.of_windows(self.PRIORITY, False, weight=None) is None

    @pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(()), torch.ones(2, 2)])
    def test_another_shape_is_refused(self, wrong):
        with pytest.raises(UsageError, match="priority of Distance has shape .* one number for each row of"):
            self.of_windows(wrong, False)
