from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import UnrollUse
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, take
from alfish.transforms import FrameStack, Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


def _experience(num_rows=5, num_envs=3, has_state=False, step_type=None):
    """Rows numbered 10 t + b in every leaf."""
    number = 10 * torch.arange(num_rows)[:, None] + torch.arange(num_envs)
    if step_type is None:
        step_type = torch.full((num_rows, num_envs), MID, dtype=torch.int32)
    observation = {"a": number.float()[..., None].expand(num_rows, num_envs, 2), "b": (number,)}
    time_step = TimeStep(step_type, number.float(), torch.ones_like(number), observation, number, number.int())
    state = {"h": torch.arange(num_envs).float()[:, None]} if has_state else None
    return Experience(time_step, number, {"info": number}, state, torch.zeros(num_envs, dtype=torch.int64))


def _bind(source, unroll_length=4, num_envs=3, has_state=False, again=False, prepare=lambda rows: rows, factories=()):
    """To what a source asks of an algorithm, and transforms."""
    algorithm = SimpleNamespace(
        progress=torch.zeros(()),
        has_state=has_state,
        unroll_use=UnrollUse(single_epoch=False, preprocess_each_epoch=again),
        preprocess_experience=prepare,
    )
    observation_spec = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    source.bind(algorithm, Transforms(factories, observation_spec, specs.reward_spec()), unroll_length, num_envs)
    return source


def _minibatches(source, experience, **options):
    num_rows, num_envs = experience.time_step.step_type.shape
    _bind(source, num_rows - 1, num_envs, **options).add(experience)
    return [take(chunk.source, columns) for chunk in source.chunks(0) for columns in chunk.index]


@pytest.mark.parametrize(("num_epochs", "size"), [(1, None), (3, 4), (2, 12), (4, 1)])
def test_each_row_is_drawn_once_per_epoch(num_epochs, size):
    torch.manual_seed(0)
    batches = _minibatches(EpochBatches(num_epochs, size), _experience())
    per_epoch = 12 // (size or 12)
    assert len(batches) == num_epochs * per_epoch
    for epoch in range(num_epochs):
        rows = torch.cat([b.experience.action[0] for b in batches[epoch * per_epoch : (epoch + 1) * per_epoch]])
        assert rows.sort().values.tolist() == [10 * t + b for t in range(4) for b in range(3)]


@pytest.mark.parametrize(
    ("unroll_length", "num_envs", "size"),
    [(256, 8, 64), (50, 8, 80), (128, 1, 64), (7, 1, 7), (5, 13, 65), (67, 1, 67)],
)
def test_an_automatic_minibatch_has_about_64_rows_whatever_the_unroll(unroll_length, num_envs, size):
    source = _bind(EpochBatches(1, "auto"), unroll_length, num_envs)
    assert source.updates_per_iteration == unroll_length * num_envs / size


@pytest.mark.parametrize(("sequence_length", "size"), [(None, 256), (32, 64), (16, 64), (128, 128)])
def test_an_automatic_minibatch_of_a_memory_has_whole_sequences(sequence_length, size):
    source = _bind(EpochBatches(1, "auto", sequence_length), 256, 8, has_state=True)
    assert source.updates_per_iteration == 2048 / size


def test_the_bootstrap_row_is_in_no_minibatch():
    for batch in _minibatches(EpochBatches(2, 4), _experience()):
        assert batch.experience.action.max() < 40


def test_leaves_stay_together():
    torch.manual_seed(0)
    for batch in _minibatches(EpochBatches(2, 4), _experience()):
        experience = batch.experience
        assert experience.action.shape == (1, 4)
        assert torch.equal(experience.action, experience.info["info"])
        assert torch.equal(experience.action, experience.time_step.observation["b"][0])
        assert torch.equal(experience.action.float(), experience.time_step.reward)
        assert torch.equal(experience.action.float(), experience.time_step.observation["a"][..., 1])


def test_rows_are_shuffled_in_each_epoch():
    torch.manual_seed(0)
    first, second = _minibatches(EpochBatches(2), _experience(30, 4))
    assert not torch.equal(first.experience.action, second.experience.action)
    assert not torch.equal(first.experience.action, first.experience.action.sort().values)


