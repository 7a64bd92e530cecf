"""Collecting by program: batches that go on from one another, and whole episodes of which none is favoured."""

import functools
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted import (
    DISABLED,
    FIRST,
    LAST,
    LENGTHS,
    MID,
    NEXT_STEP,
    SAME_STEP,
    Expert,
    Scripted,
    ScriptedOffPolicy,
    Still,
    assert_equal,
    recorded,
    transitions,
    unroll,
    unroller_of,
)
from toys import Stamped, TwoLengths

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.data import AlgStep
from alfish.environments import TensorEnvironment, VectorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.transforms import FrameStack, Transforms
from alfish.unrollers import AsyncUnroller, SyncUnroller

PAGE = Path(alfish.__file__).parent.parent / "docs" / "collecting.md"
MODES = [NEXT_STEP, SAME_STEP, DISABLED]


def assert_whole(episode, unroller):
    """FIRST, MID, ..., LAST, in one column, of the leaves that an unroll has."""
    step = episode.time_step
    length = len(step.step_type) - 1
    assert step.step_type.tolist() == [[FIRST], *[[MID]] * (length - 1), [LAST]]
    assert step.reward[0].item() == 0 and step.discount[:-1].eq(1).all()
    assert all(leaf.eq(0).all() for leaf in nest.leaves(nest.at(step.prev_action, 0)))
    by_unroll = unroll(unroller, 3)
    for leaf, like in zip(nest.leaves(episode[:3]), nest.leaves(by_unroll[:3]), strict=True):
        assert leaf.shape == (length + 1, 1, *like.shape[2:]) and leaf.dtype == like.dtype
    for leaf, like in zip(nest.leaves(episode[3:]), nest.leaves(by_unroll[3:]), strict=True):
        assert leaf.shape == (1, *like.shape[1:]) and leaf.dtype == like.dtype
    return length


# Batches.


@pytest.mark.parametrize("algorithm", [Scripted, ScriptedOffPolicy])
@pytest.mark.parametrize("mode", MODES)
def test_batches_continue_each_other_like_unrolls(mode, algorithm):
    one, other = (unroller_of(recorded(mode), algorithm) for _ in range(2))
    for length in (2, 5, 3, 7):
        batch = one.generate_batch(length)
        assert_equal(batch, unroll(other, length))
        if mode == NEXT_STEP:
            assert len(batch.time_step.step_type) == length + algorithm.on_policy


def test_a_batch_has_the_requested_number_of_vector_steps():
    environment = recorded(NEXT_STEP, lengths=((100,), (100,)))
    unroller = unroller_of(environment, ScriptedOffPolicy)
    for length in (4, 9, 1):
        unroller.generate_batch(length)
    assert [len(env.record) for env in environment.env.envs] == [14, 14]


class Moody(Scripted):
    def rollout_step(self, time_step, state):
        assert not self.training and not torch.is_grad_enabled()
        return super().rollout_step(time_step, state)

    def predict_step(self, time_step, state):
        raise AssertionError("to collect is to explore")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("collect", [lambda u: u.generate_batch(3), lambda u: u.generate_episodes(3)])
def test_exploring_uses_eval_mode_and_restores_the_mode(collect, training):
    unroller = unroller_of(recorded(NEXT_STEP), Moody)
    unroller._algorithm.train(training)
    collect(unroller)
    assert unroller._algorithm.training == training and torch.is_grad_enabled()


# Episodes.


@pytest.mark.parametrize(("truncates", "num_episodes"), [(False, 2), (True, 3), (False, 14)])
@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_whole_and_the_environments_own_record(mode, truncates, num_episodes):
    environment = recorded(mode, truncates)
    unroller = unroller_of(environment)
    episodes = unroller.generate_episodes(num_episodes)
    records = [list(env.record) for env in environment.env.envs]
    assert len(episodes) == num_episodes
    found = [[] for _ in LENGTHS]
    for episode in episodes:
        assert_whole(episode, unroller)
        column = int(episode.time_step.env_id[0, 0])
        assert episode.time_step.env_id.eq(column).all()
        found[column].append(transitions(episode, 0))
        last = found[column][-1][-1]
        assert last[-2:] == ((False, True) if truncates else (True, False))
        assert last[3] == LENGTHS[column][int(last[0]) % len(LENGTHS[column])] == len(found[column][-1])
    for own, record in zip(found, records):
        # All that the environment did from its first episode on, each once; then those that do not count.
        flat = [row for episode in own for row in episode]
        assert flat == record[: len(flat)] and [episode[0][0] for episode in own] == list(range(len(own)))


@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_counted_when_they_start(mode):
    """One environment ends every step, the other after 40: its first episode is the second that starts."""
    episodes = unroller_of(recorded(mode, lengths=((1,), (40,)))).generate_episodes(6)
    lengths = [len(episode.time_step.step_type) - 1 for episode in episodes]
    assert lengths == [1, 40, 1, 1, 1, 1]
    assert [int(episode.time_step.env_id[0, 0]) for episode in episodes] == [0, 1, 0, 0, 0, 0]


