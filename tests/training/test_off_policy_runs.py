"""Whole off-policy runs: same seed, same bits; a resumed run with its rows, same bits; without them, it says so."""

import functools
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from resuming import assert_same, stop_after, tensors_of
from toys import Bandit, Stamped

import alfish
from alfish import nest
from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.redq import REDQ
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.algorithms.td3 import TD3
from alfish.data import AlgStep, StepType
from alfish.environments import TensorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.functional.distributions import Categorical
from alfish.functional.values import LowerBounded
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, LSTM, MLP, CriticEnsemble, DeterministicActor, QNetwork, Torso
from alfish.parameters.schedules import Linear
from alfish.replay import AlignedRingBuffer, Prioritized, RingBuffer, Uniform
from alfish.runs.checkpoints import Checkpoints
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, ObservationNormalizer, RewardClip, RewardNormalizer, RewardScale

REPOSITORY = Path(alfish.__file__).parent.parent
SMALL = functools.partial(MLP, layers=(8,))
CRITIC = functools.partial(CriticEnsemble, layers=(8,))
ALGORITHMS = {
    "dqn": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=functools.partial(Torso, mlp=SMALL)),
                             epsilon=Linear(1.0), target_period=7),
    "sac": functools.partial(REDQ, actor_mlp=SMALL, critic=functools.partial(CRITIC, ensemble_size=3, dropout=0.1)),
    "td3": functools.partial(TD3, actor=functools.partial(DeterministicActor, mlp=SMALL), critic=CRITIC,
                             noise_correlation=0.8, actor_period=3),
    "recurrent dqn": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=functools.partial(
        Torso, mlp=SMALL, memory=functools.partial(LSTM, size=4))), epsilon=Linear(1.0)),
    "recurrent sac": functools.partial(
        RecurrentSAC, actor_mlp=SMALL, critic=CRITIC, memory=functools.partial(GRU, size=4)),
}  # fmt: skip
MEMORY = {"burn_in": 1, "state_period": 3}  # of replay
EACH_STEP = {"updates_per_env_step": 1.0}
# The environment's state is saved, so any moment will do; or it is not, but at the end of all episodes there is none:
# an episode of 4 actions is 5 rows, so after 5 k - 1 steps the row to act from is LAST.
POINT_MASS = (TensorPointMass, {"length": 6})
SETTINGS = {  # algorithm, environment, unroll length, iterations, of them before the stop
    "dqn_episode_boundary": ("dqn", (Bandit, {"action": "discrete", "length": 4}), 7, 10, 7),
    "sac_saved_state": ("sac", POINT_MASS, 3, 16, 7),
    "sac_saved_state_same_step": ("sac", (TensorPointMass, {"length": 6, "autoreset": "same_step"}), 5, 10, 5),
    "sac_half_a_step": ("sac", POINT_MASS, 0.5, 50, 41),
    "sac_episode_boundary": ("sac", (Bandit, {"action": "box", "length": 4}), 7, 10, 7),
    "td3_saved_state": ("td3", POINT_MASS, 3, 16, 7),
    "recurrent_sac_saved_state": ("recurrent sac", POINT_MASS, 3, 16, 13),
    "recurrent_sac_saved_state_same_step": (
        "recurrent sac", (TensorPointMass, {"length": 6, "autoreset": "same_step"}), 3, 16, 13),
    "recurrent_dqn_episode_boundary": ("recurrent dqn", (Bandit, {"action": "discrete", "length": 4}), 3, 16, 13),
    "td3_episode_boundary": ("td3", (Bandit, {"action": "box", "length": 4}), 7, 10, 7),
}  # fmt: skip


