"""Trainers on recorded rows: alone (OfflineBatches), or beside what they collect (ReplayBatches.offline)."""

import csv
import functools
import json
import math

import gymnasium
import numpy as np
import pytest
import torch
from recorded import SPACES, record, source
from torch import nn
from toys import Bandit, Stamped

from alfish import nest
from alfish.algorithms.bc import BC
from alfish.algorithms.composition import Composed, DynamicsFeatures, NormalizedObservation
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, LossInfo
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import OfflineBatches, ReplayBatches, take
from alfish.learner.learner import Learner
from alfish.offline import Arrays, OfflineBuffer, open_writer
from alfish.replay import Epochs, HindsightReplay, Prioritized, RingView, Uniform
from alfish.training.listeners import CheckpointSaver, Evaluate, Summaries
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, ObservationNormalizer, RewardNormalizer
from alfish.unrollers import AsyncUnroller

COLLECTED = 7  # the environment stamp of rows that were not recorded
ALONE = {"offline": None, "batch_size": 4}


class Collecting(Stamped):
    """Stamped, with a stamp that recorded rows do not have."""

    def reset(self, *, seed=None, options=None):
        self._stamp = COLLECTED
        return super().reset(seed=seed, options=options)


class Resumable(gymnasium.vector.SyncVectorEnv):
    """Vector environment of Collecting whose state is saved and restored."""

    def __init__(self, num_envs=1):
        super().__init__([Collecting] * num_envs)

    def get_state(self):
        inner = [[env.unwrapped._episode, env.unwrapped._step] for env in self.envs]
        return {"inner": torch.tensor(inner), "resets": torch.from_numpy(self._autoreset_envs.copy())}

    def set_state(self, state):
        for env, (episode, step) in zip(self.envs, state["inner"].tolist()):
            env.unwrapped._stamp, env.unwrapped._episode, env.unwrapped._step = COLLECTED, episode, step
        self._autoreset_envs = state["resets"].numpy().copy()


class Regressor(RLAlgorithm):
    """Learns rewards from observations, and remembers what it was trained on. Priorities count an episode's steps."""

    on_policy = False
    weighted_losses = ("weighed",)

    def __init__(self, *specs):
        super().__init__(*specs)
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)
        self.seen = []

    def parameter_groups(self):
        return {"weighed": self.first.parameters(), "not": self.second.parameters()}

    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(len(time_step.step_type), dtype=torch.int64))

    def train_step(self, experience, state):
        if self.training:
            self.seen.append(experience.time_step.observation.clone())
        x = experience.time_step.observation[:1] / 10
        return AlgStep(info=(self.first(x)[..., 0], self.second(x)[..., 0]))

    def calc_loss(self, experience, info):
        step = experience.time_step
        errors = [(value - step.reward[1:2]).square() for value in info]
        return LossInfo(dict(zip(("weighed", "not"), errors)), priority=step.observation[:1, :, 2] + 1)


def data(episodes=None, **options):
    return functools.partial(OfflineBuffer, [source(record() if episodes is None else episodes)], **options)


def make(root_dir, batches, algorithm=Regressor, **options):
    defaults = {
        "environment": functools.partial(make_environment, Collecting),
        "listeners": [],
        "device": "cpu",
        "unroll_length": 1,
    }
    return Trainer(root_dir, algorithm=algorithm, batches=batches, **{**defaults, **options})


def offline(root_dir, algorithm=Regressor, buffer=None, batches=None, **options):
    settings = {"batch_size": 4, "updates_per_iteration": 5, **(batches or {})}
    options = options if "num_env_steps" in options else {"num_updates": 20, **options}
    made = functools.partial(OfflineBatches, buffer or data(), **settings)
    return make(root_dir, made, algorithm, **options)


def hybrid(root_dir, algorithm=Regressor, buffer=None, batches=None, **options):
    settings = {"capacity": 100, "batch_size": 8, "warmup_env_steps": 6, "offline_fraction": 0.25}
    made = functools.partial(ReplayBatches, **{"offline": buffer or data(), **settings, **(batches or {})})
    return make(root_dir, made, algorithm, **{"num_env_steps": 30, **options})


def parameters(trainer):
    return torch.cat([p.detach().reshape(-1) for p in trainer.algorithm.parameters()])


def is_recorded(observation):
    """`[L, N]`"""
    return observation[..., 0] != COLLECTED


