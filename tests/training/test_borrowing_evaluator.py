"""Evaluation in the training environment, for simulators of which a process can hold only one."""

import functools

import gin
import numpy as np
import pytest
import torch
from fake_libraries import TASK, FakeIsaacLab, install_isaac_lab
from fakes import LENGTHS, StampedSimulator
from gymnasium import spaces

from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import AlgStep, StepType
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.networks import MLP, CriticEnsemble
from alfish.simulators.isaac_lab import IsaacLab
from alfish.training.borrowing_evaluator import BorrowingEvaluator
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer
from alfish.unrollers import AsyncUnroller, SyncUnroller

B = 4
ON_POLICY = PPO, functools.partial(EpochBatches, num_epochs=1, minibatch_size=B * 4), 4
SMALL_SAC = functools.partial(
    SAC, actor_mlp=functools.partial(MLP, layers=(8,)), critic=functools.partial(CriticEnsemble, layers=(8,))
)
OFF_POLICY = SMALL_SAC, functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=8), 1


class Only(StampedSimulator):
    only_one = True
    action_space = spaces.Box(-1, 1, (1,), np.float32)


def lengths_from(first_episode, num_episodes, num_envs=B):
    """Lengths of the first episodes that start, if each environment begins with `first_episode`."""

    def length(column, episode):
        return LENGTHS[(2 * column + 3 * episode) % len(LENGTHS)]

    started = [(column, first_episode) for column in range(num_envs)]
    ends = [(length(*one), one[0], one[1]) for one in started]
    while len(started) < num_episodes:
        end, column, episode = min(ends)
        ends.remove((end, column, episode))
        started.append((column, episode + 1))
        ends.append((end + length(column, episode + 1), column, episode + 1))
    return [length(*one) for one in started[:num_episodes]]


def make(root_dir, recipe=ON_POLICY, kind=Only, listeners=(), unroller=SyncUnroller, num_env_steps=48):
    algorithm, batches, unroll_length = recipe
    return Trainer(
        root_dir,
        algorithm=algorithm,
        environment=functools.partial(make_environment, env_id=kind, num_envs=B),
        batches=batches,
        unroller=unroller,
        unroll_length=unroll_length,
        listeners=list(listeners),
        num_env_steps=num_env_steps,
    )


@pytest.mark.parametrize("num_episodes", [1, B, 11])
@pytest.mark.parametrize("sample", [False, True])
def test_the_first_episodes_that_start_count(tmp_path, num_episodes, sample):
    trainer = make(tmp_path)
    trainer.start()
    next(trainer.iterate())
    begun = int(trainer.environment.simulator.clocks.episode[0]) + 1
    trainer.environment.simulator.clocks.episode[:] = begun - 1  # the next reset begins the same episode in each column
    evaluator = trainer.evaluator(num_episodes)
    assert type(evaluator) is BorrowingEvaluator
    first, second = evaluator.evaluate(num_episodes, 7, sample), None
    assert sorted(first.lengths) == sorted(lengths_from(begun, num_episodes))
    assert trainer.environment.simulator.seeds[-1] == 7
    trainer.environment.simulator.clocks.episode[:] = begun - 1
    second = evaluator.evaluate(num_episodes, 7, sample)
    assert second.returns == first.returns  # also of sampled actions
    trainer.close()


@pytest.mark.parametrize("collects", [False, True], ids=["evaluate", "test_episodes"])
@pytest.mark.parametrize("recipe", [ON_POLICY, OFF_POLICY], ids=["on_policy", "off_policy"])
def test_training_truncates_its_episodes_and_begins_new_ones(tmp_path, recipe, collects):
    trainer = make(tmp_path, recipe, num_env_steps=1000)
    trainer.start()
    iterations = trainer.iterate()
    next(iterations)
    before = trainer.unroller.time_step
    evaluator = trainer.evaluator(B)
    if collects:
        evaluator.generate_test_episodes(B)
    else:
        evaluator.evaluate(B)
    assert trainer.unroller.time_step.step_type.tolist() == [StepType.LAST] * B
    assert torch.equal(trainer.unroller.time_step.observation, before.observation)
    assert torch.equal(trainer.unroller.time_step.discount, before.discount)
    following = trainer.unroller.unroll(recipe[2] + 1).time_step
    assert following.step_type[:2].tolist() == [[StepType.LAST] * B, [StepType.FIRST] * B]
    assert (following.observation[1, :, 2] == 0).all()  # the first step of an episode
    for _ in range(3):
        next(iterations)
    trainer.close()


@pytest.mark.parametrize("recipe", [ON_POLICY, OFF_POLICY], ids=["on_policy", "off_policy"])
def test_a_run_evaluates_in_its_only_simulator(tmp_path, monkeypatch, recipe, capsys):
    launched = install_isaac_lab(monkeypatch, is_finite_horizon=False)
    made = []
    monkeypatch.setattr(FakeIsaacLab, "__init__", _counted(FakeIsaacLab.__init__, made))
    monkeypatch.setattr(FakeIsaacLab, "single_action_space", Only.action_space, raising=False)
    kind = functools.partial(_Bounded, TASK)
    evaluate = functools.partial(Evaluate, period=16, num_episodes=B)
    trainer = make(tmp_path, recipe, kind, [evaluate(), CheckpointSaver()])
    trainer.train()
    assert len(made) == 1 and launched
    assert len(list((tmp_path / "eval").glob("*.csv"))) == 3
    assert capsys.readouterr().err.count("Evaluation at") == 3