def make(root_dir, name, replay=None, **options):
    algorithm, (env_id, env_kwargs), unroll_length, num_iterations, _ = SETTINGS[name]
    settings = {"capacity": 60, "batch_size": 4, "window_length": 3, "warmup_env_steps": 20, "max_chunk_size": 8}
    settings["updates_per_env_step"] = 0.5
    settings |= (MEMORY if algorithm.startswith("recurrent") else {}) | (replay or {})
    defaults = {
        "algorithm": ALGORITHMS[algorithm],
        "environment": functools.partial(make_environment, env_id, num_envs=2, env_kwargs=env_kwargs),
        "batches": functools.partial(ReplayBatches, **settings),
        "learner": functools.partial(Learner, learning_rate=Linear(1e-2), max_grad_norm=1.0),
        "transforms": [functools.partial(FrameStack, num_frames=3), ObservationNormalizer],
        "listeners": [CheckpointSaver(0)],
        "unroll_length": unroll_length,
        "num_iterations": num_iterations,
        "device": "cpu",
    }
    return Trainer(root_dir, **{**defaults, **options})


def parameters_of(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.algorithm.parameters()])


def test_equal_seeds_give_equal_bits_and_different_seeds_do_not(tmp_path):
    name = "td3_saved_state"
    runs = []
    for k, seed in enumerate((3, 3, 4)):
        torch.manual_seed(90 + k)  # nothing outside matters
        runs.append(make(tmp_path / f"run-{k}", name, seed=seed))
        runs[-1].train()
    assert runs[0].clock.updates > 20
    assert_same(tensors_of(runs[0]), tensors_of(runs[1]))
    assert not torch.equal(parameters_of(runs[0]), parameters_of(runs[2]))


# Each algorithm and each way to stop, with one of the samplers; in `slow` all others.
RESUMED = {
    "dqn_episode_boundary": Prioritized,
    "sac_half_a_step": Uniform,
    "td3_saved_state": Uniform,
    "recurrent_sac_saved_state_same_step": Prioritized,
    "recurrent_dqn_episode_boundary": Uniform,
}


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        pytest.param(name, sampler, marks=() if RESUMED.get(name) is sampler else pytest.mark.slow)
        for name in SETTINGS
        for sampler in (Uniform, Prioritized)
    ],
)
def test_a_run_resumed_with_replay_is_bit_identical(tmp_path, name, sampler):
    replay = {"sampler": sampler}
    whole = make(tmp_path / "whole", name, replay)
    whole.train()
    stop = SETTINGS[name][-1]
    evaluates = {"listeners": [Evaluate(10, num_episodes=2), CheckpointSaver(0)]} if name == "td3_saved_state" else {}
    cut = stop_after(make(tmp_path / "cut", name, replay, **evaluates), stop)
    assert 0 < cut.clock.updates < whole.clock.updates
    if "episode_boundary" in name:
        assert (cut.unroller.time_step.step_type == StepType.LAST).all()
    torch.manual_seed(99)  # another process would have other random states
    resumed = make(tmp_path / "cut", name, replay, **evaluates)
    assert resumed.train().iterations == SETTINGS[name][-2]
    assert not torch.equal(parameters_of(cut), parameters_of(resumed))
    assert_same(tensors_of(whole), tensors_of(resumed))


