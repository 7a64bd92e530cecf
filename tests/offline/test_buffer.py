"""Every row of every episode, as the stream has it; and nothing that could write."""

import inspect

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces
from recorded import BOX_SPACES, SPACES, assert_rows, record, source, unstretched
from toys import NestedBandit, Stamped

from alfish import nest
from alfish.errors import UsageError
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.offline import buffer as buffer_module
from alfish.offline.buffer import packed_columns
from alfish.replay import RingBuffer, Uniform
from alfish.replay.ring_buffer import SequenceIndex
from alfish.specs import reward_spec
from alfish.transforms import FrameStack


@pytest.mark.parametrize("num_columns", [1, 3, 8, 50])
@pytest.mark.parametrize("pushed_rows", [4096, 4, 1])
def test_every_row_is_right_however_many_columns(num_columns, pushed_rows, monkeypatch):
    monkeypatch.setattr(buffer_module, "PUSHED_ROWS", pushed_rows)
    assert_rows(OfflineBuffer([source(record())], num_columns=num_columns), record())


def test_large_rows_are_pushed_a_few_at_a_time(monkeypatch):
    sizes = []
    push = RingBuffer.push
    monkeypatch.setattr(buffer_module, "PUSHED_BYTES", 600)

    def counted(self, rows):
        sizes.append(sum(leaf.nbytes for leaf in nest.leaves(rows)))
        push(self, rows)

    monkeypatch.setattr(RingBuffer, "push", counted)
    assert_rows(OfflineBuffer([source(record())], num_columns=3), record())
    assert len(sizes) > 3 and max(sizes) <= 600


def test_episodes_that_are_left_out_of_a_training_are_logged(caplog):
    episodes = record()
    episodes[2].rewards[0] = np.nan
    OfflineBuffer([source(episodes)], policy="drop_episode")
    assert "arrays: 1 of 11 episodes left out: reward is not finite (1 episode: 2)" in caplog.text


def test_recorded_data_have_no_newest_rows():
    buffer = OfflineBuffer([source(record())], num_columns=2)
    sampler = Uniform(recent_fraction=1.0, recent_rows=1)
    sampler.bind(buffer, 2)
    drawn = sampler.draw(5000, 0.0)
    starts = set(zip(drawn.column.tolist(), drawn.position.tolist()))
    assert len(starts) == sum(episode.length for episode in record())


def test_box_actions_have_canonical_units():
    episodes = record(continuous=True)
    episodes[1].actions[0] = BOX_SPACES.action.high
    buffer = OfflineBuffer([source(episodes, BOX_SPACES)])
    assert_rows(buffer, episodes, unstretched)
    assert "exactly at a bound" in str(buffer.report)
    assert_rows(OfflineBuffer([source(episodes, BOX_SPACES)], action_limit=1.0), episodes, unstretched, limit=1)


def test_sources_are_concatenated_and_length_selects_episodes():
    episodes = record()
    halves = [source(episodes[:5]), source(episodes[5:])]
    assert_rows(OfflineBuffer(halves), episodes)
    buffer = OfflineBuffer([source(episodes[:5]), source(episodes[5:])], length=26)
    assert_rows(buffer, episodes[:5])  # 4 + 6 + 2 + 9 + 3 rows, and 4 more would be 28
    (ids,) = [ids for what, ids in buffer.report.found("warning").items() if "does not fit" in what]
    assert ids == [f"arrays {k}" for k in range(5, 11)]


def test_items_are_packed_longest_first_into_the_emptiest_column():
    assert packed_columns([3, 9, 5, 5, 1], 2) == [[1, 0], [2, 3, 4]]
    assert packed_columns([2, 2], 5) == [[0], [1]]