# Recorded rows alone.


def test_an_offline_run_makes_its_updates_and_never_touches_the_environment(tmp_path, monkeypatch):
    def touched(*arguments, **keywords):
        raise AssertionError("an offline run stepped or reset its environment")

    trainer = offline(tmp_path)
    for name in ("step", "reset"):
        monkeypatch.setattr(trainer.environment, name, touched, raising=False)
    trainer.train()
    clock = trainer.clock
    assert (clock.value, clock.env_steps, clock.updates, clock.iterations) == (20, 0, 20, 4)
    assert json.loads((tmp_path / "done").read_text()) == {"env_steps": 0, "iterations": 4, "updates": 20}
    seen = torch.cat(trainer.algorithm.seen, 1)  # [2, 80, 3]
    assert seen.shape == (2, 80, 3) and is_recorded(seen).all()
    first, second = seen.unbind(0)
    assert torch.equal(first[:, :2], second[:, :2])  # of one environment and episode
    assert torch.equal(first[:, 2] + 1, second[:, 2])


def test_evaluations_and_checkpoints_follow_the_clock_of_updates(tmp_path):
    listeners = [Evaluate(10, num_episodes=2), CheckpointSaver(10, keep_last=9, keep_best=False), Summaries()]
    trainer = offline(tmp_path, listeners=listeners, num_updates=30, summary_period=10)
    trainer.train()
    assert trainer.directory.checkpoints.steps() == [10, 20, 30]
    evaluated = sorted(int(path.stem.removeprefix("evaluation-")) for path in (tmp_path / "eval").iterdir())
    assert evaluated == [10, 20, 30]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["steps"]) for row in rows] == [10, 20, 30] and {row["env_steps"] for row in rows} == {"0"}
    assert all(math.isfinite(float(row["train/loss/weighed"])) for row in rows)


@pytest.mark.parametrize("sampler", [Uniform, Prioritized, Epochs])
def test_an_offline_run_resumes_to_the_bit(tmp_path, sampler):
    straight = offline(tmp_path / "straight", batches={"sampler": sampler})
    straight.train()
    resumed = functools.partial(offline, tmp_path / "resumed", batches={"sampler": sampler})
    first = resumed(num_updates=10, listeners=[CheckpointSaver(10, keep_best=False)])
    first.train()
    second = resumed()
    second.train()
    assert second.clock.updates == 20 and len(second.algorithm.seen) == 10
    assert torch.equal(parameters(straight), parameters(second))


def test_a_run_is_not_resumed_with_other_data(tmp_path):
    offline(tmp_path, listeners=[CheckpointSaver(10, keep_best=False)]).train()
    changed = record()
    changed[3].rewards[0] += 1
    with pytest.raises(UsageError, match="restore the data, or"):
        offline(tmp_path, buffer=data(changed), num_updates=40).train()


def test_every_epoch_trains_every_transition_once(tmp_path):
    trainer = offline(tmp_path, batches={"sampler": Epochs, "batch_size": 8, "updates_per_iteration": 3}, num_updates=5)
    trainer.train()
    seen = torch.cat(trainer.algorithm.seen, 1)[0]
    num_transitions = sum(episode.length for episode in record())
    assert num_transitions == 41 and len(seen) == 48
    assert len({tuple(row.tolist()) for row in seen[:41]}) == 41


def test_a_budget_of_environment_steps_is_refused(tmp_path):
    with pytest.raises(
        UsageError,
        match="OfflineBatches takes no environment steps; bind Trainer.num_env_steps = None, and Trainer.num_updates",
    ):
        offline(tmp_path, num_env_steps=100)


def test_idle_workers_are_refused(tmp_path):
    with pytest.raises(UsageError, match="Trainer.unroller has nothing to collect"):
        offline(tmp_path, unroller=AsyncUnroller)


def test_data_of_another_environment_are_refused_and_both_are_named(tmp_path):
    environment = functools.partial(make_environment, Bandit)
    with pytest.raises(UsageError, match=r"Box\(0.0, 2.147\d+e\+09, \(3,\).*Box\(0.0, 1.0, \(4,\)") as raised:
        offline(tmp_path, environment=environment).train()
    assert "arrays" in str(raised.value)


class Kept(Regressor):
    replay_needs = ReplayNeeds(info=("log_prob",))


