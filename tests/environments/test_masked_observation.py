"""Environments with action masks: where a mask comes from, what becomes of it at ends, and what is refused."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from alfish import nest
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.environments.toy import MaskedIdentity, TensorPointMass
from alfish.errors import UsageError
from alfish.specs import ActionMask


class Game(gymnasium.Env):
    """Step k of an episode allows action k alone, of 4; `length` steps. The mask is everywhere at once."""

    def __init__(self, length=3, action=None, missing_at=None, empty_at=None, inside=False, ends_empty=False):
        self.action_space = action or spaces.Discrete(4, start=2)
        self.observation_space = spaces.Box(0, 9, (1,), np.float32)
        if inside:
            mask = spaces.Box(0, 1, (2, 2), np.float32)
            self.observation_space = spaces.Dict(x=self.observation_space, game=spaces.Dict(legal=mask))
        self._length, self._missing_at, self._empty_at = length, missing_at, empty_at
        self._inside, self._ends_empty = inside, ends_empty

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._observe()

    def step(self, action):
        self._step += 1
        observation, info = self._observe()
        return observation, 1.0, self._step >= self._length, False, info

    def action_masks(self):
        if self._step == self._missing_at or (self._ends_empty and self._step == self._length):
            return None
        mask = np.zeros(4, bool)
        mask[self._step % 4] = self._step != self._empty_at
        return mask

    def _observe(self):
        mask = self.action_masks()
        x = np.array([self._step], np.float32)
        observation = x
        if self._inside:
            observation = {"x": x, "game": {} if mask is None else {"legal": mask.reshape(2, 2).astype(np.float32)}}
        return observation, {} if mask is None else {"mask": mask}


SOURCES = ["info:mask", "method:action_masks", "observation:game.legal"]


def make(source, num_envs=1, evaluation=False, vectorization="sync", **settings):
    env = functools.partial(Game, inside=source.startswith("observation"), **settings)
    return make_environment(env, num_envs, evaluation=evaluation, action_mask=source, vectorization=vectorization)


def mask_of(time_step, source):
    observation = time_step.observation
    return observation["game"]["legal"] if source.startswith("observation") else observation["action_mask"]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("source", SOURCES)
def test_each_row_has_the_mask_of_the_action_at_that_row(source, vectorization):
    environment = make(source, 2, vectorization=vectorization)
    step, rows = environment.reset(), []
    for k in (0, 1, 2, 3, 0, 1):
        rows.append((step.step_type[0], mask_of(step, source)[0].tolist()))
        assert mask_of(step, source).dtype == np.int8
        step = environment.step(np.array([k, k]))
    environment.close()
    one = np.eye(4, dtype=int).tolist()
    first, mid, last = StepType.FIRST, StepType.MID, StepType.LAST
    assert rows == [(first, one[0]), (mid, one[1]), (mid, one[2]), (last, one[3]), (first, one[0]), (mid, one[1])]


@pytest.mark.parametrize("source", SOURCES)
def test_the_leaf_is_marked_and_the_others_stay(source):
    environment = make(source)
    spec = environment.observation_spec
    if source.startswith("observation"):
        assert isinstance(spec["game"]["legal"], ActionMask) and set(spec) == {"x", "game"}
    else:
        assert isinstance(spec["action_mask"], ActionMask) and set(spec) == {"observation", "action_mask"}
    assert environment.step is not None and environment.reset().observation.keys() == spec.keys()
    environment.close()


@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_that_is_missing_at_an_end_allows_everything(source):
    environment = make(source, ends_empty=True)
    environment.reset()
    for k in range(3):
        step = environment.step(np.array([k]))
    assert step.step_type.tolist() == [StepType.LAST]
    assert mask_of(step, source).tolist() == [[1, 1, 1, 1]]
    environment.close()


def test_an_empty_mask_at_an_episode_end_allows_everything():
    environment = make("info:mask", empty_at=3)
    environment.reset()
    for k in range(3):
        step = environment.step(np.array([k]))
    assert step.observation["action_mask"].tolist() == [[1, 1, 1, 1]]
    environment.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"empty_at": 2}, r"'info:mask': the mask after 2 steps of an episode forbids every choice .*\[0 0 0 0\]"),
        ({"missing_at": 1}, "'info:mask', but there was no mask after 1 steps of an episode"),
    ],
)
def test_a_mask_that_is_missing_or_allows_nothing_is_refused_with_its_row(settings, sentence):
    environment = make("info:mask", **settings)
    environment.reset()
    with pytest.raises(UsageError, match=sentence):
        for k in range(3):
            environment.step(np.array([k]))
    environment.close()


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_forbidden_action_is_refused(evaluation):
    environment = make("info:mask", evaluation=evaluation)
    environment.reset()
    with pytest.raises(UsageError, match=r"the action 5 after 0 steps .* forbidden .* allows the choices \[0\];"):
        environment.step(np.array([3]))
    environment.close()


@pytest.mark.parametrize(
    ("source", "action", "sentence"),
    [
        ("action_mask", None, "is 'action_mask'; it must be 'observation:LEAF', 'info:KEY' or 'method:NAME'"),
        ("mask:x", None, "it must be 'observation:LEAF', 'info:KEY' or 'method:NAME'"),
        ("observation:game.x", None, "the observation has no such leaf"),
        ("observation:game", None, "that leaf is Dict.*, not an array of 0 and 1"),
        ("method:legal", None, "but Game has no method legal; give a method without arguments that returns the mask"),
        (
            "method:action_space",
            None,
            r"Game has no method action_space: Game.action_space is .*; give a method without",
        ),
        ("observation:game.legal", spaces.Discrete(3), "an action mask of 4 entries, but the action .* has 3 choices"),
        ("info:mask", spaces.Box(-1, 1, (2,)), "has no choices; leave the mask out"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_at_once(source, action, sentence):
    with pytest.raises(UsageError, match=sentence):
        make(source, action=action)


def test_a_mask_of_another_size_is_refused():
    environment = make("info:mask", action=spaces.Discrete(3))
    with pytest.raises(UsageError, match="an action mask of 4 entries, but the action .* has 3 choices"):
        environment.reset()


def test_an_existing_leaf_is_named_in_the_error():
    def make_env():
        return gymnasium.wrappers.TransformObservation(
            Game(), lambda x: {"action_mask": x}, spaces.Dict(action_mask=spaces.Box(0, 9, (1,), np.float32))
        )

    with pytest.raises(UsageError, match="already has a leaf action_mask; refer to it as 'observation:action_mask'"):
        make_environment(make_env, action_mask="info:mask")


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "multi_binary"])
@pytest.mark.parametrize("source", ["info:action_mask", "method:action_masks"])
def test_the_toys_masks_allow_the_right_action_and_few_others(kind, source):
    make_env = functools.partial(MaskedIdentity, 5, 4, action=kind, length=6)
    environment = make_environment(make_env, 3, action_mask=source, seed=1)
    step, rewards = environment.reset(), []
    for _ in range(20):
        rewards += step.reward[(step.step_type == StepType.MID) | (step.step_type == StepType.LAST)].tolist()
        target, mask = (step.observation[key] for key in ("observation", "action_mask"))
        if kind == "discrete":
            assert mask.sum(1).tolist() == [1, 1, 1]
        step = environment.step(target.astype(np.int64))
    assert set(rewards) == {1.0}
    environment.close()


class TensorGame(TensorPointMass):
    """TensorPointMass with two actions, of which the mask allows one, and a leaf that is this mask."""

    def __init__(self, num_envs, empty=False, **settings):
        super().__init__(num_envs, **settings)
        self._empty = empty
        self.single_observation_space = spaces.Dict(x=self.single_observation_space, m=spaces.Box(0, 1, (2,)))
        self.single_action_space = spaces.Discrete(2)

    def step(self, action):
        return super().step(action[:, None] - 0.5)

    def _observation(self):
        right = (self._position < 0).float()
        mask = torch.stack([1 - right, right], -1) * (not self._empty)
        return {"x": super()._observation(), "m": mask}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_tensor_environment_has_its_mask_in_the_observation(autoreset):
    environment = make_environment(functools.partial(TensorGame, autoreset=autoreset), 3, action_mask="observation:m")
    step = environment.reset()
    assert isinstance(environment.observation_spec["m"], ActionMask)
    assert step.observation["m"].dtype == torch.int8
    assert environment.step(step.observation["m"].argmax(-1)).observation["m"].sum(-1).tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="observation.m forbids every choice .* in environment 0;"):
        make_environment(functools.partial(TensorGame, empty=True), 2, action_mask="observation:m").reset()
    with pytest.raises(UsageError, match="a vector class can have its masks only in the observation"):
        make_environment(TensorGame, 2, action_mask="info:m")


def test_first_rows_of_a_vector_class_that_disables_autoreset_need_an_allowed_action():
    class Empty(Game):
        """Its mask is empty after the first reset but one."""

        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict(x=self.observation_space, legal=spaces.MultiBinary(4))
            self._num_resets = 0

        def reset(self, **settings):
            self._num_resets += 1
            return super().reset(**settings)

        def _observe(self):
            observation, info = super()._observe()
            legal = self.action_masks().astype(np.int8) * (self._num_resets < 2 or self._step > 0)
            return {"x": observation, "legal": legal}, info

    def disabled(num_envs):
        return SyncVectorEnv([Empty] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    environment = make_environment(disabled, 2, action_mask="observation:legal")
    environment.reset()
    with pytest.raises(UsageError, match="observation.legal forbids every choice .* in environment 0"):
        for k in range(3):
            environment.step(np.array([k, k]))
    environment.close()


def test_a_vector_class_has_its_mask_in_the_observation():
    class Flat(Game):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.observation_space = spaces.Dict(x=self.observation_space, legal=spaces.MultiBinary(4))

        def _observe(self):
            observation, info = super()._observe()
            return {"x": observation, "legal": self.action_masks().astype(np.int8)}, info

    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):

        def make_vector(num_envs, mode=mode, member=Flat):
            return SyncVectorEnv([member] * num_envs, autoreset_mode=mode)

        environment = make_environment(make_vector, 2, action_mask="observation:legal")
        step = environment.reset()
        assert isinstance(environment.observation_space["legal"], ActionMask)
        for k in (0, 1, 2):
            assert nest.map(lambda leaf: leaf[0].tolist(), step.observation["legal"]) == np.eye(4)[k].tolist()
            step = environment.step(np.array([k, k]))
        environment.close()
        at_two = functools.partial(make_vector, member=lambda: Flat(empty_at=2))
        environment = make_environment(at_two, 2, action_mask="observation:legal")
        environment.reset()
        environment.step(np.array([0, 0]))
        with pytest.raises(UsageError, match="observation.legal forbids every choice .* in environment 0; at least"):
            environment.step(np.array([1, 1]))
        at_the_end = functools.partial(make_vector, member=lambda: Flat(empty_at=3))
        environment = make_environment(at_the_end, 2, action_mask="observation:legal")
        environment.reset()
        assert [environment.step(np.array([k, k])).step_type[0] for k in range(3)][-1] == StepType.LAST


class Wrong(Game):
    """Returns `mask` in place of its own."""

    def __init__(self, mask):
        super().__init__()
        self._wrong = mask

    def action_masks(self):
        return self._wrong


@pytest.mark.parametrize(
    "mask",
    [
        ["yes", "no", "no", "no"],
        np.full(4, np.nan),
        [0, -np.inf, 0, -np.inf],  # added to logits
        [1.0, 0.5, 0, 0],
        [0, 0, 2, -1],
        np.array([1, None, 0, 0]),
    ],
)
def test_a_mask_has_entries_0_and_1(mask):
    environment = make_environment(functools.partial(Wrong, mask), action_mask="method:action_masks")
    with pytest.raises(UsageError, match=r"action_masks' returned the action mask .*must be 1 \(allowed\) or 0"):
        environment.reset()


@pytest.mark.parametrize("mask", [[True, False, True, False], [1, 0, 1, 0], np.array([1.0, 0, 1, 0]), torch.eye(4)[0]])
def test_bools_and_numbers_of_any_dtype_are_masks(mask):
    environment = make_environment(functools.partial(Wrong, mask), action_mask="method:action_masks")
    assert environment.reset().observation["action_mask"].tolist() == [[int(one) for one in mask]]


class Masked(gymnasium.Env):
    """Its mask is none after `at_step` steps."""

    observation_space = spaces.Dict(x=spaces.Box(0, 9, (1,)), legal=spaces.Box(0, 1, (3,)))
    action_space = spaces.Discrete(3)

    def __init__(self, at_step):
        self._at_step = at_step

    def _observe(self):
        legal = np.full(3, np.nan if self._count == self._at_step else 1, np.float32)
        return {"x": np.zeros(1, np.float32), "legal": legal}

    def reset(self, *, seed=None, options=None):
        self._count = 0
        return self._observe(), {}

    def step(self, action):
        self._count += 1
        return self._observe(), 0.0, False, False, {}


@pytest.mark.parametrize("at_step", [0, 2])
def test_a_vector_class_that_returns_an_invalid_mask_is_refused(at_step):
    def games(num_envs):
        return SyncVectorEnv([functools.partial(Masked, -1), functools.partial(Masked, at_step)][:num_envs])

    environment = make_environment(games, num_envs=2, action_mask="observation:legal")
    with pytest.raises(UsageError, match="games returned the action mask .*entries must be 1"):
        environment.reset()
        assert at_step > 0
        for _ in range(2):
            environment.step(np.zeros(2, np.int64))
    assert environment.env.envs[1]._count == at_step