@pytest.mark.slow
def test_a_run_resumed_in_another_process_with_evaluations_has_equal_bits(tmp_path):
    program = """
import sys
sys.path[:0] = sys.argv[2:5]
import test_off_policy_runs as runs
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate
name = sys.argv[5]
listeners = [Evaluate(10, num_episodes=2), CheckpointSaver(0)]
runs.stop_after(runs.make(sys.argv[1], name, listeners=listeners), runs.SETTINGS[name][-1])
"""
    name = "td3_saved_state"
    here = Path(__file__).parent
    arguments = [str(tmp_path / "cut"), str(REPOSITORY), str(here), str(here.parent / "tools"), name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120, env=environment)
    whole = make(tmp_path / "whole", name)
    whole.train()
    resumed = make(tmp_path / "cut", name, listeners=[Evaluate(10, num_episodes=2), CheckpointSaver(0)])
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_a_run_resumes_while_it_trains_on_without_acting(tmp_path):
    name, options = "sac_saved_state", {"interaction_env_steps": 40, "num_iterations": None, "num_updates": 45}
    whole = make(tmp_path / "whole", name, **options)
    whole.train()
    cut = stop_after(make(tmp_path / "cut", name, **options), 13)
    assert cut.clock.env_steps >= 40 and 0 < cut.clock.updates < whole.clock.updates
    resumed = make(tmp_path / "cut", name, **options)
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_a_run_without_saved_rows_acts_again_before_training(tmp_path):
    name, replay = "sac_saved_state", {"save": False, **EACH_STEP}
    options = {"interaction_env_steps": 40, "num_iterations": None, "num_updates": 150}
    cut = stop_after(make(tmp_path, name, replay, **options), 20)
    assert cut.clock.env_steps >= 40 and cut.state_dict()["counters"]["idle_steps"] > 20
    resumed = make(tmp_path, name, replay, **options)
    resumed.start()
    for report in resumed.iterate():
        if report.env_steps < cut.clock.env_steps + 20:
            assert report.updates == cut.clock.updates
    resumed.close()
    assert (
        cut.clock.env_steps + 20 <= resumed.clock.env_steps < cut.clock.env_steps + 30 and resumed.clock.updates >= 150
    )


def test_rows_in_files_resume_to_the_same_bits(tmp_path):
    name = "sac_saved_state"
    whole = make(tmp_path / "whole", name)
    whole.train()
    for _ in range(2):
        replay = {"directory": str(tmp_path / "rows")}
        run = make(tmp_path / "cut", name, replay=replay)
        if run.directory.checkpoints.steps():
            run.train()
        else:
            stop_after(run, SETTINGS[name][-1])
    assert_same(tensors_of(whole), tensors_of(run))


@pytest.mark.parametrize(
    ("name", "how", "batch_size", "again"),
    [("dqn_episode_boundary", "not saved", 4, 10), ("sac_saved_state", "removed", 28, 28)],
)
def test_a_run_resumed_without_its_replay_continues_with_a_message(tmp_path, capsys, name, how, batch_size, again):
    """A tenth of the 60 steps that are left would be 6: too few for a window of 5 rows of each of 2 environments."""
    replay = {"batch_size": batch_size, **EACH_STEP} | ({"save": False} if how == "not saved" else {})
    cut = stop_after(make(tmp_path, name, replay), SETTINGS[name][-1])
    stored = list((tmp_path / "replay").glob("*.pt"))
    assert bool(stored) == (how == "removed")
    for path in stored:
        path.unlink()
    resumed = make(tmp_path, name, replay, num_iterations=None, num_env_steps=cut.clock.env_steps + 60)
    resumed.start()
    assert "Replay was not saved: new rows are collected before training continues" in capsys.readouterr().err
    assert "Replay was not saved" in (tmp_path / "log.txt").read_text()
    assert resumed.batches.buffer.num_rows == 0 and resumed.clock.updates == cut.clock.updates
    at_random = []
    unroll = resumed.unroller.unroll
    resumed.unroller.unroll = lambda length, random=False: (at_random.append(random), unroll(length, random))[1]
    for report in resumed.iterate():
        collected = report.env_steps - cut.clock.env_steps
        assert report.updates == cut.clock.updates + max(0, collected - again)
        assert resumed.clock.iterations > cut.clock.iterations
    assert report.updates > cut.clock.updates and not any(at_random)  # by then it knows better than to act at random
    resumed.close()


def test_a_checkpoint_always_has_its_replay_rows(tmp_path):
    name = "sac_saved_state"
    trainer = make(tmp_path, name, listeners=[CheckpointSaver(7, keep_last=2)])
    trainer.train()
    assert trainer.directory.checkpoints.steps()[-1] == trainer.clock.env_steps
    assert set(trainer.directory.checkpoints.steps()) <= set(trainer.directory.replay_checkpoints.steps())


class Improving(Listener):
    """Reports a better evaluation after each iteration."""

    def after_iteration(self, trainer, report):
        report.evaluation = types.SimpleNamespace(mean=float(report.iterations))