@pytest.mark.parametrize("kind", [offline, hybrid])
def test_algorithms_that_need_missing_data_are_refused(tmp_path, kind):
    with pytest.raises(UsageError, match="Kept trains on the info log_prob of its rollout_step"):
        kind(tmp_path, Kept).train()


class Remembering(Regressor):
    replay_needs = ReplayNeeds(recurrent_state=True)

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, 1)


def test_with_burn_in_every_recorded_transition_trains(tmp_path):
    episodes = record()
    batches = {"burn_in": 4, "window_length": 3, "updates_per_iteration": 50}
    trainer = offline(tmp_path, Remembering, data(episodes), batches, num_updates=200)
    trainer.train()
    first = {tuple(row.tolist()) for seen in trainer.algorithm.seen for row in seen[0]}
    assert first == {tuple(row.tolist()) for episode in record() for row in episode.observations[:-1]}


def test_parts_whose_statistics_need_collected_rows_are_refused(tmp_path):
    algorithm = functools.partial(Composed, algorithm=Regressor, representation=NormalizedObservation)
    with pytest.raises(UsageError, match="NormalizedObservation of Composed has statistics of collected rows"):
        offline(tmp_path / "statistics", algorithm)
    words = "ReplayBatches.offline_updates come before rows are collected; set offline_updates to 0"
    with pytest.raises(UsageError, match=words):
        hybrid(tmp_path / "hybrid", algorithm, batches={"offline_updates": 5})
    features = functools.partial(Composed, algorithm=Regressor, representation=DynamicsFeatures)
    offline(tmp_path / "none", features).close()


