"""`make_environment`: ids, constructors, wrappers and seeds; and a clear sentence for every mistake."""

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import threading
import types
from typing import ClassVar

import gin
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from toys import OneState, Stamped

from alfish.algorithms.ppo import PPO
from alfish.environments import TensorEnvironment, VectorEnvironment, make_environment
from alfish.environments.action_bounds import bounded
from alfish.environments.make import spawn_seeds
from alfish.environments.sequential import SequentialVectorEnv
from alfish.environments.toy import TensorPointMass
from alfish.environments.wrapping import ScalarReward
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.parameters import imports
from alfish.training.trainer import Trainer


def stamps(seed, num_envs, **options):
    environment = make_environment(Stamped, num_envs=num_envs, seed=seed, **options)
    found = environment.reset().observation[:, 0].tolist()
    environment.close()
    return found


def test_environments_of_all_runs_have_different_seeds():
    found = [stamp for seed in range(5) for stamp in stamps(seed, 4)]
    assert len(set(found)) == 20
    assert stamps(1, 4)[1] != stamps(2, 4)[0]  # what reset(seed=run) would make equal


def test_seeds_do_not_depend_on_the_number_of_environments():
    assert stamps(3, 4)[:2] == stamps(3, 2)


def test_sync_and_async_unrollers_start_equally():
    assert stamps(3, 2) == stamps(3, 2, vectorization="async")