def test_nested_observations_and_actions_pass_through():
    env = NestedBandit(nested_action=True)
    env.reset(seed=0)
    env.action_space.seed(0)
    observations, actions = [env.reset()[0]], []
    for _ in range(4):
        actions.append(env.action_space.sample())
        observations.append(env.step(actions[-1])[0])

    def stacked(parts):
        return nest.map(lambda *leaves: np.stack(leaves), *parts)

    flags = np.array([False, False, False, True])
    episode = Episode("0", stacked(observations), stacked(actions), np.ones(4), flags, ~flags & False)
    buffer = OfflineBuffer([Arrays([episode], Spaces(env.observation_space, env.action_space))])
    read = buffer.windows(SequenceIndex(torch.tensor([0]), torch.tensor([0])), 5).experience
    seen = read.time_step.observation
    assert seen["digit"][:, 0].tolist() == [observation["digit"] - 2 for observation in observations]
    assert seen["vector"].dtype == torch.float32 and seen["image"].dtype == torch.uint8
    assert read.time_step.prev_action["choice"][1:, 0].tolist() == [action["choice"] - 1 for action in actions]
    box = np.array([action["parts"][0] for action in actions])
    np.testing.assert_allclose(read.time_step.prev_action["parts"][0][1:, 0], (box + 1) / 2, atol=1e-6)


@pytest.mark.parametrize("num_columns", [1, 3])
def test_a_window_past_its_column_repeats_the_last_row_untrained(num_columns):
    buffer = OfflineBuffer([source(record())], num_columns=num_columns)
    for column in range(num_columns):
        last = max((e for e in buffer.episodes if e.column == column), key=lambda e: e.position)
        start = SequenceIndex(torch.tensor([column]), torch.tensor([last.position + last.length - 1]))
        batch = buffer.windows(start, 6)
        step = batch.experience.time_step
        assert step.step_type[1:, 0].tolist() == [2] * 5 and batch.mask[:, 0].tolist() == [True, *[False] * 4]
        assert (step.observation[1:, 0] == step.observation[1, 0]).all()


def test_frame_stacks_use_only_rows_of_the_same_episode():
    buffer = OfflineBuffer([source(record())], num_columns=2)
    stack = FrameStack(SPACES.observation, reward_spec(), num_frames=3)
    start = buffer.draw(500)
    batch = buffer.windows(start, 2)
    before = stack.window_state(buffer, start.column, start.position)
    seen = stack.transform(batch.experience.time_step, before).observation[0].reshape(500, 3, 3)
    _, episode, step = seen.unbind(-1)
    assert (episode == episode[:, -1:]).all()
    assert (step == (step[:, -1:] - torch.tensor([2, 1, 0])).clamp(min=0)).all()


def test_vector_rewards_are_kept():
    episodes = [episode._replace(rewards=np.stack([episode.rewards, -episode.rewards], 1)) for episode in record(3)]
    buffer = OfflineBuffer([source(episodes)])
    stored = buffer.episodes[1]
    reward = buffer.read(torch.tensor([stored.column]), torch.arange(stored.position, stored.position + 6)[:, None])
    assert reward.time_step.reward[:, 0].tolist() == [[0, 0], *[[k, -k] for k in range(1, 6)]]


def test_an_offline_buffer_is_read_only():
    buffer = OfflineBuffer([source(record())])
    with pytest.raises(TypeError, match="read-only"):
        buffer.push(buffer.sample(4).experience)
    with pytest.raises(TypeError, match="read-only"):
        buffer.clear()
    assert_rows(buffer, record())


def test_rows_may_lie_in_files(tmp_path):
    assert_rows(OfflineBuffer([source(record())], directory=tmp_path), record())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 0


def test_a_resumed_run_must_find_the_same_data():
    state = OfflineBuffer([source(record())]).state_dict()
    assert not any(isinstance(leaf, torch.Tensor) for leaf in state.values())  # the rows are in their files
    OfflineBuffer([source(record())]).load_state_dict(state)
    changed = record()
    changed[3].rewards[2] += 1
    with pytest.raises(UsageError, match="restore the data, or"):
        OfflineBuffer([source(changed)]).load_state_dict(state)
    with pytest.raises(UsageError, match="has 45 rows"):
        OfflineBuffer([source(record(9))]).load_state_dict(state)