def test_evaluating_a_run_reads_no_data(tmp_path):
    offline(tmp_path, listeners=[CheckpointSaver(10, keep_best=False)]).train()

    def gone(**keywords):
        raise AssertionError("the data were read")

    trainer = offline(tmp_path, buffer=gone)
    assert trainer.load_policy() == 0
    trainer.evaluator(1).evaluate(1)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"updates_per_iteration": 0}, "updates_per_iteration is 0"),
        ({"window_length": 1}, "window_length is 1"),
        ({"burn_in": 2}, "Regressor has no memory that needs it"),
    ],
)
def test_meaningless_settings_are_refused(tmp_path, settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        offline(tmp_path, batches=settings)


# What is chosen of the data.


def test_only_the_best_episodes_are_kept():
    episodes = record()
    buffer = data(top_fraction=0.3)()
    returns = sorted((float(e.rewards.sum()) for e in episodes), reverse=True)[:3]
    assert sorted((e.return_ for e in buffer.episodes), reverse=True) == returns and buffer.holdout is None
    assert len(data(top_fraction=0.01)().episodes) == 1
    vectors = [episode._replace(rewards=np.stack([episode.rewards] * 2, 1)) for episode in record()]
    with pytest.raises(UsageError, match="ranks episodes by their returns, but the rewards are vectors of 2"):
        data(vectors, top_fraction=0.3)()


def test_episodes_held_out_are_whole_spread_and_never_trained_on(tmp_path):
    trainer = offline(
        tmp_path, buffer=data(holdout_fraction=0.2), num_updates=200, listeners=[Summaries()], summary_period=50
    )
    trainer.train()
    buffer = trainer.batches._windows.buffer
    held, trained = ([e.id for e in part.episodes] for part in (buffer.holdout, buffer))
    assert len(held) == 3 and sorted(held + trained, key=int) == [str(k) for k in range(11)]
    assert {int(id) * 3 // 11 for id in held} == {0, 1, 2}
    seen = torch.cat(trainer.algorithm.seen, 1)
    stamps = {(e.observations[0][0], e.observations[0][1]) for e in record() if e.id in held}
    assert not stamps & {tuple(row[:2].tolist()) for row in seen.reshape(-1, 3)}
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    last = nest.detach(trainer.batches.holdout())
    with torch.no_grad():
        wanted = trainer.algorithm.calc_loss(last.experience, trainer.algorithm.train_step(last.experience, None).info)
    num_held = sum(e.length for e in record() if e.id in held)
    assert last.mask.shape == (1, num_held) and last.mask.all()
    assert {tuple(row[:2].tolist()) for row in last.experience.time_step.observation.reshape(-1, 3)} == stamps
    assert float(rows[-1]["holdout/loss/not"]) == pytest.approx(float(wanted.loss["not"].mean()), rel=1e-5)


class Noisy(Regressor):
    def train_step(self, experience, state):
        first, second = super().train_step(experience, state).info
        return AlgStep(info=(first + 0.1 * torch.randn_like(first), second))


def test_evaluating_the_holdout_does_not_change_training(tmp_path):
    found = []
    for period in (5, 1000):
        trainer = offline(tmp_path / str(period), Noisy, data(holdout_fraction=0.2), summary_period=period)
        trainer.train()
        found.append(parameters(trainer))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "settings", [{"top_fraction": 0}, {"top_fraction": 1.5}, {"holdout_fraction": 1}, {"holdout_fraction": -1}]
)
def test_fractions_outside_their_range_are_refused(settings):
    with pytest.raises(UsageError, match=f"OfflineBuffer.{next(iter(settings))} is .*; it must be a number in"):
        data(**settings)()


def test_a_holdout_without_training_data_is_refused():
    with pytest.raises(UsageError, match="has only 1 episode to split; lower the fraction"):
        data(record(1), holdout_fraction=0.5)()


# Statistics of transforms.


@pytest.mark.parametrize("num_columns", [1, 3])
def test_normalizers_begin_with_the_moments_of_all_rows(tmp_path, num_columns, monkeypatch):
    monkeypatch.setattr("alfish.learner.batches.sequence_sampler.OBSERVED_ROWS", 4)
    transforms = [ObservationNormalizer, RewardNormalizer]
    trainer = offline(tmp_path, transforms=transforms, buffer=data(num_columns=num_columns))
    trainer.start()
    rows = np.concatenate([episode.observations for episode in record()]).astype(np.float64)
    moments = trainer.transforms._chain[0]._moments[0]
    assert int(moments.count) == len(rows)
    assert np.allclose(moments.mean, rows.mean(0)) and np.allclose(moments.squares / len(rows), rows.var(0), rtol=1e-4)
    returns = []
    for episode in record():
        so_far = 0.0
        for reward in episode.rewards:
            so_far = 0.99 * so_far + reward
            returns.append(so_far)
    scale = trainer.transforms._chain[1]._moments.scale
    assert float(scale) == pytest.approx(1 / np.std(returns), rel=1e-4)


def test_statistics_continue_with_the_rows_that_are_collected(tmp_path):
    trainer = hybrid(tmp_path, transforms=[ObservationNormalizer, RewardNormalizer])
    num_recorded = sum(episode.length + 1 for episode in record())
    reports = list(run(trainer))
    num_collected = trainer.batches.buffer.num_pushed
    assert num_collected >= 30 and reports
    assert int(trainer.transforms._chain[0]._moments[0].count) == num_recorded + num_collected


def test_frame_stacks_of_recorded_rows_equal_those_of_the_rollout(tmp_path):
    trainer = offline(tmp_path, Stacked, transforms=[functools.partial(FrameStack, num_frames=3)], num_updates=100)
    trainer.train()
    seen = torch.cat(trainer.algorithm.seen, 1)  # [2, N, 9]
    for row in seen.reshape(-1, 3, 3):
        newest = int(row[-1, 2])
        assert row[:, 2].tolist() == [max(0, newest - 2), max(0, newest - 1), newest]
        assert (row[:, :2] == row[-1, :2]).all()


class Stacked(Regressor):
    def __init__(self, *specs):
        super().__init__(*specs)
        self.first, self.second = nn.Linear(9, 1), nn.Linear(9, 1)


# Beside rows that are collected.


def run(trainer):
    trainer.start()
    yield from trainer.iterate()
    trainer.close()


def test_every_minibatch_has_its_share_however_little_was_collected(tmp_path):
    trainer = hybrid(tmp_path, batches={"updates_per_env_step": 2, "max_chunk_size": 3}, unroll_length=4)
    list(run(trainer))
    shares = {int(is_recorded(seen[0]).sum()) for seen in trainer.algorithm.seen}
    assert shares == {2} and len(trainer.algorithm.seen) == trainer.clock.updates > 40
    for seen in trainer.algorithm.seen:
        first, second = seen.unbind(0)
        assert torch.equal(first[:, :2], second[:, :2]) and torch.equal(first[:, 2] + 1, second[:, 2])


@pytest.mark.parametrize("num_envs", [1, 2])
def test_offline_updates_come_first_and_add_to_those_of_the_update_ratio(tmp_path, num_envs):
    trainer = hybrid(
        tmp_path, batches={"offline_updates": 10, "max_chunk_size": 4, "updates_per_env_step": 0.5},
        environment=functools.partial(make_environment, Collecting, num_envs=num_envs), num_env_steps=40,
    )  # fmt: skip
    reports = list(run(trainer))
    assert [(r.updates, r.env_steps, r.clock) for r in reports[:3]] == [(4, 0, 4), (8, 0, 8), (10, 0, 10)]
    assert all(is_recorded(seen).all() for seen in trainer.algorithm.seen[:10])
    for report in reports[3:]:
        assert report.clock == report.env_steps + 10
        assert report.updates == 10 + max(0, math.floor(0.5 * (report.env_steps - 6)))
    assert {int(is_recorded(seen[0]).sum()) for seen in trainer.algorithm.seen[10:]} == {2}


def test_after_offline_updates_training_continues_without_a_warm_up(tmp_path):
    batches = {"offline_updates": 10, "warmup_env_steps": None, "offline_fraction": 0.75}
    trainer = hybrid(tmp_path, batches=batches, num_env_steps=40)
    reports = list(run(trainer))
    needed = trainer.batches.needed_env_steps
    assert 0 < needed < 8
    assert next(report.env_steps for report in reports if report.updates > 10) == needed
    assert reports[-1].updates == 10 + 40


@pytest.mark.parametrize("period", [0, 17, 50])
def test_the_last_evaluation_of_a_hybrid_run_is_at_its_clock(tmp_path, period):
    """The clock counts the offline updates, too."""
    listeners = [Evaluate(period, num_episodes=1)]
    trainer = hybrid(tmp_path, batches={"offline_updates": 10}, num_env_steps=40, listeners=listeners)
    trainer.train()
    assert trainer.clock.value == 50
    assert max(path.name for path in (tmp_path / "eval").iterdir()) == "evaluation-000000000050.csv"


@pytest.mark.parametrize("offline_updates", [0, 10])
def test_a_hybrid_run_acts_by_its_policy_after_offline_updates(tmp_path, offline_updates):
    trainer = hybrid(tmp_path, batches={"offline_updates": offline_updates})
    list(run(trainer))
    position = torch.arange(5)[:, None]
    at_random = trainer.batches.buffer.read(torch.zeros(1, dtype=torch.int64), position).action.any()
    assert at_random == (offline_updates == 0)


@pytest.mark.parametrize("stopped_at", [5, 20])
def test_a_hybrid_run_resumes_to_the_bit(tmp_path, stopped_at):
    batches = {"offline_updates": 10, "max_chunk_size": 5, "sampler": Prioritized, "offline_sampler": Prioritized}
    environment = functools.partial(make_environment, Resumable)
    options = {"batches": batches, "num_env_steps": None, "environment": environment}
    straight = hybrid(tmp_path / "straight", num_updates=30, **options)
    straight.train()
    listeners = [CheckpointSaver(1000, keep_best=False)]
    resumed = functools.partial(hybrid, tmp_path / "resumed", **options)
    resumed(num_updates=stopped_at, listeners=listeners).train()
    second = resumed(num_updates=30)
    second.train()
    assert second.clock.updates == 30 and len(second.algorithm.seen) == 30 - stopped_at
    assert torch.equal(parameters(straight), parameters(second))


def test_a_hybrid_run_without_saved_rows_does_not_catch_up_updates(tmp_path):
    batches = {"offline_updates": 10, "save": False}
    hybrid(tmp_path, batches=batches, listeners=[CheckpointSaver(1000, keep_best=False)], num_env_steps=20).train()
    second = hybrid(tmp_path, batches=batches, num_env_steps=40)
    before = [report.updates for report in run(second)]
    assert before[:6] == [10 + 14] * 6 and before[-1] == 10 + 14 + (40 - 20 - 6)


@pytest.mark.parametrize(
    ("batches", "complaint"),
    [
        ({"offline_fraction": 0.01}, "0 of 8 windows"),
        ({"offline_fraction": 1.0}, "8 of 8 windows, but a batch must have windows of both kinds"),
        ({"offline": None, "offline_updates": 5}, "there are no data; bind ReplayBatches.offline"),
    ],
)
def test_batch_fractions_outside_their_range_are_refused(tmp_path, batches, complaint):
    with pytest.raises(UsageError, match=complaint):
        hybrid(tmp_path, batches=batches)


def test_rows_are_forgotten_after_they_were_trained_on(tmp_path):
    trainer = hybrid(tmp_path, batches={**ALONE, "clear_after_use": True}, unroll_length=8, num_env_steps=60)
    began = 0
    for _ in run(trainer):
        collected = trainer.algorithm.seen[began:]
        began = len(trainer.algorithm.seen)
        if collected:
            assert trainer.batches.buffer.num_rows == 0
            steps = torch.cat(collected, 1).reshape(-1, 3)
            assert len({tuple(row.tolist()) for row in steps}) <= 8
    assert trainer.clock.updates == trainer.clock.env_steps - 6


def test_clearing_that_would_leave_no_window_is_refused(tmp_path):
    with pytest.raises(UsageError, match="clear_after_use, replay keeps only the 1 rows of an unroll, too few"):
        hybrid(tmp_path, batches={**ALONE, "clear_after_use": True})


# Priorities.


class Recording(Uniform):
    """Draws as ever, with weights 1, 2 and 3, and remembers the priorities that come back."""

    uses_priorities = True

    def __init__(self):
        super().__init__()
        self.updates = []

    def draw(self, num_windows, progress, num_batches=1):
        start = super().draw(num_windows, progress)
        return start._replace(weight=1.0 + start.position % 3)

    def update(self, window, priority):
        self.updates.append((window, priority))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "update"),
    [
        *((kind, "plain") for kind in ("offline", "collected", "recorded")),
        *((kind, "interpreted") for kind in ("offline", "both")),
        *(pytest.param(kind, "compiled", marks=pytest.mark.long) for kind in ("offline", "both")),
    ],
)
def test_loss_priorities_are_written_to_their_rows(tmp_path, kind, update, monkeypatch):
    if update == "interpreted":  # the graph as it was traced, without the seconds of torch's compiler
        monkeypatch.setattr("alfish.compiler.inductor._compile", lambda graph, *_: lambda leaves: graph(*leaves))
    learner = functools.partial(Learner, compile=update != "plain")
    if kind == "offline":
        trainer = offline(tmp_path, batches={"sampler": Recording}, num_updates=60, learner=learner)
    else:
        chosen = {"collected": ["sampler"], "recorded": ["offline_sampler"], "both": ["sampler", "offline_sampler"]}
        batches = {"max_chunk_size": 3, "updates_per_env_step": 2, **dict.fromkeys(chosen[kind], Recording)}
        trainer = hybrid(tmp_path, batches=batches, num_env_steps=60, unroll_length=4, learner=learner)
    list(run(trainer))
    assert trainer.learner.is_plain == (update == "plain")
    names = {"_windows": 4} if kind == "offline" else {"_collected": 6, "_recorded": 2}
    rings = [(getattr(trainer.batches, name), count) for name, count in names.items()]
    asked = [(ring, count) for ring, count in rings if ring.sampler.uses_priorities]
    assert len(asked) == (2 if kind == "both" else 1)
    for windows, count in asked:
        assert sum(len(priority) for _, priority in windows.sampler.updates) == count * trainer.clock.updates
        for start, priority in windows.sampler.updates:
            steps = windows.at(start).experience.time_step.observation[0, :, 2]
            assert torch.equal(priority, steps + 1)