def test_a_best_checkpoint_between_periods_has_no_rows(tmp_path, capsys):
    name = "sac_saved_state"

    def listeners():
        return [Improving(), CheckpointSaver(30, keep_last=1)]

    whole = make(tmp_path / "whole", name, listeners=listeners())
    whole.train()
    cut = make(tmp_path / "cut", name, listeners=listeners())
    cut.start()
    for report in cut.iterate():
        for listener in cut.listeners:
            listener.after_iteration(cut, report)
        if report.iterations == 9:
            break
    cut.close()  # as after a kill
    period, best = cut.directory.checkpoints.steps()  # only one is to be kept, and yet that with its rows is
    assert (
        cut.directory.replay_checkpoints.steps()[-1] == period
        and best == cut.directory.checkpoints.best() == report.clock
    )
    assert make(tmp_path / "cut", name).load_policy("best") == best

    resumed = make(tmp_path / "cut", name, listeners=listeners())
    resumed.start()
    assert resumed.clock.value == period and resumed.batches.buffer.num_rows > 0
    assert f"The checkpoint at {best} steps is newer, but was saved without replay rows" in capsys.readouterr().err
    resumed.train()
    assert resumed.directory.checkpoints.best() == resumed.clock.value
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_without_saved_rows_the_newest_checkpoint_continues(tmp_path):
    trainer = make(tmp_path, "sac_saved_state")
    trainer.start()
    for report in trainer.iterate():
        if report.iterations in (7, 8):
            trainer.save(best=True, rows=False)
        if report.iterations == 8:
            break
    trainer.close()
    assert trainer.directory.replay_checkpoints.steps() == []
    resumed = make(tmp_path, "sac_saved_state")
    resumed.start()
    assert resumed.clock.iterations == 8 and resumed.batches.buffer.num_rows == 0
    resumed.close()


def test_a_foreign_replay_file_is_named_and_not_used(tmp_path, capsys):
    cut = stop_after(make(tmp_path, "dqn_episode_boundary"), 7)
    _, stored = cut.directory.replay_checkpoints.load()
    (path,) = (tmp_path / "replay").glob("*.pt")
    for wrong in ({"pos": torch.tensor([-5, 3])}, {"pos": torch.tensor([7, 7])}, {"rows": "rows"}):
        cut.directory.replay_checkpoints.save(cut.clock.value, stored | wrong)
        resumed = make(tmp_path, "dqn_episode_boundary")
        resumed.start()
        assert f"Replay is lost (Checkpoint {path} does not have the contents" in capsys.readouterr().err, wrong
        assert resumed.batches.buffer.num_rows == 0, wrong
        resumed.close()
    make(tmp_path, "dqn_episode_boundary").train()


