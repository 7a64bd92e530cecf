"""Stacks against ones put together by hand from the raw rows: while acting, in unrolls, and out of replay."""

import functools
import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, StepType, TimeStep
from alfish.environments import make_environment
from alfish.environments.vector import VectorEnvironment
from alfish.errors import UsageError
from alfish.replay import RingBuffer, SequenceIndex
from alfish.specs import ActionMask, torch_dtype
from alfish.transforms import FrameStack, RewardClip, Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
REWARD_SPEC = spaces.Box(-np.inf, np.inf, (), np.float32)
JOIN = {  # how frames are joined by hand, oldest first
    "grey": lambda frames: np.stack(frames),
    "last": lambda frames: np.concatenate(frames, -1),
    "first": lambda frames: np.concatenate(frames, 0),
    "vector": lambda frames: np.concatenate(frames),
    "mask": lambda frames: frames[-1],  # the mask of a row belongs to its action only
}
LEAVES = {
    "grey": spaces.Box(0, 255, (7, 6), np.uint8),
    "last": spaces.Box(0, 255, (6, 6, 3), np.uint8),
    "first": spaces.Box(0, 255, (2, 7, 7), np.uint8),
    "vector": spaces.Box(-9, 9, (2,), np.float32),
    "mask": ActionMask(2),
}


class Noise(gymnasium.Env):
    """Every frame is random, and so is the length of every episode: 1 to 6 actions, terminated or truncated."""

    def __init__(self):
        self.observation_space, self.action_space = spaces.Dict(LEAVES), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(1, 7))
        return self._observation(), {}

    def step(self, action):
        self._left -= 1
        truncates = bool(self.np_random.integers(2))
        return self._observation(), 1.0, self._left == 0 and not truncates, self._left == 0 and truncates, {}

    def _observation(self):
        draw = self.np_random.integers
        drawn = {
            name: draw(256, size=leaf.shape, dtype=np.uint8)
            if leaf.dtype == np.uint8
            else self.np_random.uniform(-9, 9, leaf.shape).astype(np.float32)
            for name, leaf in LEAVES.items()
        }
        return drawn | {"mask": np.array([1, draw(2)], np.int8)}  # action 0, which is taken, is allowed


class Watcher(RLAlgorithm):
    """Does nothing, and remembers what it saw."""

    on_policy = False

    def __init__(self, *specs):
        super().__init__(*specs)
        self.seen = []

    def rollout_step(self, time_step, state):
        self.seen.append(time_step)
        return AlgStep(torch.zeros_like(time_step.env_id, dtype=torch.int64), state)

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(torch.zeros_like(experience.time_step.reward))


class OnPolicyWatcher(Watcher):
    on_policy = True


def make(num_envs, num_frames=4, same_step=False, algorithm=Watcher, seed=0):
    if same_step:
        mode = AutoresetMode.SAME_STEP
        environment = VectorEnvironment(SyncVectorEnv([Noise] * num_envs, autoreset_mode=mode), list(range(num_envs)))
    else:
        environment = make_environment(Noise, num_envs, seed=seed)
    stack = functools.partial(FrameStack, num_frames=num_frames)
    transforms = Transforms([stack], environment.observation_spec, environment.reward_spec)
    watcher = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    return SyncUnroller(environment, watcher, transforms, numpy_policy=None), watcher, transforms


def by_hand(step_type, observation, num_frames):
    """Stacks of consecutive raw rows `[P]` of one column, the first of which is FIRST."""
    stacks, episode = [], []
    for p, kind in enumerate(step_type.tolist()):
        frame = {name: leaf[p].numpy() for name, leaf in observation.items()}
        episode = [frame] * num_frames if kind == FIRST else [*episode, frame]
        stacks.append({name: JOIN[name]([f[name] for f in episode[-num_frames:]]) for name in LEAVES})
    return nest.stack([nest.map(torch.from_numpy, stack) for stack in stacks])


def columns_of(unrolls):
    """Raw rows of each column, without PAD: step types `[P]` and observations `[P, ...]`."""
    step_type = torch.cat([unroll.time_step.step_type for unroll in unrolls])
    observation = nest.map(lambda *leaves: torch.cat(leaves), *[unroll.time_step.observation for unroll in unrolls])
    for column in range(step_type.shape[1]):
        real = step_type[:, column] != PAD
        yield step_type[real, column], nest.map(lambda leaf, c=column, real=real: leaf[real, c], observation)