def test_weights_multiply_the_losses_that_the_algorithm_names(tmp_path):
    trainer = offline(tmp_path, batches={"sampler": Recording})
    trainer.start()
    [chunk] = trainer.batches.chunks(0)
    batch = chunk.source
    assert batch.weight.unique().tolist() == [1, 2, 3]
    losses = trainer.learner._plain.means(batch)[0].losses
    plain = trainer.learner._plain.means(batch._replace(weight=None))[0].losses
    info = trainer.algorithm.train_step(batch.experience, None).info
    rows = trainer.algorithm.calc_loss(batch.experience, info).loss["weighed"]
    assert torch.allclose(losses["weighed"], (rows * batch.weight).mean())
    assert not torch.allclose(losses["weighed"], plain["weighed"]) and torch.equal(losses["not"], plain["not"])


@pytest.mark.parametrize("size", [1, 5])
def test_weights_are_normalized_in_each_minibatch_however_many_a_chunk_has(tmp_path, size):
    trainer = offline(tmp_path, batches={"sampler": Prioritized, "updates_per_iteration": size})
    trainer.train()
    [chunk] = trainer.batches.chunks(20)
    weights = torch.stack([take(chunk.source, index).weight for index in chunk.minibatches()])
    assert weights.shape == (size, 4) and weights.unique().numel() > size
    assert (weights.amax(1) == 1).all()


