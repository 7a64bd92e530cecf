"""Several agents: games with a column for each agent, whatever steps the agents leave in, and self-play."""

import csv
from pathlib import Path

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.classic.tictactoe import tictactoe

from alfish import nest
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, LossInfo, StepType, in_line, trainable
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.metrics import AverageReturn, EnvironmentSteps, Metrics, NumberOfEpisodes
from alfish.replay import RingBuffer
from alfish.runs.checkpoints import Checkpoints
from alfish.training.evaluator import make_evaluator
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller
from examples.pettingzoo_columns import PettingZooColumns

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
# Steps after which each agent leaves, game after game; the last agent's departure ends the game.
LENGTHS = ((1, 4, 2), (3, 1, 1), (2, 5, 5))


class Departures(ParallelEnv):
    """Observations are (agent, game, step), and rewards the step. Records the transitions of each agent.

    Even agents end by termination, odd ones by truncation.
    """

    metadata = {"name": "departures"}

    def __init__(self, lengths=LENGTHS):
        self.possible_agents = ["a", "b", "c"]
        self._lengths, self._game = lengths, -1
        self.record = {agent: [] for agent in self.possible_agents}
        self.seeds = []

    def observation_space(self, agent):
        return spaces.Box(0, 1000, (3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.agents, self._game, self._step = list(self.possible_agents), self._game + 1, 0
        return self._observed(), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), "an agent that has left does not act"
        self._step += 1
        lengths = self._lengths[self._game % len(self._lengths)]
        ends = {agent: self._step >= lengths[self._index(agent)] for agent in self.agents}
        terminated = {agent: ends[agent] and self._index(agent) % 2 == 0 for agent in self.agents}
        truncated = {agent: ends[agent] and self._index(agent) % 2 == 1 for agent in self.agents}
        for agent, action in actions.items():
            here = self._game, self._step - 1, int(action), self._step, float(self._step)
            self.record[agent].append((*here, terminated[agent], truncated[agent]))
        result = self._observed(), {agent: float(self._step) for agent in self.agents}, terminated, truncated, {}
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return result

    def _index(self, agent):
        return self.possible_agents.index(agent)

    def _observed(self):
        return {agent: np.array([self._index(agent), self._game, self._step], np.float32) for agent in self.agents}


@gin.configurable
class Errands(ParallelEnv):
    """Three agents walk on a line to goals of their own, and leave when they arrive, or after 12 steps.

    A step costs 1. Random actions return -7.5 on average, the best ones -2.67.
    """

    metadata = {"name": "errands"}
    possible_agents = ["a", "b", "c"]

    def observation_space(self, agent):
        return spaces.Box(0, 6, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self.agents, self._step = list(self.possible_agents), 0
        self._place = {agent: int(self._generator.integers(0, 7)) for agent in self.agents}
        self._goal = {agent: int(self._generator.integers(0, 7)) for agent in self.agents}
        return self._observed(), {}

    def step(self, actions):
        self._step += 1
        for agent, action in actions.items():
            self._place[agent] = int(np.clip(self._place[agent] + action - 1, 0, 6))
        arrived = {agent: self._place[agent] == self._goal[agent] for agent in actions}
        late = dict.fromkeys(actions, self._step >= 12)
        result = self._observed(), dict.fromkeys(actions, -1.0), arrived, late, {}
        self.agents = [agent for agent in self.agents if not (arrived[agent] or late[agent])]
        return result

    def _observed(self):
        return {agent: np.array([self._place[agent], self._goal[agent]], np.float32) for agent in self.agents}


class Numbered(RLAlgorithm):
    """Acts by what it sees."""

    on_policy = True

    def rollout_step(self, time_step, state):
        return AlgStep(time_step.observation.sum(-1).long() % 3, state)

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(torch.zeros(()))


class NumberedOffPolicy(Numbered):
    on_policy = False


def unroller_of(environment, algorithm=Numbered):
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    return SyncUnroller(environment, algorithm(*_specs(environment)), transforms)


def _specs(environment):
    return environment.observation_spec, environment.action_spec, environment.reward_spec


def transitions(experience, column):
    """The trainable transitions of a column, as `Departures` writes them."""
    experience, found = nest.tensors(experience), []
    step = experience.time_step
    for t in trainable(step.step_type)[:, column].nonzero()[:, 0].tolist():
        agent, game, k = step.observation[t, column].tolist()
        assert agent == column % 3
        assert step.observation[t + 1, column].tolist()[:2] == [agent, game]
        assert step.prev_action[t + 1, column] == experience.action[t, column]
        ends, terminated = step.step_type[t + 1, column] == LAST, step.discount[t + 1, column] == 0
        arrival = int(step.observation[t + 1, column, 2]), float(step.reward[t + 1, column])
        action = int(experience.action[t, column])
        found.append((int(game), int(k), action, *arrival, bool(terminated), bool(ends and not terminated)))
    return found


def records(environment):
    return [game.record[agent] for game in environment._games for agent in game.possible_agents]


def unroll(unroller, length):
    """An unroll with all rows in their places."""
    return in_line(unroller.unroll(length)).experience


@pytest.mark.parametrize("length", [1, 3, 16])
def test_each_agents_transitions_train_once_and_in_order(length):
    environment = PettingZooColumns(Departures, num_envs=6)
    unroller, found = unroller_of(environment), [[] for _ in range(6)]
    for _ in range(90 // length):
        experience = unroll(unroller, length)
        step_type = experience.time_step.step_type
        assert not ((step_type[:-1] == PAD) & (step_type[1:] != PAD)).any()  # gaps are closed
        for column in range(6):
            found[column] += transitions(experience, column)
    assert found == records(environment)
    assert all(len(column) > 20 for column in found)


def test_an_epoch_trains_each_agents_transitions_once():
    environment = PettingZooColumns(Departures, num_envs=6)
    unroller, source, num_trained = unroller_of(environment), EpochBatches(), 0
    source.bind(unroller._algorithm, unroller._transforms, 8, 6)
    for _ in range(10):
        source.add(unroller.unroll(8))
        for chunk in source.chunks(0):
            num_trained += int(chunk.source.mask.sum())
    assert num_trained == source._num_epochs * sum(map(len, records(environment)))


def test_an_unroll_takes_no_more_steps_than_it_was_asked_for():
    turns = (1, 1, 9), (1, 9, 1), (9, 1, 1)  # no column has a row in each step
    unroller = unroller_of(PettingZooColumns(Departures, num_envs=3, game_kwargs={"lengths": turns}))
    for _ in range(5):
        unroller.unroll(20)
        assert sum((unroller.records.step_type == MID).any(1)) <= 20


def test_replay_receives_each_agents_episodes_one_after_another():
    environment = PettingZooColumns(Departures, num_envs=3)
    unroller, ring = unroller_of(environment, NumberedOffPolicy), None
    columns = [[] for _ in range(3)]
    for _ in range(15):
        experience = unroll(unroller, 4)
        ring = ring or RingBuffer(3000, 3)
        ring.push(experience)
        for column, rows in enumerate(columns):
            step = experience.time_step
            real = step.step_type[:, column] != PAD
            rows += zip(step.step_type[real, column].tolist(), step.observation[real, column].tolist())
    assert ring.num_rows == sum(map(len, columns))
    for column, rows in enumerate(columns):
        expected = [
            (FIRST if k == 0 else LAST if k == lengths[column] else MID, [column, game, k])
            for game, lengths in enumerate(LENGTHS * 15)
            for k in range(lengths[column] + 1)
        ]
        assert rows == expected[: len(rows)] and len(rows) > 20
    batch = ring.sample(500, 2)
    step = batch.experience.time_step
    assert torch.equal(step.observation[1] - step.observation[0], torch.tensor([0.0, 0, 1]).expand(500, 3))


def test_agents_that_left_count_no_steps_and_keep_their_return():
    environment = PettingZooColumns(Departures, num_envs=3)
    unroller = unroller_of(environment)
    metrics = Metrics([EnvironmentSteps(), NumberOfEpisodes(), AverageReturn()], 3)
    for _ in range(4):
        unroller.unroll(5)
        metrics.update(*unroller.records)
    found, moves = metrics.results(), records(environment)
    ends = [sum(move[5] or move[6] for move in record) for record in moves]
    returns = [n * (n + 1) / 2 for column in range(3) for n in [game[column] for game in LENGTHS * 9][: ends[column]]]
    assert found["environment_steps"] == sum(map(len, moves))
    assert found["episodes"] == sum(ends) == len(returns)
    assert found["average_return"] == pytest.approx(np.mean(returns))


def test_a_resumed_run_ends_old_games_and_begins_the_next():
    environment = PettingZooColumns(Departures, num_envs=3, seed=7)
    unroller = unroller_of(environment)
    unroller.unroll(2)  # game 0 goes on, agent a has left it
    assert unroller.time_step.step_type.tolist() == [PAD, MID, LAST]
    state = unroller.state_dict()
    again = PettingZooColumns(Departures, num_envs=3, seed=7)
    resumed = unroller_of(again)
    resumed.load_state_dict(state)
    rows = unroll(resumed, 3).time_step.step_type
    assert rows[:2].T.tolist() == [[FIRST, LAST], [LAST, FIRST], [LAST, FIRST]]  # nothing of agent a ends twice
    unroller.unroll(6)
    assert again._games[0].seeds == environment._games[0].seeds[1:2]
    assert len({*environment._games[0].seeds}) == len(environment._games[0].seeds)


def test_columns_are_whole_games_and_an_evaluation_seeds_each_game():
    environment = PettingZooColumns(Departures, num_envs=4, evaluation=True)
    assert environment.num_envs == 6 and environment.env_id.tolist() == [0, 1, 2, 3, 4, 5]
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    evaluator = make_evaluator(
        lambda **arguments: PettingZooColumns(Departures, **arguments), PPO(*_specs(environment)), transforms, 4
    )
    evaluation = evaluator.evaluate(4, seed=100)
    assert evaluation.lengths == (1, 4, 2, 1) and evaluation.returns == (1, 10, 3, 1)
    assert [game.seeds[0] for game in evaluator.environment._games] == [100, 103]


def test_agents_with_different_spaces_are_refused_with_the_remedy():
    class Uneven(Departures):
        def observation_space(self, agent):
            return spaces.Box(0, 1, (2 if agent == "b" else 3,), np.float32)

    with pytest.raises(UsageError, match=r"for a and Box\(.*2.*\) for b.*pad_observations_v0"):
        PettingZooColumns(Uneven)


def test_other_classes_than_parallel_environments_are_refused():
    with pytest.raises(UsageError, match=r"makes a tictactoe_v3, no parallel environment; .*aec_to_parallel"):
        PettingZooColumns(tictactoe.env)
    with pytest.raises(UsageError, match="not installed"):
        PettingZooColumns("no_such_games.tag_v1")


def test_agents_that_come_late_are_refused():
    class Late(Departures):
        def reset(self, seed=None, options=None):
            observations, infos = super().reset(seed)
            return {"a": observations["a"]}, infos

    with pytest.raises(UsageError, match="b, c not present after reset"):
        PettingZooColumns(Late).reset()


ERRANDS = """
import examples.pettingzoo_columns
import test_several_agents
Trainer.environment = @PettingZooColumns
PettingZooColumns.game = @Errands
PettingZooColumns.num_envs = 12
MLP.layers = (32,)
Learner.learning_rate = 3e-3
Evaluate.num_episodes = 30
"""
CONFS = {
    "ppo": "Trainer.num_env_steps = 4_000\nTrainer.unroll_length = 32\nEpochBatches.minibatch_size = 128",
    "dqn": "Trainer.num_env_steps = 6_000\nTrainer.unroll_length = 2\nReplayBatches.warmup_env_steps = 200\n"
    "ReplayBatches.updates_per_env_step = 0.25\nDQN.target_period = 1\nDQN.target_rate = 0.02",
}
CONFS["appo"] = CONFS["ppo"]
LOCKSTEP = (
    "Trainer.unroller = @AsyncUnroller",
    "AsyncUnroller.num_workers = 2",
    "AsyncUnroller.mode = 'lockstep'",
    "AsyncUnroller.envs_per_worker = 6",
)


def command(algorithm, tmp_path, *bindings):
    conf = tmp_path / f"{algorithm}_errands.gin"
    conf.write_text(f"include '{algorithm}.gin'\n{ERRANDS}\n{CONFS[algorithm]}\n")
    arguments = [f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}", *(f"--gin_param={one}" for one in bindings)]
    assert main(["train", *arguments]) == 0


def mean_return(run):
    with max((run / "eval").glob("evaluation-*.csv")).open() as file:
        return np.mean([float(row["return"]) for row in csv.DictReader(file)])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_one_policy_learns_from_all_agents_before_and_after_a_resume(algorithm, tmp_path):
    run = tmp_path / "run"
    command(algorithm, tmp_path, "Trainer.num_env_steps = 400")
    command(algorithm, tmp_path)
    assert mean_return(run) > -3
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=8"]) == 0


@pytest.mark.slow
def test_workers_in_lockstep_play_the_same_games_twice(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        command("appo", tmp_path / name, "Trainer.num_env_steps = 2_000", *LOCKSTEP)
        state = Checkpoints(tmp_path / name / "run" / "checkpoints").load()[1]
        found.append(nest.leaves(state["algorithm"]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_shipped_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    few = ["Trainer.num_env_steps = 1000", "PettingZooColumns.num_envs = 24", "Evaluate.num_episodes = 1"]
    other_game = ["PettingZooColumns.game = @Errands", "PettingZooColumns.game_kwargs = None"]
    arguments = ["--gin_file=examples/ppo_spread.gin", f"--root_dir={tmp_path / 'run'}"]
    assert main(["train", *arguments, *(f"--gin_param={one}" for one in few + other_game)]) == 0