def anonymous_bytes():
    """Memory of this process without that of mapped files."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_replay_is_restored_without_twice_its_memory(tmp_path, monkeypatch):
    """Each leaf is copied from the file when its turn comes; before that, nothing of the rows is in memory."""
    cut = stop_after(make(tmp_path, "dqn_episode_boundary"), 7)
    _, stored = cut.directory.replay_checkpoints.load()
    size = 64 * 2**20
    cut.directory.replay_checkpoints.save(cut.clock.value, stored | {"rows": (*stored["rows"], torch.ones(size // 4))})
    seen = []
    monkeypatch.setattr(ReplayBatches, "load_stored", lambda self, stored: seen.append(anonymous_bytes()))
    resumed = make(tmp_path, "dqn_episode_boundary")
    before = anonymous_bytes()
    resumed.start()
    resumed.close()
    assert seen[0] - before < size / 4


def test_no_window_spans_a_resume_with_new_episodes(tmp_path):
    """Stamped goes on with its first episode again: rows before the stop end in LAST, truncated."""
    options = {
        "algorithm": ALGORITHMS["dqn"],
        "environment": functools.partial(make_environment, Stamped, num_envs=2, env_kwargs={"lengths": (50,)}),
        "transforms": [], "unroll_length": 5,
    }  # fmt: skip
    name = "dqn_episode_boundary"
    cut = stop_after(make(tmp_path, name, **options), 5)
    resumed = make(tmp_path, name, **options)
    resumed.train()
    buffer = resumed.batches.buffer
    buffer.check_valid()
    at = cut.batches.buffer.num_pushed // 2
    position = torch.arange(at - 1, at + 2)[:, None].expand(-1, 2)
    rows = buffer.read(torch.arange(2), position).time_step
    assert rows.step_type[:, 0].tolist() == [StepType.MID, StepType.LAST, StepType.FIRST]
    assert rows.discount.eq(1).all()
    assert rows.observation[:, 0, 2].tolist() == [at - 1, at, 0]  # the true arrival, and then a new episode
    assert buffer.sample(2000, 2).position.ne(at).all()


def test_a_resume_that_fails_leaves_the_checkpoint_as_it_was(tmp_path):
    name = "recurrent_sac_saved_state"
    stop_after(make(tmp_path, name), 13)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.pt")}
    with pytest.raises(UsageError, match="keep ReplayBatches.state_period"):
        make(tmp_path, name, replay={"state_period": 4}).train()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pt")} == files


@pytest.mark.parametrize("capacity", [40, 90])
def test_a_run_may_continue_with_another_replay_capacity(tmp_path, capacity):
    name = "recurrent_sac_saved_state"
    cut = stop_after(make(tmp_path, name, replay={"sampler": Prioritized}), 13)
    resumed = make(tmp_path, name, replay={"sampler": Prioritized, "capacity": capacity})
    resumed.start()
    assert resumed.batches.buffer.num_rows == min(cut.batches.buffer.num_rows, capacity)
    resumed.train()
    resumed.batches.buffer.check_valid()
    assert resumed.clock.updates > cut.clock.updates


class Failing(Listener):
    def after_iteration(self, trainer, report):
        if report.iterations == 9:
            raise OSError("the disk is full")


def test_after_an_error_the_rows_are_saved_with_the_weights(tmp_path):
    trainer = make(tmp_path, "sac_saved_state", listeners=[Failing()])
    with pytest.raises(RunError, match="Failing.after_iteration raised OSError: the disk is full"):
        trainer.train()
    resumed = make(tmp_path, "sac_saved_state", listeners=[])
    resumed.start()
    assert resumed.clock.iterations == 9 and resumed.batches.buffer.num_rows == trainer.batches.buffer.num_rows > 0
    resumed.close()


@pytest.mark.parametrize("name", ["recurrent_dqn_episode_boundary", "td3_saved_state"])
def test_rows_go_into_replay_as_arrays_and_a_hook_sees_tensors(tmp_path, name):
    """The run is the same where there is such a hook."""
    seen, pushed = [], []
    factory = ALGORITHMS[SETTINGS[name][0]]

    class Watching(factory.func):
        def after_iteration(self, experience):
            seen.extend(nest.leaves(experience))

    class Spying(ReplayBatches):
        def add(self, experience):
            pushed.append(experience.time_step.reward)
            super().add(experience)

    runs = []
    for algorithm in (factory, functools.partial(Watching, **factory.keywords)):
        replay = MEMORY if name.startswith("recurrent") else {}
        batches = functools.partial(Spying, 60, 4, 3, 0.5, 20, **replay)
        trainer = make(tmp_path / str(len(runs)), name, algorithm=algorithm, batches=batches, transforms=[])
        trainer.train()
        runs.append((trainer.algorithm.state_dict(), trainer.batches.buffer.state_dict()))
    gives_tensors = isinstance(trainer.environment, TensorEnvironment)
    assert all(isinstance(reward, torch.Tensor if gives_tensors else np.ndarray) for reward in pushed)
    assert all(isinstance(leaf, torch.Tensor) for leaf in seen) and seen
    one, other = ([torch.as_tensor(leaf) for leaf in nest.leaves(run)] for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_lower_bound_is_refused_where_a_transform_changes_rewards(tmp_path):
    bounded = functools.partial(ALGORITHMS["dqn"], values=LowerBounded)
    for transform in (functools.partial(RewardScale, scale=0.1), RewardClip, RewardNormalizer):
        with pytest.raises(UsageError, match="returns of the environment's rewards"):
            make(tmp_path, "dqn_episode_boundary", algorithm=bounded, transforms=[ObservationNormalizer, transform])
    make(tmp_path, "dqn_episode_boundary", algorithm=bounded).close()


def test_acting_ends_only_where_rows_are_left_to_train_on(tmp_path):
    with pytest.raises(UsageError, match="ReplayBatches with these settings keeps no rows"):
        make(tmp_path, "dqn_episode_boundary", {"clear_after_use": True}, interaction_env_steps=40)
    with pytest.raises(UsageError, match="EpochBatches with these settings keeps no rows"):
        make(tmp_path, "dqn_episode_boundary", algorithm=PPO, batches=EpochBatches, interaction_env_steps=40)


def test_a_run_with_a_damaged_replay_file_continues_without_its_rows(tmp_path, capsys):
    stop_after(make(tmp_path, "dqn_episode_boundary"), 7)
    (path,) = (tmp_path / "replay").glob("*.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    resumed = make(tmp_path, "dqn_episode_boundary")
    updates = Checkpoints(tmp_path / "checkpoints").load()[1]["learner"]["updates"]
    resumed.train()
    said = capsys.readouterr().err
    assert (
        "Replay is lost" in said
        and "checksum does not match" in said
        and "new rows are collected before training continues" in said
    )
    assert resumed.clock.finished and resumed.clock.updates > updates


class Killed(BaseException):
    pass


def test_two_kills_between_both_files_keep_the_checkpoint_rows(tmp_path):
    def die(*arguments, **options):
        raise Killed

    cut = stop_after(make(tmp_path, "dqn_episode_boundary"), 4)
    (step,) = cut.directory.checkpoints.steps()
    for num_iterations in (5, 6):
        run = make(tmp_path, "dqn_episode_boundary")
        run.start()
        run.directory.checkpoints.save = die
        for report in run.iterate():
            if report.iterations == num_iterations:
                break
        with pytest.raises(Killed):
            run.save()
        run.close()
    rows = sorted((tmp_path / "replay").glob("*.pt"))
    assert len(rows) == 3 and str(step) in rows[0].name


class Remembering(DQN):
    """Its state and what replay keeps are NamedTuples."""

    replay_needs = ReplayNeeds(info=("policy",))

    def initial_state(self, batch_size):
        return Count(torch.zeros(batch_size))

    def rollout_step(self, time_step, state):
        q, _ = self.q_network(time_step, None)
        policy = Categorical.of(q)
        return AlgStep(policy.sample(), Count(state.count + 1), Means(policy))

    def train_step(self, experience, state):
        assert isinstance(experience.info["policy"], Categorical)
        return super().train_step(experience, None)


class Count(NamedTuple):
    count: torch.Tensor


class Means(NamedTuple):
    policy: Categorical


def test_runs_with_named_tuples_in_state_and_replay_resume(tmp_path):
    def remembering(*specs):
        algorithm = Remembering(*specs, q_network=ALGORITHMS["dqn"].keywords["q_network"])
        algorithm.replay_needs = ReplayNeeds(info=("policy",))
        return algorithm

    whole = make(tmp_path / "whole", "dqn_episode_boundary", algorithm=remembering)
    whole.train()
    stop_after(make(tmp_path / "cut", "dqn_episode_boundary", algorithm=remembering), 7)
    resumed = make(tmp_path / "cut", "dqn_episode_boundary", algorithm=remembering)
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))


def test_summaries_due_without_updates_are_written_later(tmp_path):
    ratio = {"updates_per_env_step": 0.25}
    scalars = []

    class Read(Listener):
        def after_iteration(self, trainer, report):
            scalars.append(report.scalars)

    # Between two updates, four steps apart, a summary falls due, but seldom in the iteration of one.
    options = {"unroll_length": 0.5, "num_iterations": 100, "summary_period": 3, "listeners": [Read()]}
    trainer = make(tmp_path, "dqn_episode_boundary", ratio, **options)
    trainer.train()
    assert trainer.clock.updates > 12
    assert sum("train/loss" in found for found in scalars) == trainer.clock.updates
    assert sum("time/train_ms" in found for found in scalars) > trainer.clock.updates


def test_a_budget_that_ends_before_the_first_update_is_refused_before_it_starts(tmp_path):
    for budget, is_refused in ((20, True), (21, False)):
        options = {"unroll_length": 1, "num_iterations": None, "num_env_steps": budget}
        trainer = make(tmp_path / str(budget), "dqn_episode_boundary", EACH_STEP, **options)
        if is_refused:
            with pytest.raises(UsageError, match="Trainer.num_env_steps is 20, which ends the run before its first up"):
                trainer.start()
        else:
            trainer.start()
        trainer.close()


def replay_of(tmp_path, budget=None, **replay):
    """Returns the batches of a run with this budget, whose batch has 4 windows."""
    options = {"num_iterations": None, **(budget or {})}
    trainer = make(tmp_path, "dqn_episode_boundary", {"batch_size": 4, "warmup_env_steps": None, **replay}, **options)
    trainer.close()
    return trainer.batches


@pytest.mark.parametrize(
    ("budget", "warmup"),
    [
        ({"num_env_steps": 8000}, 800),
        ({"num_env_steps": 10}, 4),  # a batch
        ({"num_env_steps": 10**6}, 10_000),
        ({"num_updates": 500}, 1000),
        ({"wall_seconds": 60.0}, 1000),
    ],
)
def test_warm_up_and_capacity_follow_the_budget(tmp_path, budget, warmup):
    batches = replay_of(tmp_path, budget, capacity=None)
    assert batches.warmup_env_steps == warmup
    expected = budget.get("num_env_steps", 10**6)
    assert expected <= batches.buffer.length * batches.buffer.num_envs <= expected + 200


def test_a_larger_budget_does_not_change_the_warm_up(tmp_path):
    options = {"replay": {"warmup_env_steps": None, "capacity": None, **EACH_STEP}, "num_iterations": None}
    make(tmp_path, "dqn_episode_boundary", **options, num_env_steps=60).train()
    longer = make(tmp_path, "dqn_episode_boundary", **options, num_env_steps=180)
    longer.train()
    assert longer.batches.warmup_env_steps == 6
    assert longer.clock.updates == longer.clock.env_steps - 6


def test_a_run_killed_in_warm_up_resumes_with_the_rest_of_it(tmp_path):
    """Its rows are lost; today's budget would end in a second warm-up."""
    options = {
        "replay": {"warmup_env_steps": 60, "save": False, **EACH_STEP},
        "num_iterations": None,
        "num_env_steps": 100,
    }
    cut = stop_after(make(tmp_path, "dqn_episode_boundary", **options), 3)
    assert 0 < cut.clock.env_steps < 60 and cut.clock.updates == 0
    resumed = make(tmp_path, "dqn_episode_boundary", **options)
    resumed.train()
    assert resumed.clock.updates == resumed.clock.env_steps - 60