def test_an_update_that_was_skipped_leaves_priorities_as_they_were(tmp_path):
    class Broken(Regressor):
        def calc_loss(self, experience, info):
            loss_info = super().calc_loss(experience, info)
            bad = experience.time_step.observation[:1, :, 2] == 2
            return loss_info._replace(priority=torch.where(bad, torch.nan, loss_info.priority))

    trainer = offline(tmp_path, Broken, batches={"sampler": Recording}, num_updates=60)
    trainer.train()
    kept = torch.cat([priority for _, priority in trainer.batches._windows.sampler.updates])
    assert torch.isfinite(kept).all() and 3 not in kept and 0 < len(kept) < 240


def test_a_missing_priority_is_named(tmp_path):
    class Silent(Regressor):
        def calc_loss(self, experience, info):
            return super().calc_loss(experience, info)._replace(priority=None)

    with pytest.raises(UsageError, match="calc_loss of Silent returns no LossInfo.priority"):
        offline(tmp_path, Silent, batches={"sampler": Prioritized}).train()


@pytest.mark.parametrize("algorithm", [Regressor, Remembering])
def test_a_graph_gathers_rows_except_with_initial_memory_states(tmp_path, algorithm):
    trainer = offline(tmp_path, algorithm, batches={"window_length": 3 if algorithm is Remembering else 2})
    trainer.start()
    made = []
    for for_graph in (False, True):
        torch.manual_seed(0)
        [chunk] = trainer.batches.chunks(0, for_graph)
        made.append([take(chunk.source, index) for index in chunk.minibatches()])
    assert isinstance(chunk.source, RingView) == (algorithm is Regressor)
    for one, other in zip(*made, strict=True):
        assert nest.paths(one) == nest.paths(other) and (one.experience.state is None) == (algorithm is Regressor)
        torch.testing.assert_close(nest.leaves(one), nest.leaves(other), rtol=0, atol=0)
    trainer.close()