def test_spaces_that_differ_are_both_named():
    buffer = OfflineBuffer([source(record())])
    buffer.check_spaces(*SPACES)
    other = spaces.Box(-1, 1, (4,), np.float32)
    with pytest.raises(UsageError) as error:
        buffer.check_spaces(other, SPACES.action)
    assert str(other) in str(error.value) and str(SPACES.observation) in str(error.value)
    with pytest.raises(UsageError, match=r"Discrete\(3\).*Discrete\(4\)"):
        buffer.check_spaces(SPACES.observation, spaces.Discrete(4))


def test_observation_bounds_may_differ_but_action_bounds_are_units():
    buffer = OfflineBuffer([source(record(continuous=True), BOX_SPACES)])
    buffer.check_spaces(spaces.Box(-np.inf, np.inf, (3,), np.float64), BOX_SPACES.action)
    of_integers = spaces.Box(
        BOX_SPACES.action.low.astype(np.int8), BOX_SPACES.action.high.astype(np.int8), dtype=np.int8
    )
    with pytest.raises(UsageError, match="action"):
        buffer.check_spaces(SPACES.observation, of_integers)
    with pytest.raises(UsageError, match="the actions of"):
        buffer.check_spaces(SPACES.observation, spaces.Box(-1, 1, (2,), np.float32))


def test_sources_of_different_spaces_do_not_mix():
    with pytest.raises(UsageError, match="those of arrays are"):
        OfflineBuffer([source(record()), source(record(continuous=True), BOX_SPACES)])


def test_missing_spaces_are_refused():
    with pytest.raises(UsageError, match="OfflineBuffer.env_id"):
        OfflineBuffer([Arrays(record())])
    assert_rows(OfflineBuffer([Arrays(record())], spaces=SPACES), record())
    assert_rows(OfflineBuffer([Arrays(record())], env_id=Stamped), record())


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"sources": []}, "at least one"),
        ({"sources": "npz:x"}, "give a list"),
        ({"action_limit": 0.0}, r"in \(0, 1\]"),
        ({"num_columns": 0}, "num_columns is 0"),
        ({"length": 1}, "length is 1"),
        ({"length": 3}, "first episode of arrays has more rows"),
        ({"policy": "ignore"}, "'raise', 'drop_episode', 'warn'"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, words):
    with pytest.raises(UsageError, match=words):
        OfflineBuffer(**{"sources": [source(record())], **arguments})


def test_windows_that_run_past_a_column_are_not_gathered_where_the_rows_lie():
    buffer = OfflineBuffer([source(record())], num_columns=2)
    assert buffer.in_place(2) is not None
    assert buffer.in_place(3) is None


def test_held_out_rows_include_returns():
    buffer = OfflineBuffer([source(record())], holdout_fraction=0.3, return_gamma=0.9)
    assert buffer.holdout.sample(4).experience.return_to_go.isfinite().all()


BOUND = """
OfflineBuffer.holdout_fraction = 0.3
OfflineBuffer.top_fraction = 0.9
OfflineBuffer.length = 40
OfflineBuffer.env_id = @Stamped
OfflineBuffer.policy = 'warn'
OfflineBuffer.num_columns = 2
OfflineBuffer.action_limit = 0.9
OfflineBuffer.device = 'cpu'
OfflineBuffer.directory = None
OfflineBuffer.keeps_episodes = True
OfflineBuffer.return_gamma = 0.9
"""


def test_a_held_out_buffer_ignores_gins_bindings():
    gin.parse_config(BOUND)
    bound = {line.partition(" ")[0].partition(".")[2] for line in BOUND.split("\n") if line}
    assert bound == {*inspect.signature(OfflineBuffer).parameters} - {"sources", "spaces"}  # all that can be
    episodes = record()
    episodes[3].rewards[0] = np.inf  # which 'warn' lets pass
    buffer = OfflineBuffer([source(episodes)])
    # Episodes 0 to 7 have 36 rows, 8 would be 45, and 7 is the worst of them.
    assert [episode.id for episode in buffer.episodes] == ["0", "2", "4", "6"]
    assert [episode.id for episode in buffer.holdout.episodes] == ["1", "3", "5"]