class Spread(Only):
    """Begins first episodes of 20 steps at various steps, and saves a counter."""

    def __init__(self, num_envs):
        super().__init__(num_envs, lengths=(20,))

    def spread_first_episodes(self):
        self.clocks.step = torch.arange(5, 5 + B)

    def state_dict(self):
        return {"counter": 0}

    def load_state_dict(self, state):
        return False


def test_evaluated_episodes_begin_at_their_start_and_use_no_seed_of_training(tmp_path):
    trainer = make(tmp_path, kind=Spread, num_env_steps=1000)
    seeds, seed = trainer.environment.simulator.seeds, trainer.environment._seed
    for _ in range(2):
        assert trainer.evaluator(B).evaluate(B, 7).lengths == (20,) * B
    trainer.start()
    iterations = trainer.iterate()
    next(iterations)
    assert seeds[-1] == seed and trainer.environment.simulator.clocks.step.tolist() == [9, 10, 11, 12]
    for _ in range(2):  # two listeners of one iteration
        assert trainer.evaluator(B).evaluate(B, 7).lengths == (20,) * B
    trainer.close()


class _Bounded(IsaacLab):
    def __init__(self, task, num_envs):
        super().__init__(task, num_envs)
        self.action_space = Only.action_space


def _counted(function, made):
    def counted(self, *arguments):
        made.append(arguments)
        function(self, *arguments)

    return counted


def test_the_counter_of_a_curriculum_does_not_count_evaluations(tmp_path, monkeypatch):
    install_isaac_lab(monkeypatch)
    trainer = make(tmp_path, kind=functools.partial(IsaacLab, TASK))
    trainer.start()
    iterations = trainer.iterate()
    next(iterations)
    env = trainer.environment.simulator.env.unwrapped
    assert env.common_step_counter == 4
    trainer.evaluator(B).evaluate(B)
    assert env.common_step_counter == 4
    next(iterations)
    assert env.common_step_counter == 4 + 3  # the first of four vector steps is the reset
    trainer.close()


def test_one_call_of_the_policy_serves_all_environments(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    trainer.start()
    rows, act = [], trainer.algorithm.predict_step
    monkeypatch.setattr(
        trainer.algorithm, "predict_step", lambda seen, state: rows.append(len(seen.reward)) or act(seen, state)
    )
    evaluation = trainer.evaluator(B).evaluate(B)
    assert rows == [B] * max(evaluation.lengths)
    trainer.close()


def test_a_wrong_result_of_the_policy_is_named(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    trainer.start()
    monkeypatch.setattr(trainer.algorithm, "predict_step", lambda seen, state: AlgStep(torch.zeros(B), state))
    with pytest.raises(UsageError, match=r"predict_step of PPO returned a tensor of shape \[4\] .* as action"):
        trainer.evaluator(B).evaluate(B)
    trainer.close()


def test_an_evaluation_that_raises_leaves_training_at_a_reset(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    trainer.start()
    next(trainer.iterate())
    with pytest.raises(ZeroDivisionError):
        trainer.evaluator(B).evaluate(B, on_row=lambda row: 1 / 0)
    assert trainer.unroller.unroll(4).time_step.step_type[:2].tolist() == [[StepType.LAST] * B, [StepType.FIRST] * B]
    trainer.close()


def test_closing_the_evaluator_leaves_the_environment_open(tmp_path):
    trainer = make(tmp_path)
    trainer.start()
    trainer.evaluator(1).close()
    assert not trainer.environment.simulator.is_closed
    trainer.close()
    assert trainer.environment.simulator.is_closed


def test_what_needs_a_second_simulator_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match="a film needs an environment of its own, but a process can hold only one Only"
    ):
        make(tmp_path / "film", listeners=[Evaluate(video_period=16)]).train()
    with pytest.raises(UsageError, match="borrows the environment .* one Only; bind Trainer.unroller = @SyncUnroller"):
        make(tmp_path / "async", OFF_POLICY, listeners=[Evaluate()], unroller=AsyncUnroller).train()


def test_a_cut_is_refused_where_more_episodes_follow(tmp_path):
    trainer = make(tmp_path)
    trainer.start()
    evaluator = trainer.evaluator(B, max_length=2)
    assert max(evaluator.evaluate(B).lengths) == 2
    with pytest.raises(UsageError, match="was cut at 2 steps, after which Only cannot begin another one .* at most 4"):
        evaluator.evaluate(B + 1)
    trainer.close()


def test_a_run_is_evaluated_by_the_command(tmp_path, monkeypatch, capsys):
    install_isaac_lab(monkeypatch)
    text = f"""
        include 'ppo.gin'
        import alfish.simulators.isaac_lab
        make_environment.env_id = @IsaacLab
        make_environment.num_envs = {B}
        IsaacLab.task = '{TASK}'
        Trainer.num_env_steps = 64
        Trainer.unroll_length = 8
        EpochBatches.minibatch_size = 32
        Evaluate.period = 32
        Evaluate.num_episodes = 6
    """
    (tmp_path / "robot.gin").write_text(text)
    run = f"--root_dir={tmp_path / 'run'}"
    assert main(["train", f"--gin_file={tmp_path / 'robot.gin'}", run]) == 0
    gin.clear_config()
    assert FakeIsaacLab.num_alive == 0
    assert main(["evaluate", run, "--num_episodes=3"]) == 0
    assert "3 episodes from seed 0" in capsys.readouterr().out
    assert FakeIsaacLab.num_alive == 0