def test_a_priority_of_another_shape_is_named(tmp_path):
    class Wrong(Regressor):
        def calc_loss(self, experience, info):
            loss_info = super().calc_loss(experience, info)
            return loss_info._replace(priority=loss_info.priority[0])

    with pytest.raises(UsageError, match=r"priority of Wrong has shape \(4,\); it must be one number for each row of"):
        offline(tmp_path, Wrong, batches={"sampler": Prioritized}).train()


def test_hindsight_and_stacks_of_frames_do_not_go_together(tmp_path):
    hindsight = functools.partial(HindsightReplay, lambda achieved, goal: achieved)
    with pytest.raises(UsageError, match="a transform reads rows before the windows"):
        offline(tmp_path, Stacked, transforms=[FrameStack], batches={"hindsight": hindsight}).train()


def test_cloning_from_a_minari_file_is_bit_identical_to_memory(tmp_path, home):
    pytest.importorskip("minari")
    with open_writer("minari:stamped/recorded-v0", SPACES) as writer:
        for episode in record():
            writer.add(episode)
        writer.finish({})
    sources = [source(record())], ["minari:stamped/recorded-v0"]
    runs = []
    for k, each in enumerate(sources):
        runs.append(offline(tmp_path / str(k), BC, functools.partial(OfflineBuffer, each), num_updates=40))
        runs[-1].train()
    assert torch.equal(parameters(runs[0]), parameters(runs[1]))
    assert parameters(runs[0]).isfinite().all()


def test_data_without_spaces_have_those_of_the_environment(tmp_path):
    without = functools.partial(OfflineBuffer, [Arrays(record())])
    trained = []
    for name, buffer in (("without", without), ("with", data())):
        trainer = offline(tmp_path / name, buffer=buffer)
        trainer.train()
        trained.append(parameters(trainer))
    assert torch.equal(*trained)
    with pytest.raises(UsageError, match="does not declare the spaces"):
        without()
