"""One functional environment as an environment of gymnasium, ids, and mistakes of a class."""

import gymnasium
import numpy as np
import pytest
import torch

from alfish.environments import make_environment
from alfish.environments.functional import CartPole, FunctionalEnvironment, SingleEnvironment
from alfish.environments.vector import VectorEnvironment
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError


class Short(CartPole):
    max_episode_steps = 12


def make_short(steps=5):
    env = Short()
    env.max_episode_steps = steps
    return env


def test_an_id_is_found_by_gymnasium_and_by_alfish():
    env = gymnasium.make("alfish/CartPole-v1")
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation) and env.spec.max_episode_steps == 500
    ends = False
    while not ends:
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        ends = terminated or truncated
        assert env.observation_space.contains(observation) and type(reward) is float
    environment = make_environment("alfish/CartPole-v1", num_envs=5)
    assert isinstance(environment, FunctionalEnvironment) and environment.num_envs == 5
    assert environment.name == "alfish/CartPole-v1" and environment.env_spec.max_episode_steps == 500
    assert not environment.lacks_limit and environment.stepping == "in tensors"


@pytest.mark.parametrize(
    "env_id, kwargs, steps",
    [
        (Short, None, 12),
        (Short(), None, 12),
        (make_short, {"steps": 4}, 4),
        ("test_single:Short", None, 12),
        ("alfish.environments.functional:CartPole", None, 500),
    ],
)
def test_vector_environments_are_made_from_class_object_factory_or_name(env_id, kwargs, steps):
    environment = make_environment(env_id, num_envs=3, env_kwargs=kwargs)
    assert isinstance(environment, FunctionalEnvironment)
    assert environment.env_spec.max_episode_steps == steps
    environment.reset()


def test_wrappers_and_frames_take_single_environments():
    wrapped = make_environment(Short, num_envs=2, wrappers=["gymnasium.wrappers:FlattenObservation"])
    assert isinstance(wrapped, VectorEnvironment)
    assert wrapped.step(np.zeros(2, np.int64)) if wrapped.reset() else None
    processes = make_environment("alfish/CartPole-v1", num_envs=2, vectorization="async")
    try:
        assert processes.reset().observation.shape == (2, 4)
    finally:
        processes.close()


def test_a_single_environment_has_the_episodes_of_an_evaluation():
    env, rows = SingleEnvironment(Short()), FunctionalEnvironment(Short(), [9, 8], evaluation=True)
    observation, _ = env.reset(seed=8)
    time_step = rows.reset([9, 8])
    for step in range(12):
        assert np.array_equal(time_step.observation[1].numpy(), observation)
        observation, reward, terminated, truncated, _ = env.step(step % 2)
        time_step = rows.step(torch.full((2,), step % 2))
        assert reward == 1 and not terminated and truncated == (step == 11)
    assert not np.array_equal(env.reset()[0], env.reset()[0])


class Wrong(CartPole):
    wrong: dict = {}

    def __init__(self, **methods):
        super().__init__()
        self.__dict__.update(methods)


def first_reset(**methods):
    return FunctionalEnvironment(Wrong(**methods), [0, 1, 2]).reset()


def initial(rng, params):
    return {"place": rng["start"][:, 0], "count": torch.zeros(rng.batch_size)}


def observe(state, rng, params):
    return torch.zeros(3, 4)


def moved(place, count):
    return lambda state, action, rng, params: {"place": place(state["place"]), "count": count(state["count"])}


def same(leaf):
    return leaf


class_mistakes = [
    ({"observation_space": None}, r"^Wrong.observation_space is None; it must be the space of one environment"),
    ({"max_episode_steps": 0}, r"^Wrong.max_episode_steps is 0; it must be an integer of at least 1, or None$"),
    ({"initial_draws": {"a": 3}}, r"^Wrong.initial_draws\['a'\] is 3; it must be Uniform\(...\), Normal\(...\) or "),
    (
        {"truncated": lambda self, state, rng, params: False},
        r"^Wrong has a method `truncated`, but not the attribute `truncates`; set truncates = True in the class",
    ),
    ({"truncates": True}, r"^Wrong has no method truncated, which a functional environment needs; add it$"),
]