class TwoShortLengths(TwoLengths):
    """Episodes of 1 or 39 actions with equal odds."""

    def reset(self, **arguments):
        row = super().reset(**arguments)
        self._length = {10: 1, 500: 39}[self._length]
        return row


def test_long_episodes_are_as_frequent_as_they_are():
    """The first to finish would be the short ones, with a mean length far below 20."""
    num_envs, num_episodes = 10, 300
    environment = make_environment(TwoShortLengths, num_envs, seed=5)
    episodes = unroller_of(environment).generate_episodes(num_episodes)
    lengths = np.array([len(episode.time_step.step_type) - 1 for episode in episodes])
    assert set(lengths) == {1, 39}
    # The standard error of the mean is 1.1. And exactly: by the environments' own generators.
    assert abs(lengths.mean() - 20) < 4
    columns = np.array([int(episode.time_step.env_id[0, 0]) for episode in episodes])
    again = make_environment(TwoShortLengths, num_envs, seed=5)
    again.reset()
    for column, env in enumerate(again.env.envs):
        for length in lengths[columns == column]:
            assert length == env._length
            env.reset()


@pytest.mark.parametrize("mode", MODES)
def test_no_step_is_taken_after_the_last_end(mode):
    environment = recorded(mode, lengths=((3, 4, 5),))
    episodes = unroller_of(environment).generate_episodes(3)
    assert len(environment.env.envs[0].record) == 12 and len(episodes) == 3
    environment = recorded(mode, lengths=((3,), (100,)))
    unroller_of(environment).generate_episodes(1)
    assert [len(env.record) for env in environment.env.envs] == [3, 3]


@pytest.mark.parametrize("algorithm", [Scripted, ScriptedOffPolicy])
@pytest.mark.parametrize("mode", MODES)
def test_every_call_begins_with_resets_and_so_does_what_follows(mode, algorithm):
    unroller = unroller_of(recorded(mode, lengths=((9,), (9,), (9,))), algorithm)
    for _ in range(3):
        unroller.generate_batch(4)  # breaks off in mid-episode
        episodes = unroller.generate_episodes(4)
        assert [len(episode.time_step.step_type) for episode in episodes] == [10] * 4
        batch = unroller.generate_batch(4)
        assert batch.time_step.step_type[0].tolist() == [FIRST] * 3
        assert batch.time_step.observation[0, :, 2].tolist() == [0] * 3
        assert unroller.records.step_type[0].tolist() == [FIRST] * 3


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_episodes_of_a_tensor_environment(mode):
    unroller = unroller_of(TensorEnvironment(TensorPointMass(3, 5, autoreset=mode), seed=1))
    for episode in (episodes := unroller.generate_episodes(7)):
        assert assert_whole(episode, unroller) == 5
        step = episode.time_step
        assert step.discount[-1].item() == 1
        torch.testing.assert_close(step.observation[:, 0, 1], torch.arange(6) / 5)
        executed = episode.action[:-1].clamp(-1, 1)
        assert torch.equal(step.prev_action[1:], executed)
        x = (step.observation[:-1, 0, 0] + 0.5 * executed[:, 0, 0]).clamp(-2, 2)
        torch.testing.assert_close(step.observation[1:, 0, 0], x)
        assert torch.equal(step.reward[1:, 0], -step.observation[1:, 0, 0].abs())
    assert len({episode.time_step.observation[0, 0, 0].item() for episode in episodes}) == 7


@pytest.mark.parametrize("mode", MODES)
def test_info_and_action_belong_to_the_row_they_were_computed_from(mode):
    for episode in unroller_of(recorded(mode)).generate_episodes(8):
        observed = episode.time_step.observation[:-1]
        assert torch.equal(episode.info["seen"][:-1], observed)
        assert torch.equal(episode.info["step_type"][:-1], episode.time_step.step_type[:-1])
        assert torch.equal(episode.action[:-1], observed.sum(-1).long() % 3)


class Counting(Scripted):
    """Its memory is the number of actions in the episode, from 100 on; `info` repeats what it acted from."""

    def initial_state(self, batch_size):
        return {"count": torch.full((batch_size,), 100)}

    def rollout_step(self, time_step, state):
        step = super().rollout_step(time_step, state)
        return AlgStep(step.output, {"count": state["count"] + 1}, state["count"])


@pytest.mark.parametrize("mode", MODES)
def test_memory_belongs_to_its_episode(mode):
    unroller = unroller_of(recorded(mode), Counting)
    for _ in range(2):
        for episode in unroller.generate_episodes(9):
            length = len(episode.time_step.step_type) - 1
            assert episode.state["count"].tolist() == [100]
            assert episode.info[:-1, 0].tolist() == list(range(100, 100 + length))