def wrapped_cart_poles(num_envs):
    """Members behind a vector wrapper."""
    return RecordEpisodeStatistics(gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync"))


@pytest.mark.parametrize("vectorization", ["sync", "async", "vector_entry_point", "wrapped"])
def test_a_resumed_run_continues_the_episode_sequence(vectorization):
    """And not, at every resume, with those from the run's beginning."""

    def make():
        if vectorization == "wrapped":
            return make_environment(wrapped_cart_poles, num_envs=2, seed=3)
        return make_environment("CartPole-v1", num_envs=2, vectorization=vectorization, seed=3)

    def starts(environment, num_steps):
        found = []
        for _ in range(num_steps):
            row = environment.step(np.zeros(2, np.int64))
            found += [row.observation[i].tolist() for i in range(2) if row.step_type[i] == 0]
        return found

    one = make()
    before = [one.reset().observation[i].tolist() for i in range(2)] + starts(one, 40)
    state = one.state_dict()
    assert len(state["generators"]) == (1 if vectorization == "vector_entry_point" else 2)
    one.close()
    after = []
    for _ in range(2):
        other = make()
        assert not other.load_state_dict(state)
        after.append(starts(other, 40))
        other.close()
    assert after[0] == after[1] and len(after[0]) > 6
    assert not {tuple(start) for start in before} & {tuple(start) for start in after[0]}


def test_seeds_are_children_of_one_seed_sequence():
    children = np.random.SeedSequence(9).spawn(3)
    assert spawn_seeds(9, 3) == [int(child.generate_state(1)[0] >> 1) for child in children]
    assert all(0 <= seed < 2**31 for seed in spawn_seeds(9, 100))


@pytest.mark.parametrize("vectorization, kind", [("sync", SequentialVectorEnv), ("async", AsyncVectorEnv)])
def test_what_we_build_resets_in_the_next_step(vectorization, kind):
    environment = make_environment("CartPole-v1", num_envs=2, vectorization=vectorization)
    assert isinstance(environment.env, kind)
    assert environment.env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    assert not environment.uneven
    environment.close()


@pytest.mark.parametrize("vectorization", ["sync", "async", "vector_entry_point", "envpool"])
def test_evaluation_is_always_single_environments_whose_resets_the_caller_owns(vectorization):
    if vectorization == "envpool":
        pytest.importorskip("envpool")
    environment = make_environment("CartPole-v1", num_envs=2, vectorization=vectorization, evaluation=True)
    assert isinstance(environment.env, SequentialVectorEnv)
    assert environment.env.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    assert environment.seeds_rows and not environment.uneven


def test_a_constructor_takes_env_kwargs():
    environment = make_environment(OneState, num_envs=2, env_kwargs={"length": 1})
    environment.reset()
    assert environment.step(np.zeros(2, np.int64)).step_type.tolist() == [2, 2]


def test_a_vector_constructor_must_accept_num_envs():
    environment = make_environment(TensorPointMass, num_envs=5, env_kwargs={"length": 3})
    assert isinstance(environment, TensorEnvironment) and environment.num_envs == 5
    environment = make_environment(functools.partial(TensorPointMass, length=3), num_envs=2)
    assert isinstance(environment, TensorEnvironment) and environment.num_envs == 2


class Plus(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward + 10


class Times(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward * 2


def test_wrappers_apply_innermost_first_and_training_wrappers_not_in_evaluation():
    def reward(**options):
        environment = make_environment(OneState, **options)
        environment.reset()
        return environment.step(np.zeros(1, np.int64)).reward.item()

    assert reward() == 1
    assert reward(wrappers=[Plus, Times]) == 22
    assert reward(wrappers=[Plus], training_wrappers=[Times]) == 22
    assert reward(wrappers=[Plus], training_wrappers=[Times], evaluation=True) == 11


class Rewarding(OneState):
    """Rewards with whatever it is given."""

    def __init__(self, reward):
        super().__init__()
        self._reward = reward

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self._reward, *rest


@pytest.mark.parametrize(
    "reward", [2.5, np.float64(2.5), np.array(2.5), np.array([2.5]), np.array([[2.5]], np.float32), torch.tensor(2.5)]
)
def test_a_reward_of_one_element_becomes_a_number(reward):
    environment = make_environment(Rewarding, num_envs=2, env_kwargs={"reward": reward})
    environment.reset()
    row = environment.step(np.zeros(2, np.int64))
    assert row.reward.tolist() == [2.5, 2.5] and row.reward.dtype == np.float32


def test_render_mode_reaches_the_environment():
    environment = make_environment("CartPole-v1", render_mode="rgb_array", evaluation=True)
    assert environment.env.envs[0].unwrapped.render_mode == "rgb_array"


# Mistakes.


def test_a_misspelt_id_is_named_with_close_names():
    with pytest.raises(UsageError, match="there is no environment 'CartPol-v1'; close ones are .*CartPole-v1"):
        make_environment("CartPol-v1")
    with pytest.raises(UsageError, match="there is no environment 'CartPol-v1'"):
        make_environment("CartPol-v1", vectorization="vector_entry_point")


@pytest.mark.parametrize("name", ["Task", "made"])
def test_a_class_or_function_may_be_named_as_text(tmp_path, monkeypatch, name):
    (tmp_path / "task_of_tests.py").write_text(
        "from toys import OneState as Task\n\n\ndef made(length):\n    return Task(length)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for vectorization in ("sync", "async"):
        kwargs = {"length": 1}
        environment = make_environment(f"task_of_tests:{name}", vectorization=vectorization, env_kwargs=kwargs)
        environment.reset()
        assert environment.name == ("OneState" if name == "Task" else "made")
        assert environment.step(np.zeros(1, np.int64)).step_type.item() == 2
        environment.close()


def test_text_that_names_a_vector_class_makes_a_vector_environment():
    environment = make_environment("alfish.environments.toy:TensorPointMass", num_envs=3)
    assert environment.num_envs == 3 and isinstance(environment.env, TensorPointMass)


def test_a_configuration_of_another_user_names_no_function_as_an_environment():
    with imports.restricted(()):
        assert make_environment("gymnasium.envs.classic_control:CartPoleEnv").name == "CartPoleEnv"
        with pytest.raises(UsageError, match="make_environment.env_id calls a function of 'os', which is not part of"):
            make_environment("os:system", env_kwargs={"command": "true"})


@pytest.mark.parametrize(
    "env_id, words",
    [
        ("Docking-v0", "'Docking-v0'; if your module registers it, write 'my_module:Docking-v0'"),
        ("HalfCheetah-v9", "'HalfCheetah-v9'; close ones are HalfCheetah-v5, HalfCheetah-v4; if your module"),
        ("MiniGrid-Empty-5x5-v0", r"write 'minigrid:MiniGrid-Empty-5x5-v0' \(pip install minigrid\)"),
        ("FetchReach-v4", r"'gymnasium_robotics:FetchReach-v4' \(pip install gymnasium-robotics 'mujoco<3.12'\)"),
        ("gym_pusht/PushT-v0", r"write 'gym_pusht:gym_pusht/PushT-v0' \(pip install gym-pusht\)"),
        ("VizdoomBasic-v1", r"write 'vizdoom.gymnasium_wrapper:VizdoomBasic-v1' \(pip install vizdoom\)"),
        ("json/Docking-v0", "write 'json:json/Docking-v0'$"),  # a module that is there
        ("no_such_lab/Docking-v0", "if your module registers it, write 'my_module:no_such_lab/Docking-v0'"),
        ("PongNoFrameskip-v4", "this game is now 'ALE/Pong-v5'"),
        ("SpaceInvaders-v0", "this game is now 'ALE/SpaceInvaders-v5'"),
        ("procgen:procgen-coinrun-v0", "imports 'procgen', which is not installed"),
        ("procgen-coinrun-v0", "procgen supports only the old gym"),
        ("my_lab.tasks.Reach", "a class or function of a module as 'my_lab.tasks:Reach'"),
        ("minigrid:MiniGrid-Empty-5x5-v0", "needs minigrid: pip install minigrid"),
        ("alfish.environments.toy:Bandits", "after importing alfish.environments.toy, nor a class or function"),
    ],
)
def test_an_unknown_id_is_refused_with_the_correct_form(monkeypatch, env_id, words):
    found = importlib.util.find_spec
    absent = ("minigrid", "vizdoom")
    monkeypatch.delitem(gymnasium.registry, env_id, raising=False)  # ale_py registers old names of games too
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    with pytest.raises(UsageError, match=words):
        make_environment(env_id)


@pytest.mark.parametrize("installed, words", [("3.11.0", ""), ("3.12.0", "3.12"), ("4.0.0", "4.0"), ("10.1", "10.1")])
def test_an_engine_that_is_too_new_for_a_package_is_named(monkeypatch, installed, words):
    """pip installs the newest engine, because the package declares no limit."""

    class Fetch(gymnasium.Env):
        def __init__(self):
            raise AssertionError

    robotics = types.ModuleType("gymnasium_robotics")
    robotics.__spec__ = importlib.machinery.ModuleSpec("gymnasium_robotics", None)
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", robotics)
    monkeypatch.setitem(gymnasium.registry, "FetchLift-v0", EnvSpec("FetchLift-v0", entry_point=Fetch))
    monkeypatch.setattr(importlib.metadata, "version", {"mujoco": installed}.__getitem__)
    with pytest.raises(CodeError, match="the constructor of .* raised AssertionError") as error:
        make_environment("gymnasium_robotics:FetchLift-v0")
    cure = "is too new for gymnasium-robotics: pip install 'mujoco<3.12'"
    assert str(error.value).endswith(f"; mujoco {installed} {cure}") == bool(words)


def test_an_environment_of_the_old_gym_is_named(tmp_path, monkeypatch):
    class Older:
        observation_space = action_space = spaces.Discrete(2)

    gym = types.ModuleType("gym")
    gym.Env, gym.envs = Older, types.SimpleNamespace(registry={"Older-v0": None})
    monkeypatch.setitem(sys.modules, "gym", gym)
    (tmp_path / "older_of_tests.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    words = (
        "; it is an environment of the old gym, whose reset and step return other values; wrap it in a gymnasium.Env"
    )
    with pytest.raises(UsageError, match=f"Older makes a Older, not a gymnasium.Env{words}"):
        make_environment(Older)
    with pytest.raises(UsageError, match=f"nor a class or function of that name in it{words}"):
        make_environment("older_of_tests:Older-v0")
    with pytest.raises(UsageError, match="nor a class or function of that name in it$"):
        make_environment("older_of_tests:Qqqqqqqqqqqq-v0")


def test_an_environment_that_refuses_the_render_mode_of_films_is_named(monkeypatch):
    class OnScreen(OneState):
        metadata: ClassVar = {"render_modes": ["human", "ansi"]}

        def __init__(self, render_mode=None):
            super().__init__()
            assert render_mode in (None, "human")

    monkeypatch.setitem(gymnasium.registry, "OnScreen-v0", EnvSpec("OnScreen-v0", entry_point=OnScreen))
    words = "OnScreen-v0 cannot be filmed: its render modes are human, ansi, but a film needs rgb_array$"
    with pytest.warns(UserWarning, match="not in the possible"), pytest.raises(UsageError, match=words):
        make_environment("OnScreen-v0", render_mode="rgb_array")
    make_environment("OnScreen-v0", evaluation=True).close()


def test_a_module_instead_of_an_id_is_refused_with_its_environments(tmp_path, monkeypatch):
    (tmp_path / "crane_of_tests.py").write_text(
        "import gymnasium\nfrom gymnasium import Env\n\n\nclass Crane(Env):\n    pass\n\n\n"
        "class Older:\n    def reset(self): ...\n    def step(self, action): ...\n\n\n"
        "class Slow(gymnasium.Wrapper):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    words = "crane_of_tests is a module: write 'crane_of_tests:Crane' or 'crane_of_tests:Older'$"
    with pytest.raises(UsageError, match=words):
        make_environment("crane_of_tests")
    with imports.restricted(["crane_of_tests"]), pytest.raises(UsageError, match="if your module registers it"):
        make_environment("crane_of_tests")  # of another person, whose configuration imports nothing without a colon


def test_an_unfamiliar_id_is_refused_without_suggestions():
    with pytest.raises(UsageError, match="there is no environment 'qqqqqqqqqqqq'(?!; close)"):
        make_environment("qqqqqqqqqqqq")


def test_a_missing_module_is_named():
    with pytest.raises(UsageError, match="imports 'no_such_module_of_mine', which is not installed"):
        make_environment("no_such_module_of_mine:MyEnv-v0")


def test_an_installed_module_registers_its_environments(tmp_path, monkeypatch):
    (tmp_path / "brings_an_env.py").write_text(
        "import gymnasium\ngymnasium.register('Brought-v0', 'toys:OneState', kwargs={'length': 1})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment("brings_an_env:Brought-v0")
    environment.reset()
    assert environment.step(np.zeros(1, np.int64)).step_type.item() == 2


@pytest.mark.parametrize("env_id", ["CartPole-v1", OneState, TensorPointMass])
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_misspelt_env_kwarg_is_named(env_id, evaluation):
    with pytest.raises(UsageError, match="env_kwargs.*lenght"):
        make_environment(env_id, env_kwargs={"lenght": 3}, evaluation=evaluation)


def test_a_misspelt_env_kwarg_of_a_vector_class_is_named():
    with pytest.raises(UsageError, match="env_kwargs.*lenght"):
        make_environment("CartPole-v1", vectorization="vector_entry_point", env_kwargs={"lenght": 3})


def test_constructor_arguments_without_a_value_are_named():
    class Sized(OneState):
        def __init__(self, width, *, height, **kwargs):
            super().__init__(**kwargs)

    words = r"Sized requires 'width'; give make_environment.env_kwargs = {'width': ...}"
    with pytest.raises(UsageError, match=words):
        make_environment(Sized)
    with pytest.raises(UsageError, match="Sized requires 'height'; give"):
        make_environment(Sized, env_kwargs={"width": 2})


def test_environment_type_errors_are_not_blamed_on_env_kwargs():
    def broken():
        raise TypeError("unsupported operand")

    with pytest.raises(CodeError, match="^the constructor of broken raised TypeError: unsupported operand"):
        make_environment(broken)


@pytest.mark.parametrize("name", ["wrappers", "training_wrappers"])
@pytest.mark.parametrize(
    "env_id, vectorization",
    [("CartPole-v1", "vector_entry_point"), ("CartPole-v1", "envpool"), (TensorPointMass, "sync")],
)
def test_wrappers_that_could_not_be_applied_are_refused(env_id, vectorization, name):
    with pytest.raises(UsageError, match="wrappers applies to single environments"):
        make_environment(env_id, vectorization=vectorization, **{name: [Plus]})


def test_an_id_without_a_vector_class_is_refused():
    with pytest.raises(UsageError, match="Pendulum-v1.*vector_entry_point"):
        make_environment("Pendulum-v1", vectorization="vector_entry_point")
    with pytest.raises(UsageError, match="'vector_entry_point' requires an id, but env_id is OneState"):
        make_environment(OneState, vectorization="vector_entry_point")


@pytest.mark.parametrize(
    "env_id, modules, extra",
    [
        ("HalfCheetah-v5", ["mujoco", "gymnasium.envs.mujoco"], "mujoco"),
        ("LunarLander-v3", ["Box2D", "gymnasium.envs.box2d"], "box2d"),
    ],
)
def test_a_missing_extra_is_named_with_its_pip_command(monkeypatch, env_id, modules, extra):
    for name in [name for name in sys.modules if name.startswith(tuple(modules))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, modules[0], None)  # what a missing module looks like to import
    with pytest.raises(UsageError, match=rf"{env_id} needs the extra '{extra}': pip install 'alfish\[{extra}\]'"):
        make_environment(env_id)


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_removed_environment_ids_do_not_suggest_an_extra():
    pytest.importorskip("mujoco")
    with pytest.raises(UsageError, match="HalfCheetah-v3 cannot be built: .*gymnasium-robotics"):
        make_environment("HalfCheetah-v3")


def test_missing_atari_is_named_with_its_pip_command(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ale_py" else found(name))
    with pytest.raises(UsageError, match=r"ALE/Pong-v5 needs the extra 'atari': pip install 'alfish\[atari\]'"):
        make_environment("ALE/Pong-v5")


def test_missing_envpool_is_named_with_its_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UsageError, match=r"needs the extra 'envpool': pip install 'alfish\[envpool\]'"):
        make_environment("CartPole-v1", vectorization="envpool")


def test_a_misspelt_envpool_id_is_named_with_close_names():
    pytest.importorskip("envpool")
    with pytest.raises(UsageError, match="EnvPool has no environment 'CartPol-v1'; close ones are .*CartPole-v1"):
        make_environment("CartPol-v1", vectorization="envpool")


def test_an_unknown_vectorization_is_refused_with_known_names():
    with pytest.raises(UsageError, match="vectorization is 'thread'; it must be one of .*sync.*async"):
        make_environment("CartPole-v1", vectorization="thread")


@pytest.mark.parametrize("num_envs", [0, -1])
def test_at_least_one_environment(num_envs):
    with pytest.raises(UsageError, match=f"num_envs is {num_envs}; it must be an integer of at least 1"):
        make_environment("CartPole-v1", num_envs=num_envs)


def test_a_space_that_cannot_be_learned_from_is_refused_before_any_step():
    class Writes(OneState):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict(note=spaces.Text(5))

    with pytest.raises(UsageError, match="observation.note is a Text space"):
        make_environment(Writes)


def test_the_result_is_an_environment_of_the_stream():
    environment = make_environment("Pendulum-v1", num_envs=3)
    assert isinstance(environment, VectorEnvironment) and environment.num_envs == 3
    assert environment.action_spec == spaces.Box(-1, 1, (1,), np.float32)
    assert environment.reward_spec.shape == ()


class Spaces(OneState):
    def __init__(self, **own):
        super().__init__()
        vars(self).update(own)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("space", [spaces.Box, spaces.Dict({}), spaces.Box(-1, 1, (0,))])
def test_a_space_without_content_is_refused_before_gymnasium_sees_it(vectorization, name, space):
    with pytest.raises(UsageError, match=f"the space of {name.removesuffix('_space')} is "):
        make_environment(Spaces, 2, vectorization, {name: space})


class VectorReward(OneState):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.float32([reward, 2.0]), *rest


def test_a_vector_reward_is_refused_in_one_sentence():
    environment = make_environment(VectorReward, 2)
    environment.reset()
    words = (
        r"environment has 2 entries, but the environment has no reward_space; declare one, a Box of shape \(2,\), or "
        "add the"
    )
    with pytest.raises(UsageError, match=words):
        environment.step(np.zeros(2, np.int64))
    environment.close()
    in_a_process = ScalarReward(VectorReward())
    in_a_process.reset()
    with pytest.raises(UsageError, match=words):
        in_a_process.step(0)


def test_the_name_and_the_time_limit_of_a_task_are_known(monkeypatch):
    def about(*arguments, **options):
        environment = make_environment(*arguments, **options)
        environment.close()
        return environment.name, environment.lacks_limit

    assert about("CartPole-v1") == ("CartPole-v1", False)
    assert about("Blackjack-v1") == ("Blackjack-v1", True)
    assert about("Blackjack-v1", vectorization="async") == ("Blackjack-v1", True)
    assert about("Blackjack-v1", env_kwargs={"max_episode_steps": 9}) == ("Blackjack-v1", False)
    limit = functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=5)
    assert about("Blackjack-v1", wrappers=[limit]) == ("Blackjack-v1", False)
    assert about(OneState) == ("OneState", False)  # nothing says so
    assert about(TensorPointMass, 2) == ("TensorPointMass", False)
    assert about(functools.partial(OneState, 3)) == ("OneState", False)
    gymnasium.register("Frames-v0", OneState, kwargs={"max_num_frames_per_episode": 9})
    monkeypatch.setattr(OneState, "__init__", lambda self, **_: Stamped.__init__(self))
    assert about("Frames-v0") == ("Frames-v0", False)  # as Atari's emulator is told
    del gymnasium.registry["Frames-v0"]


def test_a_factory_that_makes_no_environment_is_named():
    class Older:  # of a library before gymnasium
        observation_space = action_space = spaces.Discrete(2)
        reset = step = None

    with pytest.raises(UsageError, match="env_id: Older makes a Older, not a gymnasium.Env"):
        make_environment(Older)
    with pytest.raises(UsageError, match="env_id: getcwd makes a str, not a gymnasium.Env"):
        make_environment(os.getcwd)
    words = "wrappers: TimeLimit cannot be called with an environment and .*: .* required positional argument: 'max_ep"
    with pytest.raises(UsageError, match=words):
        make_environment("CartPole-v1", wrappers=[gymnasium.wrappers.TimeLimit])


def test_wrappers_are_taken_by_name():
    wrappers = [
        ["gymnasium.wrappers:FrameStackObservation", {"stack_size": 3}],
        "gymnasium.wrappers:FlattenObservation",
    ]
    environment = make_environment("CartPole-v1", num_envs=2, wrappers=wrappers)
    assert environment.observation_space.shape == (12,)
    environment.close()
    for name, words in (
        (
            "FlattenObservation",
            "a name consists of a module and a class in it, as in 'gymnasium.wrappers:FlattenObservation'",
        ),
        ("gymnasium.wrappers:Flatten", "gymnasium.wrappers has no such class or function"),
        (
            "no_such_module_of_mine:Flat",
            "make_environment.wrappers imports 'no_such_module_of_mine', which is",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            make_environment("CartPole-v1", wrappers=[name])


def test_the_configuration_of_a_run_names_wrapper_classes_only():
    with imports.restricted([]):
        make_environment("CartPole-v1", wrappers=["gymnasium.wrappers:FlattenObservation"]).close()
        with pytest.raises(UsageError, match="make_environment.wrappers calls a function of 'subprocess', which"):
            make_environment("CartPole-v1", wrappers=[["subprocess:call", {"args": ["true"]}]])


def test_a_vector_class_in_gin_must_accept_num_envs():
    made = gin.external_configurable(type("Vectors", (TensorPointMass,), {}), module="tests.make")
    assert make_environment(made, num_envs=3).num_envs == 3


WRAPPERS = [
    (
        [["gymnasium.wrappers:TimeLimit", 5]],
        "wrappers has .'gymnasium.wrappers:TimeLimit', 5.; an entry must be a class",
    ),
    (
        [["gymnasium.wrappers:TimeLimit", {}, 7]],
        "an entry must be a class, the name of a class, or a list of one of these and a dict of keyword",
    ),
    ([[]], r"wrappers has \[\]; an entry must be"),
    (["builtins:id"], "make_environment.wrappers: id returned a int, not a gymnasium.Env"),
    (
        ["gymnasium.wrappers.vector:RecordEpisodeStatistics"],
        "construction raised TypeError: Expected env to be a `gy",
    ),
    ([["gymnasium.wrappers:TimeLimit", {"max_episode_steps": -3}]], "construction raised ValueError: Expect the `ma"),
]


@pytest.mark.parametrize(("wrappers", "words"), WRAPPERS)
def test_an_invalid_wrapper_is_named(wrappers, words):
    with pytest.raises(UsageError, match=words):
        make_environment(Stamped, wrappers=wrappers)


def test_an_environment_that_gymnasium_refuses_is_reported_in_one_sentence():
    with pytest.raises(UsageError, match="env_kwargs is {1: 2}; its keys must be names of arguments, in quotes"):
        make_environment("CartPole-v1", env_kwargs={1: 2})

    class Changing(OneState):
        sizes = iter(range(2, 9))

        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(-1, 1, (next(self.sizes),))

    with pytest.raises(UsageError, match="Changing violates gymnasium's interface: construction raised RuntimeError"):
        make_environment(Changing, num_envs=2)


def returning(**changes):
    """An environment whose `reset` or `step` returns what a function makes of what it should."""

    def changed(name, change):
        return lambda self, *arguments, **keywords: change(getattr(OneState, name)(self, *arguments, **keywords))

    return type("Wrong", (OneState,), {name: changed(name, change) for name, change in changes.items()})


BREACHES = {
    "no info": ({"reset": lambda row: row[0]}, "reset raised"),
    "an info that is none": ({"reset": lambda row: (row[0], None)}, "reset raised"),
    "nothing": ({"step": lambda row: None}, "step raised TypeError: cannot unpack non-iterable NoneType"),
    "four": (
        {"step": lambda row: row[:4]},
        r"step raised ValueError: not enough values to unpack \(expected 5, got 4",
    ),
    "a list of infos": ({"step": lambda row: (*row[:4], [1])}, "step raised"),
    "no reward": ({"step": lambda row: (row[0], None, *row[2:])}, r"step raised TypeError: float\(\)"),
    "no observation": ({"step": lambda row: (None, *row[1:])}, "step raised"),
    "text at the end": (
        {"step": lambda row: (*row[:2], "no", *row[3:])},
        "returned terminated = 'no'; it must be True or",
    ),
    "None at the end": (
        {"step": lambda row: (*row[:3], None, row[4])},
        "returned truncated = None; it must be True or Fal",
    ),
    "a half end": (
        {"step": lambda row: (*row[:2], 0.5, *row[3:])},
        "returned terminated = 0.5; it must be True or False",
    ),
    "an array of ends": ({"step": lambda row: (*row[:2], np.array([False]), *row[3:])}, r"terminated = array\(\[Fals"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_environments_that_break_the_api_of_gymnasium_are_refused(name):
    changes, words = BREACHES[name]
    environment = make_environment(returning(**changes), num_envs=2)
    with pytest.raises(UsageError, match=words):
        environment.reset()
        environment.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    "changes",
    [
        {"reset": lambda row: (row[0], {"mask": np.ones(OneState().action_space.n)}), "step": lambda row: row[:4]},
        {"reset": lambda row: (row[0], None)},
    ],
)
def test_a_breach_is_found_even_when_masks_or_rewards_are_read(changes):
    for settings in ({"action_mask": "info:mask"}, {"rewards": {"all": "reward"}}):
        with pytest.raises(UsageError, match="violates gymnasium's interface"):
            environment = make_environment(returning(**changes), **settings)
            environment.reset()
            environment.step(np.zeros(1, np.int64))


def test_a_wrong_seed_argument_is_a_breach_but_an_environment_error_is_not():
    class Old(OneState):
        def reset(self):
            return 0, {}

    with pytest.raises(UsageError, match="Old violates gymnasium's interface: reset raised TypeError: .*keyword arg"):
        make_environment(Old).reset()

    def breaks(row):
        raise ZeroDivisionError("the physics exploded")

    environment = make_environment(returning(step=breaks))
    environment.reset()
    with pytest.raises(CodeError, match=r"step raised ZeroDivisionError: the physics exploded \(.*, in breaks\)"):
        environment.step(np.zeros(1, np.int64))


@pytest.mark.filterwarnings("ignore:.*(ERROR|WARN):")  # gymnasium's own words
def test_a_breach_in_another_process_ends_at_once():
    environment = make_environment(returning(step=lambda row: (*row[:4], [1])), vectorization="async")
    try:
        environment.reset()
        with pytest.raises(UsageError, match=r"step raised TypeError: its info is \[1\], which is not a dict"):
            environment.step(np.zeros(1, np.int64))
    finally:
        environment.close()


@pytest.mark.filterwarnings("ignore:.*(ERROR|WARN):")  # gymnasium's own words
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("reward", "kind"), [([0.5], "list"), (None, "NoneType")])
def test_a_reward_that_is_not_a_number_is_a_breach(vectorization, reward, kind):
    made = returning(step=lambda row: (row[0], reward, *row[2:]))
    environment = make_environment(made, vectorization=vectorization)
    try:
        environment.reset()
        with pytest.raises(
            UsageError, match=f"violates gymnasium's interface: step raised TypeError: .* not '{kind}'; "
        ):
            environment.step(np.zeros(1, np.int64))
    finally:
        environment.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_metadata_that_are_none_are_a_breach(vectorization):
    class Bare(OneState):
        metadata = None

    with pytest.raises(UsageError, match="Bare violates gymnasium's interface: construction raised TypeError: "):
        make_environment(Bare, vectorization=vectorization)


def test_a_process_that_cannot_have_children_gets_one_sentence(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(UsageError, match="vectorization is 'async', but this process is daemonic, .* use 'sync', or"):
        make_environment(OneState, vectorization="async")


class Popping(Stamped):
    """Takes its settings out of the dict that it receives, and writes to a list."""

    def __init__(self, config, **options):
        super().__init__()
        self.limit = config.pop("limit")
        config["seen"].append(self.limit)
        self.seen = config["seen"]


class Settings(gymnasium.Wrapper):
    def __init__(self, env, config):
        super().__init__(env)
        self.limit = config.pop("limit")


def popping_vector(num_envs, config):
    limit = config.pop("limit")
    return SequentialVectorEnv([Stamped] * (num_envs + limit - 3), AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_each_environment_has_its_own_copy_of_the_arguments(vectorization):
    config = {"limit": 3, "seen": []}
    partial = functools.partial(functools.partial(Popping, config), unused=config)
    wrapper = ["tests.environments.test_make:Settings", {"config": {"limit": 4}}]
    of_partial = functools.partial(Settings, config={"limit": 5})
    for env_id, env_kwargs in [(Popping, {"config": config}), (partial, {})]:
        options = {"env_kwargs": env_kwargs, "wrappers": [wrapper, of_partial], "vectorization": vectorization}
        for evaluation in (False, True):
            environment = make_environment(env_id, num_envs=3, evaluation=evaluation, **options)
            environment.reset()
            if vectorization == "sync":
                assert [env.unwrapped.seen for env in environment.env.envs] == [[3]] * 3
            environment.close()
    assert config == {"limit": 3, "seen": []}


def test_a_vector_class_does_not_write_to_the_arguments_either():
    config = {"limit": 3}
    for evaluation in (False, True):
        assert make_environment(popping_vector, num_envs=2, env_kwargs={"config": config}, evaluation=evaluation)
    assert config == {"limit": 3}


def test_what_cannot_be_copied_is_shared():
    config = {"limit": 3, "seen": [], "lock": threading.Lock()}
    environment = make_environment(Popping, num_envs=2, env_kwargs={"config": config, "lock": config["lock"]})
    assert environment.num_envs == 2
    assert set(config) == {"limit", "seen", "lock"}


class OwnStatistics(gymnasium.Wrapper):
    """Normalizes with gymnasium's statistics, in a wrapper of its own."""

    def __init__(self, env):
        super().__init__(env)
        self.statistics = gymnasium.wrappers.utils.RunningMeanStd()


def normalized_pendulum():
    return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.NormalizeObservation(gymnasium.make("Pendulum-v1")), 20)


def normalized_vector(num_envs):
    return gymnasium.wrappers.vector.NormalizeObservation(gymnasium.make_vec("Pendulum-v1", num_envs))


@pytest.mark.parametrize(
    ("env_id", "options", "names"),
    [
        (
            "Pendulum-v1",
            {"wrappers": ["gymnasium.wrappers:NormalizeObservation"]},
            "NormalizeObservation .*@Observation",
        ),
        ("Pendulum-v1", {"wrappers": [gymnasium.wrappers.NormalizeReward]}, "NormalizeReward .*@RewardNormalizer"),
        ("Pendulum-v1", {"training_wrappers": [gymnasium.wrappers.NormalizeReward]}, "NormalizeReward "),
        ("Pendulum-v1", {"wrappers": [OwnStatistics]}, "OwnStatistics .*@ObservationNormalizer"),
        (normalized_pendulum, {}, "NormalizeObservation "),
        (normalized_vector, {}, "NormalizeObservation "),
    ],
)
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_wrappers_whose_statistics_outlive_episodes_are_refused(env_id, options, names, vectorization):
    for evaluation in (False, True):
        if evaluation and "training_wrappers" in options:
            continue
        with pytest.raises(UsageError, match=names):
            make_environment(env_id, num_envs=2, vectorization=vectorization, evaluation=evaluation, **options)


def frozen(env):
    env = gymnasium.wrappers.NormalizeObservation(env)
    env.update_running_mean = False
    return env


def test_statistics_that_stand_still_pass():
    assert make_environment("Pendulum-v1", wrappers=[frozen]).num_envs == 1


class FailsToClose(Stamped):
    def close(self):
        raise ValueError("no display")


class TensorFailsToClose(TensorPointMass):
    def close(self):
        raise ValueError("no display")


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(
    ("env_id", "vectorization"), [(FailsToClose, "sync"), (FailsToClose, "async"), (TensorFailsToClose, "sync")]
)
def test_an_environment_that_fails_to_close_is_logged(env_id, vectorization, evaluation, caplog):
    environment = make_environment(env_id, num_envs=2, vectorization=vectorization, evaluation=evaluation)
    environment.reset()
    environment.close()
    if vectorization == "sync":  # else another process says it
        assert all(f"{env_id.__name__}.close raised ValueError: no display" in text for text in caplog.messages)
        assert len(caplog.messages) == (1 if env_id is TensorFailsToClose else 2)  # each one is closed


class Told(TensorPointMass):
    """Notes what it is told of its run."""

    notes: ClassVar[list] = []

    def __init__(self, num_envs, seed, device="cpu", evaluation=False, index=None, length=3):
        super().__init__(num_envs, length, device)
        self.notes.append((seed, device, evaluation, index))
        self._generator.manual_seed(seed)

    def reset(self, *, seed=None, options=None):
        return super().reset()  # as libraries that take their seed in the constructor


def test_a_vector_callable_receives_its_run():
    Told.notes.clear()
    for seed in (0, 1):
        make_environment(Told, num_envs=2, seed=seed)
        make_environment(Told, num_envs=2, seed=seed, evaluation=True)
    make_environment(Told, num_envs=2, device="cpu:0", index=3, env_kwargs={"evaluation": True})
    make_environment(functools.partial(Told, seed=5), num_envs=2)
    assert [note[1:] for note in Told.notes] == [
        *[("cpu", evaluation, 0) for evaluation in (False, True)] * 2,
        ("cpu:0", True, 3),
        ("cpu", False, 0),
    ]
    seeds = [note[0] for note in Told.notes]
    assert len(set(seeds[:4])) == 4 and seeds[4] == seeds[0] and seeds[5] == 5


def test_constructor_seeds_differ_between_runs_and_evaluations():
    environments = [make_environment(Told, num_envs=2, seed=seed, evaluation=of) for seed in (0, 1) for of in (0, 1)]
    starts = {tuple(environment.reset().observation[:, 0].tolist()) for environment in environments}
    assert len(starts) == 4


def test_a_trainer_logs_its_device(tmp_path):
    Told.notes.clear()
    factory = functools.partial(make_environment, Told, num_envs=2)
    trainer = Trainer(tmp_path, algorithm=PPO, environment=factory, unroll_length=8, num_iterations=1, listeners=[])
    trainer.evaluator(1).close()
    trainer.close()
    assert {note[1] for note in Told.notes} == {str(trainer.device)}


UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Free(gymnasium.Env):
    """Acts without bounds, and returns its action as the observation."""

    observation_space, action_space = UNBOUNDED, UNBOUNDED

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return action, 0.0, False, False, {}


class FreeVectors(TensorPointMass):
    single_observation_space = single_action_space = UNBOUNDED

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.single_observation_space = self.single_action_space = UNBOUNDED

    def reset(self, **settings):
        return torch.zeros(self.num_envs, 2), {}

    def step(self, action):
        return action, *super().step(action)[1:]


@pytest.mark.parametrize("env_id", [Free, FreeVectors])
@pytest.mark.parametrize(("bounds", "expected"), [(3.0, [3, 1.5]), ([1, 2], [1, 1])])
def test_action_bounds_bound_actions_without_bounds(env_id, bounds, expected):
    environment = make_environment(env_id, num_envs=2, action_bounds=bounds)
    assert environment.action_spec.is_bounded("both")
    environment.reset()
    row = environment.step(environment.convert(torch.tensor([[1.0, 0.5]] * 2)))
    assert row.observation.tolist() == [expected] * 2


def box(low, high):
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32))


def test_action_bounds_fill_in_what_is_missing():
    assert bounded(box([-np.inf, 0], [2, np.inf]), 5) == box([-5, 0], [2, 5])
    assert bounded(spaces.Box(-1e38, 1e38, (2, 1)), [1, 2]) == box([[-1], [-2]], [[1], [2]])


@pytest.mark.parametrize(
    ("space", "bounds", "words"),
    [
        (
            spaces.Discrete(3),
            1.0,
            r"which requires a Box of floats, but the action space is Discrete\(3\); leave action_bounds out",
        ),
        (spaces.Box(-1, 1, (2,)), 1.0, "the action space already has bounds, Box.*; leave action_bounds out"),
        (UNBOUNDED, [1.0, 2.0, 3.0], r"which has 3 numbers, but actions have shape \(2,\); give one number for"),
        (UNBOUNDED, -1.0, "must be positive"),
        (UNBOUNDED, [1.0, np.nan], "must be positive"),
        (spaces.Box(5, np.inf, (2,)), 1.0, "must be positive, .* upper bound of Box.* a above the lower bound"),
    ],
)
def test_action_bounds_that_do_not_fit_are_refused(space, bounds, words):
    with pytest.raises(UsageError, match=f"make_environment.action_bounds is .*{words}"):
        bounded(space, bounds)


class OldStep(gymnasium.Wrapper):
    """A wrapper for the old gym: `step` returns four values."""

    def step(self, action):
        return super().step(action)[:4]


def test_a_breach_names_the_wrappers_that_may_cause_it():
    environment = make_environment("CartPole-v1", wrappers=[OldStep])
    environment.reset()
    with pytest.raises(UsageError, match="CartPole-v1 in the wrapper OldStep violates gymnasium's interface"):
        environment.step(np.zeros(1, np.int64))
    environment.close()


class TestOneInstance:
    """A function that returns an environment that exists already."""

    def test_of_several_environments_is_refused(self):
        env = gymnasium.make("CartPole-v1")
        with pytest.raises(UsageError, match="returned the same CartPoleEnv twice; make a new one in each call"):
            make_environment(lambda: env, num_envs=2)

    def test_in_training_and_evaluation_is_reported(self, caplog):
        env = gymnasium.make("CartPole-v1")
        training = make_environment(lambda: env)
        assert caplog.text == ""
        evaluation = make_environment(lambda: env, evaluation=True)
        assert (
            "returned the same CartPoleEnv twice, so training and evaluation end each other's episodes" in caplog.text
        )
        caplog.clear()
        training.close()
        evaluation.close()
        make_environment(lambda: env).close()
        assert caplog.text == ""