@pytest.mark.parametrize("attributes, sentence", class_mistakes)
def test_a_class_that_cannot_be_used_is_refused(attributes, sentence):
    with pytest.raises(UsageError, match=sentence):
        FunctionalEnvironment(Wrong(**attributes), [0])
    with pytest.raises(UsageError, match=sentence):
        SingleEnvironment(Wrong(**attributes))


def test_a_missing_method_is_named():
    class Unfinished(CartPole):
        reward = gymnasium.experimental.functional.FuncEnv.reward

    with pytest.raises(UsageError, match="^Unfinished has no method reward, which a functional environment needs"):
        make_environment(Unfinished)


def test_a_method_with_other_arguments_is_named():
    class Few(CartPole):
        def terminal(self, state):
            return state.angle > 1

    with pytest.raises(UsageError, match=r"^Few.terminal takes \(state\), but is called with \(state, rng, params\)"):
        make_environment(Few)


def counts(**others):
    return {"initial": initial, "observation": observe, "transition": moved(same, same), **others}


class Calls:
    count = 0

    def __call__(self, *arguments):
        self.count += 1
        return torch.full((3,), float(self.count))


mistakes = [
    ({"reward": Calls()}, r"^two calls of Wrong.reward with the same arguments give different results; draw random "),
    ({"initial": lambda rng, params: ()}, r"^Wrong.initial returned a state without tensors; return at least one"),
    ({"initial": lambda rng, params: {"a": 3.0}}, r"^Wrong.initial: state.a is a float; it must be a torch tensor"),
    (
        {"initial": lambda rng, params: {"a": torch.zeros(2)}},
        r"^Wrong.initial: state.a has the shape \(2,\); with 3 environments it must be \(3,\)$",
    ),
    (
        {"observation": lambda state, rng, params: torch.stack(state)},
        r"^Wrong.observation has the shape \(4, 3\); with 3 environments it must be \(3, 4\)$",
    ),
    (
        {"observation": lambda state, rng, params: {"a": state.angle}},
        r"^Wrong.observation returned the parts \['a'\], but the observation_space has \[''\]; make the two equal$",
    ),
    (
        counts(transition=moved(same, torch.Tensor.long)),
        r"^Wrong.transition returned state.count as torch.int64 \[3\], but Wrong.initial as torch.float32 \[3\]; ",
    ),
    (
        counts(transition=lambda state, action, rng, params: tuple(state.values())),
        r"^Wrong.transition returned a state whose structure differs from that of Wrong.initial: \['0', '1'\] "
        "instead of ",
    ),
    (
        counts(transition=moved(torch.Tensor.neg_, same)),
        "^Wrong.transition writes to a tensor in its arguments, which is still used elsewhere; compute a new tensor",
    ),
    (
        {"reward": lambda state, action, after, rng, params: torch.ones(3, 1)},
        r"^Wrong.reward has the shape \(3, 1\); with 3 environments it must be \(3,\)$",
    ),
    (
        {"reward": lambda state, action, after, rng, params: action},
        "^Wrong.reward returned torch.int64; a reward must be a float; convert it, for example with "
        r".to\(torch.float32\)$",
    ),
    (
        {"terminal": lambda state, rng, params: state.angle},
        r"^Wrong.terminal returned torch.float32; it must be torch.bool, for example the result of a comparison$",
    ),
]


@pytest.mark.parametrize("methods, sentence", mistakes)
def test_a_method_with_a_wrong_result_is_named_at_the_first_reset(methods, sentence):
    with pytest.raises(UsageError, match=sentence):
        first_reset(**methods)


def test_an_error_in_a_method_is_reported_with_its_place():
    def transition(state, action, rng, params):
        return rng["wind"]

    with pytest.raises(CodeError, match=r"^Wrong.transition raised KeyError: 'wind' \(.*test_single.py:\d+, in trans"):
        first_reset(transition=transition)


def test_arguments_of_an_object_are_refused():
    with pytest.raises(UsageError, match="env_kwargs is {'a': 1}, but env_id is an object; set env_id to the class"):
        make_environment(Short(), env_kwargs={"a": 1})