def assert_equal(one, other):
    for path, a, b in zip(nest.paths(one), nest.leaves(one), nest.leaves(other), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), path


@pytest.mark.parametrize("num_frames", [2, 4, 5])
def test_frame_stacks_do_not_depend_on_resets_and_unroll_borders(num_frames):
    unroller, watcher, transforms = make(3, num_frames)
    unrolls = [nest.tensors(unroller.unroll(length)) for length in (1, 7, 2, 30, 1, 11)]
    seen = nest.stack([step.observation for step in watcher.seen])
    for column, (step_type, observation) in enumerate(columns_of(unrolls)):
        assert {FIRST, MID, LAST} <= set(step_type.tolist())
        stacks = by_hand(step_type, observation, num_frames)
        assert_equal(nest.map(lambda leaf, c=column: leaf[:, c], seen), stacks)
    for name, leaf in transforms.observation_spec.items():
        assert leaf.shape == seen[name].shape[2:] and torch_dtype(leaf) == seen[name].dtype
        if isinstance(leaf, ActionMask):
            continue
        assert (torch.from_numpy(leaf.high) >= seen[name]).all() and (torch.from_numpy(leaf.low) <= seen[name]).all()


@pytest.mark.parametrize("num_frames", [2, 4])
def test_transforming_a_whole_unroll_gives_what_the_policy_saw(num_frames):
    unroller, watcher, transforms = make(3, num_frames, algorithm=OnPolicyWatcher)
    for length in (1, 5, 2, 12, 1, 1, 9):
        watcher.seen.clear()
        unroll = nest.tensors(unroller.unroll(length))
        in_training = transforms.transform(unroll.time_step, unroll.transform_state)
        assert_equal(in_training, nest.stack(watcher.seen))  # length + 1 rows


@pytest.mark.parametrize(("num_frames", "length", "same_step"), [(2, 11, True), (4, 23, False), (4, 100, True)])
def test_every_window_of_replay_is_stacked_as_the_rollout_was(num_frames, length, same_step):
    """The ring of 100 rows holds them all, the others wrap several times."""
    torch.manual_seed(0)
    unroller, _, transforms = make(3, num_frames, same_step)
    assert transforms.look_back == num_frames - 1
    buffer = RingBuffer(3 * length, 3, num_ignored=transforms.look_back)
    rng, unrolls, num_checked = np.random.default_rng(0), [], 0
    for _ in range(11):
        unrolls.append(nest.tensors(unroller.unroll(int(rng.integers(1, 10)))))
        buffer.push(unrolls[-1])
        stacks = [by_hand(*rows, num_frames) for rows in columns_of(unrolls)]
        window_length = int(rng.integers(2, 6))
        if len(unrolls) < 4:
            continue
        start = buffer.draw(60, window_length)
        batch = buffer.windows(start, window_length)
        state = transforms.window_state(buffer, start.column, start.position)
        built = transforms.transform(batch.experience.time_step, state).observation
        rows = list(zip(start.column.tolist(), start.position.tolist()))
        for k in range(window_length):
            expected = nest.stack([nest.at(stacks[c], p + k) for c, p in rows])
            assert_equal(nest.at(built, k), expected)
        num_checked += len(rows)
    assert num_checked > 400


def test_windows_start_only_where_the_frame_stack_is_complete():
    """A run that was resumed without its rows, in an environment that continues."""
    unroller, _, transforms = make(1, 4)
    unrolls = [nest.tensors(unroller.unroll(1)) for _ in range(60)]
    step_type = torch.cat([unroll.time_step.step_type for unroll in unrolls])[:, 0].tolist()
    begin = next(t for t in range(60) if step_type[t : t + 5] == [FIRST, MID, MID, MID, MID])
    buffer = RingBuffer(100, 1, num_ignored=transforms.look_back)
    for unroll in unrolls[begin + 1 :]:
        buffer.push(unroll)
    [rows] = columns_of(unrolls[begin:])
    stacks = by_hand(*rows, 4)
    start = buffer.draw(500, 2)
    state = transforms.window_state(buffer, start.column, start.position)
    built = transforms.transform(buffer.windows(start, 2).experience.time_step, state).observation
    assert_equal(nest.at(built, 0), nest.map(lambda leaf: leaf[start.position + 1], stacks))