def test_a_run_without_updates_always_raises(tmp_path):
    """The time limit ends it in its warm-up."""
    options = {"replay": {"warmup_env_steps": 10**5, "capacity": 10**5}, "num_iterations": None}
    for _ in range(2):
        trainer = make(tmp_path, "dqn_episode_boundary", **options, num_env_steps=10**6, wall_seconds=1e-6)
        with pytest.raises(RunError, match="finished after .* steps without an update, so its policy is untrained"):
            trainer.train()
        assert (tmp_path / "done").exists()


def test_noisy_layers_explore_in_rollouts_only_and_evaluations_are_greedy(tmp_path):
    """Epsilon is 0 and nothing is learned, so only the noise changes the action of an observation."""
    torso = functools.partial(Torso, mlp=functools.partial(SMALL, noisy=True))
    network = functools.partial(QNetwork, torso=torso, noisy=True)
    trainer = Trainer(
        tmp_path,
        algorithm=functools.partial(DQN, q_network=network, epsilon=0.0),
        environment=functools.partial(make_environment, Bandit, env_kwargs={"action": "discrete", "length": 4}),
        batches=functools.partial(ReplayBatches, capacity=100, batch_size=4, warmup_env_steps=1),
        learner=functools.partial(Learner, learning_rate=0.0),
        unroll_length=4, num_env_steps=100, device="cpu", listeners=[],
    )  # fmt: skip
    trainer.train()
    rows = trainer.batches.buffer._store.rows
    seen, actions = rows.observation.argmax(-1)[40:100].tolist(), rows.action[40:100].tolist()  # after the warm-up
    assert len({*zip(seen, actions)}) > len({*seen})
    time_step = nest.tensors(trainer.unroller.time_step)
    with in_eval_mode(trainer.algorithm):
        actions = [trainer.algorithm.predict_step(time_step, None).output for _ in range(20)]
    assert len(torch.stack(actions).unique()) == 1


