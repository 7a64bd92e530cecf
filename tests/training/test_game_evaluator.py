"""Evaluation of several policies in games."""

import functools
from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from toy_games import Counting, Dash, Meeting

from alfish.algorithms.ppo import PPO
from alfish.data import AlgStep
from alfish.environments.games import make_games
from alfish.errors import UsageError
from alfish.exporting import verification
from alfish.learner.batches import EpochBatches
from alfish.training.game_evaluator import GameEvaluator
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer

SETTINGS = {"algorithm": PPO, "batches": functools.partial(EpochBatches, num_epochs=1, minibatch_size=8)}


def trainer_of(tmp_path, game=Meeting, policies="each", listeners=(), **changed):
    given = {"num_iterations": 2, "unroll_length": 8, **SETTINGS, **changed}
    environment = functools.partial(make_games, game, num_games=2)
    return Trainer(tmp_path / "run", environment=environment, policies=policies, listeners=list(listeners), **given)


class OfLengths(Counting):
    """Games whose lengths depend on their seeds."""

    def reset(self, seed=None, options=None):
        self.length = 6 + 5 * (seed % 3)
        super().reset(seed)


def test_returns_cover_the_agents_of_each_policy(tmp_path):
    trainer = trainer_of(tmp_path, policies={"x": "a", "y": ["b", "c"]})
    evaluation = trainer.evaluator(3).evaluate(3, seed=5)
    # In a Meeting, the reward of step t is t + 1, and of b the negative.
    a, b, c = sum(range(1, 9)), -(3 + 4 + 7 + 8), sum(range(1, 8))
    assert evaluation.by_objective == {"x": (a,) * 3, "y": ((b + c) / 2,) * 3}
    assert evaluation.returns == ((a + (b + c) / 2) / 2,) * 3 and evaluation.lengths == (8,) * 3
    assert "(x 36, y 3)" in evaluation.words()
    assert evaluation.scalars("evaluation")["evaluation/mean_return/y"] == 3


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_infos_are_means_over_the_agents_of_each_policy(tmp_path, num_envs):
    trainer = trainer_of(tmp_path, policies={"x": "a", "y": ["b", "c"]}, evaluation_infos=["time"])
    evaluator = trainer.evaluator(3, num_envs)
    assert evaluator.evaluate(3, seed=5).infos == {"x/time": (8,) * 3, "y/time": ((8 + 7) / 2,) * 3}
    evaluator.max_length, evaluator.infos = 5, ["time", "zzz"]
    logged = []
    evaluator.log = logged.append
    cut = evaluator.evaluate(3, seed=5)
    assert cut.infos == {"x/time": (5,) * 3, "y/time": ((4 + 5) / 2,) * 3}
    assert sum("'zzz', which matched no number" in line for line in logged) == 1


def test_infos_of_random_agents_are_left_out(tmp_path):
    trainer = trainer_of(tmp_path, policies={"x": "a", "y": ["b", "c"]}, evaluation_infos=["time"])
    assert trainer.evaluator(2, 2, lineup={"b": "random"}).evaluate(2).infos == {"x/time": (8, 8), "y/time": (7, 7)}
    assert trainer.evaluator(2, 2, lineup={"a": "random"}).evaluate(2).infos == {"y/time": (7.5, 7.5)}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("game", [OfLengths, Meeting])
def test_a_game_does_not_depend_on_the_games_beside_it(tmp_path, sample, game):
    trainer = trainer_of(tmp_path, game, {"p": ("*", 3)})
    found = [trainer.evaluator(5, num_envs).evaluate(5, 7, sample) for num_envs in (1, 3, 5)]
    assert repr(found[0]) == repr(found[1]) == repr(found[2])
    assert np.isnan(list(found[0].by_objective.values())).any()  # not each policy plays in each game


@pytest.mark.parametrize("sample", [False, True])
def test_random_opponents_do_not_depend_on_the_games_beside_them(tmp_path, sample):
    trainer = trainer_of(tmp_path, OfLengths)
    lineup = {"player_[12]": "random"}
    found = [trainer.evaluator(4, num_envs, lineup=lineup).evaluate(4, 7, sample) for num_envs in (1, 2, 4)]
    assert repr(found[0]) == repr(found[1]) == repr(found[2])


class Recorded(Dash):
    """Dash, whose right runner observes a further number; records the actions of both runners."""

    pairs: ClassVar[list] = []

    def observation_space(self, agent):
        return spaces.Box(0, 1, (4 if agent == "right" else 3,), np.float32)

    def observed(self):
        observed = super().observed()
        return observed | {"right": np.append(observed["right"], np.float32(0))}

    def step(self, actions):
        self.pairs.append((int(actions["left"]), int(actions["right"])))
        return super().step(actions)


@pytest.mark.parametrize("lineup", [None, {"left": "random"}, {"right": "random"}])
def test_agents_of_different_groups_act_independently(tmp_path, lineup):
    trainer = trainer_of(tmp_path, Recorded)
    Recorded.pairs.clear()
    trainer.evaluator(40, 1, lineup=lineup).evaluate(40, 0, sample=True)
    equal = np.mean([left == right for left, right in Recorded.pairs])
    assert 0.2 < equal < 0.5 and len(Recorded.pairs) > 200  # of 3 actions; 1 if both draw the same numbers