def test_the_stack_of_an_episodes_first_row_is_its_frame_repeated():
    stack = FrameStack(spaces.Box(0, 255, (2, 2), np.uint8), REWARD_SPEC, 3)
    frames = torch.arange(1, 5, dtype=torch.uint8)[:, None, None, None].expand(4, 1, 2, 2)
    step_type = torch.tensor([FIRST, MID, LAST, FIRST], dtype=torch.int32)[:, None]
    flat = torch.zeros(4, 1)
    rows = TimeStep(step_type, flat, flat, frames, flat, step_type)
    seen = stack.transform(rows, stack.initial_state(1)).observation[..., 0, 0]
    assert seen[:, 0].tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [4, 4, 4]]


def test_frames_are_stored_once_and_raw():
    unroller, _, transforms = make(2, 4)
    buffer = RingBuffer(80, 2, num_ignored=transforms.look_back)
    unroll = nest.tensors(unroller.unroll(40))
    buffer.push(unroll)
    assert isinstance(unroll, Experience)
    per_row = sum(leaf.nbytes for leaf in nest.leaves(buffer._store.rows)) / 80
    raw = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in LEAVES.values())
    assert per_row == raw + 4 + 4 + 4 + 8 + 8  # step type, reward, discount, and the action twice
    assert_equal(unroll.time_step.observation, buffer.observation(torch.tensor([0, 1]), torch.arange(40)[:, None]))


def test_input_rows_are_not_changed():
    unroller, _, transforms = make(2, 3, algorithm=OnPolicyWatcher)
    unroll = nest.tensors(unroller.unroll(9))
    before = nest.map(torch.clone, unroll)
    transforms.transform(unroll.time_step, unroll.transform_state)
    transforms(nest.at(unroll.time_step, 0), transforms.initial_state(2))
    assert_equal(unroll, before)


def test_leaves_that_cannot_be_stacked_are_refused_with_their_path():
    with pytest.raises(UsageError, match="FrameStack.num_frames is 1"):
        FrameStack(LEAVES["grey"], REWARD_SPEC, 1)
    with pytest.raises(UsageError, match="observation.digit is Discrete"):
        FrameStack({"camera": LEAVES["grey"], "digit": spaces.Discrete(3)}, REWARD_SPEC)


@pytest.mark.parametrize(
    "shape, stacked", [((10, 12, 4), (10, 12, 16)), ((2, 8, 8), (8, 8, 8)), ((5, 3), (4, 5, 3)), ((3, 3), (4, 3, 3))]
)
def test_a_frame_stack_with_hidden_channels_is_refused(shape, stacked):
    image = spaces.Box(0, 255, shape, np.uint8)
    if shape == (3, 3):  # square, so that its channels are the other dimension
        assert FrameStack(image, REWARD_SPEC).observation_spec.shape == stacked
        return
    with pytest.raises(UsageError, match=re.escape(f"makes {stacked} of the observation.camera {shape}")):
        FrameStack({"camera": image}, REWARD_SPEC)
    flat = spaces.Box(0, 1, shape, np.float32)  # is no image to an encoder
    assert FrameStack(flat, REWARD_SPEC).observation_spec.shape == stacked


def test_it_must_be_the_first_transform_because_it_reads_raw_rows():
    Transforms([FrameStack, RewardClip], LEAVES["grey"], REWARD_SPEC)
    with pytest.raises(UsageError, match="FrameStack reads stored rows"):
        Transforms([RewardClip, FrameStack], LEAVES["grey"], REWARD_SPEC)


def test_a_window_may_start_in_any_column_at_any_row_of_the_lookup():
    """`window_state` alone: the frames before a row, of that row's column."""
    unroller, _, transforms = make(3, 4)
    unrolls = [nest.tensors(unroller.unroll(40))]
    buffer = RingBuffer(120, 3, num_ignored=3)
    buffer.push(unrolls[0])
    start = SequenceIndex(torch.tensor([2, 0, 1, 2]), torch.tensor([0, 39, 17, 18]))
    [before] = transforms.window_state(buffer, start.column, start.position)
    for n, (column, position) in enumerate(zip(start.column.tolist(), start.position.tolist())):
        step_type, observation = list(columns_of(unrolls))[column]
        expected = by_hand(step_type, observation, 4)["vector"][position].reshape(4, 2)[:-1]
        assert torch.equal(before["vector"][n], expected)