def test_a_run_whose_lost_rows_take_the_rest_of_the_budget_is_refused(tmp_path):
    options = {"num_iterations": None, "num_env_steps": 80, "unroll_length": 3}
    stop_after(make(tmp_path, "sac_saved_state", {"save": False}, **options), 14)
    with pytest.raises(UsageError, match="would spend the rest of Trainer.num_env_steps = 80; raise it"):
        make(tmp_path, "sac_saved_state", {"save": False}, **options).train()
    assert make(tmp_path, "sac_saved_state", {"save": False}, **options | {"num_env_steps": 150}).train().updates > 30


@pytest.mark.parametrize("buffer", [RingBuffer, AlignedRingBuffer])
@pytest.mark.parametrize(("state_period", "unroll_length"), [(4, 3), (8, 7)])
def test_the_first_batch_of_a_memory_with_stacked_frames_waits_for_a_state_with_its_frames(
    tmp_path, buffer, state_period, unroll_length
):
    """States are stored where unrolls begin, so that two states may be almost two periods apart."""
    name = "recurrent_sac_saved_state_same_step"
    replay = {"capacity": 400, "warmup_env_steps": 10, "state_period": state_period, "buffer": buffer, "save": False}
    replay |= EACH_STEP
    stack = [functools.partial(FrameStack, num_frames=2)]
    options = {"unroll_length": unroll_length, "environment": endless, "transforms": stack}
    stop_after(make(tmp_path, name, replay, num_iterations=6, **options), 6)
    assert make(tmp_path, name, replay, num_iterations=14, **options).train().updates > 20


endless = functools.partial(
    make_environment, TensorPointMass, num_envs=2, env_kwargs={"length": 1000, "autoreset": "same_step"}
)


@pytest.mark.parametrize(
    "mode, buffer, words",
    [
        ("same_step", RingBuffer, "replay keeps 8 rows of each environment, but an unroll of 8 steps has up to 16"),
        ("next_step", AlignedRingBuffer, "AlignedRingBuffer stores rows of environments that reset in the same step"),
    ],
)
def test_a_replay_that_cannot_hold_each_unroll_is_refused_before_training(tmp_path, mode, buffer, words):
    environment = functools.partial(
        make_environment, TensorPointMass, num_envs=4, env_kwargs={"autoreset": mode, "length": 30}
    )
    batches = functools.partial(ReplayBatches, capacity=32, batch_size=4, warmup_env_steps=8, buffer=buffer)
    trainer = Trainer(tmp_path, algorithm=ALGORITHMS["td3"], environment=environment, batches=batches, unroll_length=8,
                      num_env_steps=1000)  # fmt: skip
    with pytest.raises(UsageError, match=words):
        trainer.train()
    assert trainer.clock.env_steps == 0