@pytest.mark.parametrize("mode", MODES)
def test_what_transforms_carried_into_row_0_is_kept(mode):
    stack = functools.partial(FrameStack, num_frames=3)
    unroller = unroller_of(recorded(mode), factories=[stack])
    for episode in unroller.generate_episodes(9):
        seen = unroller._transforms.transform(episode.time_step, episode.transform_state).observation
        assert torch.equal(seen[:-1], episode.info["seen"][:-1])


@pytest.mark.parametrize("numpy_policy", [0, 5])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_acting_through_numpy_gives_equal_results(env_id, numpy_policy):
    """5: in the middle of an episode arrays take the place of tensors. And new parameters are acted with."""

    def generated(numpy_policy):
        torch.manual_seed(3)
        environment = make_environment(env_id, 3, env_kwargs={"max_episode_steps": 30}, seed=2)
        specs = environment.observation_spec, environment.reward_spec
        made = PPO(specs[0], environment.action_spec, specs[1])
        unroller = SyncUnroller(environment, made, Transforms([], *specs), numpy_policy)
        before = unroller.generate_episodes(5)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter))
        return before + unroller.generate_episodes(5)

    for one, other in zip(generated(None), generated(numpy_policy), strict=True):
        for a, b in zip(nest.leaves(one), nest.leaves(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_same_seed_gives_the_same_episodes():
    for one, other in zip(*(unroller_of(recorded(NEXT_STEP)).generate_episodes(9) for _ in range(2))):
        assert_equal(one, other)


def test_the_reported_executed_action_is_stored():
    environment = make_environment(Expert, num_envs=2)
    specs = environment.observation_spec, environment.reward_spec
    made = ScriptedOffPolicy(specs[0], environment.action_spec, specs[1])
    unroller = SyncUnroller(environment, made, Transforms([], *specs), 0, True)
    for episode in unroller.generate_episodes(3):
        own = (3 * episode.time_step.observation[1, 0, 0].sin()).clip(-1, 1).item()
        # 2, its own, 0 and -1 of [-2, 6].
        expected = [0.0, pytest.approx(own), -0.5, -0.75]
        assert episode.action[:-1, 0, 0].tolist() == expected
        assert episode.time_step.prev_action[1:, 0, 0].tolist() == expected


class Breaking(Stamped):
    def step(self, action):
        observation, *rest = super().step(action)
        return (np.full(3, np.nan, np.float32) if self._step == 2 else observation), *rest


def test_a_value_that_is_not_finite_is_named():
    env = SyncVectorEnv([lambda: Breaking((3,))] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    with pytest.raises(RunError, match="environment 0 returned an observation that is not finite in row 2"):
        unroller_of(VectorEnvironment(env, [0, 1]), Still).generate_episodes(2)


class Raising(Stamped):
    def step(self, action):
        if self._step == 1:
            raise ZeroDivisionError
        return super().step(action)


def test_an_episode_that_lost_its_environment_is_not_called_whole():
    environment = make_environment(Raising, 2)
    environment.tolerate_errors(lambda index, error: None)
    with pytest.raises(RunError, match=r"environments \[0, 1\] raised exceptions and were rebuilt.*incomplete"):
        unroller_of(environment).generate_episodes(2)


# What is refused.


@pytest.mark.parametrize("method, word", [("generate_batch", "steps"), ("generate_episodes", "episodes")])
def test_less_than_one_is_refused(method, word):
    unroller = unroller_of(recorded(NEXT_STEP))
    with pytest.raises(UsageError, match=f"{method} was asked for 0 {word}; it must be at least 1"):
        getattr(unroller, method)(0)


@pytest.mark.parametrize("method", ["generate_batch", "generate_episodes"])
def test_an_unroller_that_collects_for_a_trainer_refuses(method):
    environment = make_environment("CartPole-v1")
    specs = environment.observation_spec, environment.reward_spec
    made = ScriptedOffPolicy(specs[0], environment.action_spec, specs[1])
    unroller = AsyncUnroller(environment, made, Transforms([], *specs))
    with pytest.raises(UsageError, match=f"AsyncUnroller has no {method}, because .*; build a SyncUnroller"):
        getattr(unroller, method)(3)
    unroller.close()


# The page.


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    """docs/collecting.md, block by block, in its order; what a block prints stands behind it as comments."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "sh"}
    for language, text in blocks:
        if language == "python":
            capsys.readouterr()
            exec(compile(text, "collecting.md", "exec"), names)
            printed = capsys.readouterr().out.splitlines()
            assert [line for line in printed if f"# {line}" not in text] == []
            assert text.count("print(") == 0 or printed
        for line in text.splitlines() if language == "sh" else ():
            assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