def test_the_mean_of_random_agents_covers_all_groups(tmp_path):
    evaluator = trainer_of(tmp_path, Recorded).evaluator(1, lineup={"left": "random", "right": "random"})
    evaluation = evaluator.evaluate(1)
    assert evaluation.returns == (0,)  # one runner gets 1 and the other -1, or both get 0


def test_an_evaluation_changes_no_random_number(tmp_path):
    trainer = trainer_of(tmp_path)
    before = torch.get_rng_state()
    trainer.evaluator(2).evaluate(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_opponents_are_policies_or_act_at_random(tmp_path):
    trainer = trainer_of(tmp_path, Counting, {"x": "*", "y": "*"})
    evaluator = trainer.evaluator(4, lineup={"player_0": "y", "player_[12]": "random"})
    evaluation = evaluator.evaluate(4)
    assert evaluation.means().keys() == {"y"} and set(evaluation.returns) == set(evaluation.by_objective["y"])
    for lineup, sentence in (
        ({"player_0": "z"}, "the policy 'z' for player_0"),
        ({"q": "x"}, "'q', which matches no agent"),
    ):
        with pytest.raises(UsageError, match=sentence):
            trainer.evaluator(4, lineup=lineup)


class Remembering(PPO):
    """Acts by the number of its own rows in the episode, which is its memory."""

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64)

    def predict_step(self, time_step, state):
        return AlgStep((state % 3).clamp(max=2), state + 1)


def test_policy_memory_is_unchanged_in_turns_of_others(tmp_path):
    game = Counting(length=9)
    trainer = trainer_of(tmp_path, lambda **_: game, "each", algorithm=Remembering)
    trainer.evaluator(1).evaluate(1)
    own = [action for player, action in game.moves if player == "player_0"]
    assert own[:3] == [0, 1, 2]


def test_a_game_without_an_end_is_cut(tmp_path):
    trainer = trainer_of(tmp_path, max_evaluation_length=3)
    evaluator = trainer.evaluator(2)
    assert isinstance(evaluator, GameEvaluator)
    evaluation = evaluator.evaluate(2)
    assert evaluation.num_cut == 2 and evaluation.lengths == (3, 3) and evaluation.means()["a"] == 6


@pytest.mark.parametrize("policies, names", [(None, [None, "shared"]), ("each", ["player_0", "player_1", "player_2"])])
def test_an_export_is_compared_on_a_step_of_each_policy(tmp_path, policies, names, monkeypatch):
    trainer = trainer_of(tmp_path, Counting, policies)
    monkeypatch.setattr(verification.itertools, "count", lambda seed, step: range(seed, seed + 3 * step, step))
    for name in names:
        assert len(verification.from_environment(trainer, 1, 0, name)) == 1


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_episodes_of_a_policy_are_those_of_the_games_asked_for(tmp_path, num_envs):
    evaluator = trainer_of(tmp_path).evaluator(3, num_envs)
    assert [episode.length for episode in evaluator.test_episodes(3, policy="a")] == [8, 8, 8]


def test_a_cut_game_ends_the_episodes_of_agents_that_act(tmp_path):
    evaluator = trainer_of(tmp_path).evaluator(2, 2, max_length=5)
    for policy, lengths in (("a", [5, 5]), ("b", [2, 2]), ("c", [5, 5])):
        episodes = list(evaluator.test_episodes(2, policy=policy))
        assert [episode.length for episode in episodes] == lengths
        assert all(episode.truncated[-1] and not episode.terminated.any() for episode in episodes)


def test_a_run_evaluates_its_policies_and_keeps_the_best_of_one(tmp_path):
    evaluate, saver = Evaluate(period=16, num_episodes=2, lineup={"b": "random"}), CheckpointSaver(best_of="a")
    trainer = trainer_of(tmp_path, listeners=[evaluate, saver])
    trainer.train()
    rows = (tmp_path / "run" / "eval").glob("*.csv")
    assert all("return/a" in path.read_text() for path in rows)
    assert trainer.directory.checkpoints.best() == trainer.clock.value
    other = trainer_of(tmp_path / "other", listeners=[Evaluate(period=16, num_episodes=2), CheckpointSaver()])
    other.train()
    assert other.directory.checkpoints.best() is None
    with pytest.raises(UsageError, match="best_of is 'z'; it must be one of a, b, c, env_info/NAME"):
        trainer_of(tmp_path / "third", listeners=[CheckpointSaver(best_of="z")]).train()


def test_a_policy_of_a_trainer_acts_as_in_its_evaluation(tmp_path):
    trainer = trainer_of(tmp_path)
    policy = trainer.policy("a")
    assert policy.act(np.zeros(4, np.float32)) in policy.action_space
    with pytest.raises(UsageError, match="has the policies a, b, c; name one, for example policy='a'"):
        trainer.policy()


@pytest.mark.parametrize(("policies", "expected"), [([1.0, np.nan, 3.0], (1, 0, 3)), ([np.nan] * 3, (-5, -6, -7))])
def test_random_agents_count_only_if_no_policy_plays(tmp_path, monkeypatch, policies, expected):
    """A game may end before the policy acts: its return is 0, and the other games keep their returns."""
    evaluator = trainer_of(tmp_path, policies={"x": "*"}).evaluator(3, 3)
    returns = np.array([policies, [-5.0, -6.0, -7.0]]).T
    monkeypatch.setattr(evaluator, "_play", lambda *_: (returns, np.ones(3, np.int64)))
    assert evaluator.evaluate(3).returns == expected