def test_the_mask_selects_the_rows_that_train():
    columns = [[FIRST, MID, LAST, FIRST, LAST], [MID, LAST, FIRST, MID, PAD], [LAST, FIRST, MID, PAD, PAD]]
    step_type = torch.tensor(columns, dtype=torch.int32).T
    expected = {10 * t + b: bool(m) for t, row in enumerate(trainable(step_type)) for b, m in enumerate(row)}
    assert sum(expected.values()) == 6
    seen = {}
    for batch in _minibatches(EpochBatches(1, 4), _experience(step_type=step_type)):
        seen |= dict(zip(batch.experience.action[0].tolist(), batch.mask[0].tolist()))
    assert seen == expected


@pytest.mark.parametrize("size", [None, 4, 8, 12])
def test_with_memory_sequences_are_whole_and_include_their_state(size):
    torch.manual_seed(0)
    step_type = torch.full((5, 3), MID, dtype=torch.int32)
    step_type[2, 1] = LAST
    step_type[3, 1] = FIRST
    source = EpochBatches(2, size)
    if size == 8:
        with pytest.raises(UsageError):
            _bind(source, 4, 3, has_state=True)
        return
    batches = _minibatches(source, _experience(has_state=True, step_type=step_type), has_state=True)
    assert len(batches) == 2 * 12 // (size or 12)
    for batch in batches:
        action = batch.experience.action
        columns = action[0]
        assert action.shape == (4, (size or 12) // 4)
        assert torch.equal(action, 10 * torch.arange(4)[:, None] + columns)
        assert torch.equal(batch.experience.state["h"][:, 0], columns.float())
        assert torch.equal(batch.mask, (action != 21))
    epoch = torch.cat([batch.experience.action[0] for batch in batches[: len(batches) // 2]])
    assert epoch.sort().values.tolist() == [0, 1, 2]


def test_without_memory_there_is_no_state():
    batch = _minibatches(EpochBatches(1), _experience(has_state=True))[0]
    assert batch.experience.state is None


@pytest.mark.parametrize(("again", "calls"), [(False, 1), (True, 3)])
def test_rows_are_prepared_completely_once_or_each_epoch(again, calls):
    seen = []

    def prepare(experience):
        seen.append(experience.action.shape)
        return experience._replace(info={"info": torch.full((4, 3), len(seen))})

    batches = _minibatches(EpochBatches(3, 6), _experience(), again=again, prepare=prepare)
    assert seen == [(5, 3)] * calls
    epochs = [int(batch.experience.info["info"].unique()) for batch in batches]
    assert epochs == ([1, 1, 2, 2, 3, 3] if again else [1] * 6)


def test_preparing_waits_until_the_updates_before_it_are_done():
    """A later epoch's advantages must come from the networks as they are by then."""
    order = []
    source = EpochBatches(2, 12)

    def prepare(experience):
        order.append("prepare")
        return experience

    _bind(source, again=True, prepare=prepare).add(_experience())
    assert order == []
    for _ in source.chunks(0):
        order.append("update")
    assert order == ["prepare", "update"] * 2


def test_rows_are_prepared_transformed_from_the_state_carried_into_row_0():
    experience = _experience()
    raw = experience.time_step.observation["a"]
    experience = experience._replace(time_step=experience.time_step._replace(observation=raw))
    before, prepared = -torch.ones(3, 1, 2), []
    experience = experience._replace(transform_state=(before,))

    def prepare(rows):
        prepared.append(rows.time_step.observation)
        return rows

    factories = [lambda *of: FrameStack(*of, num_frames=2)]
    (batch,) = _minibatches(EpochBatches(1), experience, prepare=prepare, factories=factories)
    expected = torch.cat([torch.cat([before.movedim(1, 0), raw[:-1]]), raw], -1)  # [5, 3, 4]: the frame before, and now
    assert len(prepared) == 1
    assert torch.equal(prepared[0], expected)
    order = batch.experience.action[0].argsort()
    assert torch.equal(batch.experience.time_step.observation[0][order], expected[:4].flatten(0, 1))
    assert batch.experience.transform_state is None


def test_a_seed_means_the_same_minibatches():
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([batch.experience.action for batch in _minibatches(EpochBatches(2, 4), _experience())])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize(("size", "nearest"), [(5, "4 and 6"), (13, "12")])
def test_an_indivisible_minibatch_is_refused_with_the_nearest_sizes(size, nearest):
    with pytest.raises(UsageError, match=rf"minibatch_size is {size}.*12 rows.*{nearest}"):
        _bind(EpochBatches(1, size), 4, 3)


def test_with_memory_a_minibatch_is_a_multiple_of_the_unroll_length():
    _bind(EpochBatches(1, 6), 4, 3)
    with pytest.raises(UsageError, match=r"whole sequences.*unroll length 4"):
        _bind(EpochBatches(1, 6), 4, 3, has_state=True)


@pytest.mark.parametrize("size", [None, 1, 3, 12])
def test_a_minibatch_that_divides_is_accepted(size):
    assert _bind(EpochBatches(1, size), 4, 3).rows_per_update == (size or 12)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize(("num_epochs", "size"), [(1, None), (3, 4), (2, 12), (5, 4)])
def test_reported_iterations_equal_yielded_iterations(num_epochs, size, has_state):
    source = EpochBatches(num_epochs, size)
    batches = _minibatches(source, _experience(has_state=has_state), has_state=has_state)
    assert len(batches) == source.updates_per_iteration == num_epochs * 12 / (size or 12)
    assert {batch.mask.numel() for batch in batches} == {source.rows_per_update} == {size or 12}


@pytest.mark.parametrize("unroll_length", [0, 0.5, 2.5])
def test_an_unroll_is_a_whole_number_of_rows(unroll_length):
    with pytest.raises(UsageError, match=f"unroll_length is {unroll_length}; on-policy it must be an integer"):
        _bind(EpochBatches(1), unroll_length)


def test_no_epoch_is_refused():
    with pytest.raises(UsageError, match="num_epochs is 0"):
        EpochBatches(0)


@pytest.mark.parametrize(("size", "count"), [(2, 3), (3, 2), (5, 1), (7, 1), (None, 1)])
def test_with_gaps_minibatches_are_drawn_among_rows_that_train(size, count):
    step_type = torch.full((5, 3), MID, dtype=torch.int32)
    step_type[2, 0], step_type[2:, 1], step_type[4:, 2] = LAST, PAD, PAD  # 3, 1 and 3 of 4 rows train
    source = EpochBatches(2, size)
    source.expected_rows = 7.0
    batches = _minibatches(source, _experience(step_type=step_type))
    found = [set(batch.experience.action[0][batch.mask[0]].tolist()) for batch in batches]
    trains = {int(10 * t + b) for t, b in trainable(step_type).nonzero().tolist()}
    assert len(batches) == 2 * count and len(trains) == 7
    for epoch in (found[:count], found[count:]):
        drawn = [row for rows in epoch for row in rows]
        assert len(drawn) == len(set(drawn)) and set(drawn) <= trains
        assert len(drawn) == (count * size if size else 7)
    assert all(batch.mask.shape[1] == (size or 12) for batch in batches)


def test_an_unroll_without_training_rows_has_no_minibatch():
    source = EpochBatches(2, 4)
    source.expected_rows = 7.0
    assert _minibatches(source, _experience(step_type=torch.full((5, 3), PAD, dtype=torch.int32))) == []


def test_take_selects_columns_of_every_field():
    experience = _experience(has_state=True)
    column = torch.arange(3)
    batch = Batch(experience, torch.ones(5, 3, dtype=torch.bool), column, 100 + column, column / 2)
    taken = take(batch, torch.tensor([2, 0]))
    assert taken.experience.action[1].tolist() == [12, 10]
    assert taken.experience.state["h"][:, 0].tolist() == [2, 0]
    assert taken.experience.policy_version.shape == (2,)
    assert taken.env_id.tolist() == [2, 0]
    assert taken.position.tolist() == [102, 100]
    assert taken.weight.tolist() == [1, 0]
    assert taken.mask.shape == (5, 2)


def test_the_unroll_itself_is_not_changed():
    experience = _experience()
    before = nest.map(torch.clone, experience)
    for batch in _minibatches(EpochBatches(2, 4), experience):
        batch.experience.action.zero_()
    assert torch.equal(experience.action, before.action)


def test_an_unroll_whose_rows_are_all_pad_trains_nothing():
    """Workers mask rows of policies that are too old, in environments that reset in the same step, too."""
    environment = make_environment("alfish/CartPole-v1", 2, seed=0)
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    algorithm = PPO(environment.observation_spec, environment.action_spec, environment.reward_spec)
    experience = nest.tensors(SyncUnroller(environment, algorithm, transforms).unroll(4))
    step_type = torch.full_like(experience.time_step.step_type, StepType.PAD)
    ends = experience.ends._replace(ended=torch.zeros_like(experience.ends.ended))
    batches = EpochBatches(1, 4)
    batches.bind(algorithm, transforms, 4, 2)
    batches.add(experience._replace(time_step=experience.time_step._replace(step_type=step_type), ends=ends))
    minibatches = [take(chunk.source, columns) for chunk in batches.chunks(8) for columns in chunk.index]
    assert not any(batch.mask.any() for batch in minibatches)
