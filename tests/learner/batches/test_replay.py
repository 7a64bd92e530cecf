"""ReplayBatches in a trainer: how many updates, on what, and who acts meanwhile."""

import csv
import functools
import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch import nn
from toys import Bandit, Stamped

from alfish import nest
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, LossInfo, StepType
from alfish.environments import make_environment
from alfish.environments.bit_flip import BitFlip, bit_flip_reached, bit_flip_reward
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches, take
from alfish.learner.batches.update_schedule import UpdateSchedule
from alfish.learner.learner import Learner
from alfish.replay import HindsightReplay, Prioritized, RingView, Uniform
from alfish.training.listeners import CheckpointSaver, Evaluate, Summaries
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, ObservationNormalizer, PreviousStep, RewardScale

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


class Info(NamedTuple):
    kept: torch.Tensor
    dropped: torch.Tensor


class Recorder(RLAlgorithm):
    """Does nothing all the time (arm 0, or no push), and remembers every minibatch that it trained on."""

    on_policy = False
    replay_needs = ReplayNeeds(info=("kept",))

    def __init__(self, *specs):
        super().__init__(*specs)
        self.weight = nn.Parameter(torch.zeros(()))
        self.batches = []

    def rollout_step(self, time_step, state):
        num_envs = len(time_step.step_type)
        is_box = bool(self.action_spec.shape)
        action = torch.zeros(num_envs, 1) if is_box else torch.zeros(num_envs, dtype=torch.int64)
        return AlgStep(action, state, Info(time_step.observation[..., -1].double(), time_step.env_id))

    def train_step(self, experience, state):
        self.batches.append(experience)
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(self.weight * experience.time_step.reward[:1])


class OnPolicyRecorder(Recorder):
    on_policy = True


def make(root_dir, env_id=TensorPointMass, num_envs=1, algorithm=Recorder, env_kwargs=None, replay=None, **options):
    settings = {"capacity": 400, "batch_size": 4, "warmup_env_steps": 10, "updates_per_env_step": 1.0, **(replay or {})}
    defaults = {
        "algorithm": algorithm,
        "environment": functools.partial(make_environment, env_id, num_envs=num_envs, env_kwargs=env_kwargs),
        "batches": functools.partial(ReplayBatches, **settings),
        "unroll_length": 1,
        "listeners": [],
        "device": "cpu",
    }
    if not any(name.startswith(("num_", "wall")) for name in options):
        options["num_env_steps"] = 120
    return Trainer(root_dir, **{**defaults, **options})


def run(trainer):
    trainer.start()
    yield from trainer.iterate()
    trainer.close()


# How many updates.


@pytest.mark.parametrize(
    ("ratio", "unroll_length", "num_envs"),
    [(0.25, 4, 1), (0.25, 0.5, 3), (1, 1, 1), (1, 4, 3), (1.5, 0.5, 1), (1.5, 1, 3), (3, 4, 1), (3, 0.5, 3)],
)
def test_the_update_ratio_is_exact_after_every_iteration(tmp_path, ratio, unroll_length, num_envs):
    """Resets in between make steps that are no environment steps: episodes have 20 actions."""
    trainer = make(
        tmp_path, num_envs=num_envs, replay={"updates_per_env_step": ratio, "warmup_env_steps": 11},
        unroll_length=unroll_length, num_env_steps=60, env_kwargs={"length": 20},
    )  # fmt: skip
    num_iterations = 0
    for report in run(trainer):
        num_iterations += 1
        assert report.updates == max(0, math.floor(Fraction(ratio) * (report.env_steps - 11)))
        assert trainer.clock.updates == len(trainer.algorithm.batches)
    assert report.env_steps >= 60
    # Vector steps: 0.5 is one every other iteration. Each episode of 20 actions has one more row.
    vector_steps = num_iterations * unroll_length
    assert abs(vector_steps * num_envs * 20 / 21 - report.env_steps) <= (unroll_length + 1) * num_envs


class Stopping(Recorder):
    """Stops the updates of an iteration at every third loss."""

    def calc_loss(self, experience, info):
        loss = super().calc_loss(experience, info).loss
        return LossInfo(loss, stop=torch.full_like(loss, float(len(self.batches) % 3 == 0)))


def test_updates_that_a_stop_leaves_out_are_not_made_later(tmp_path):
    replay = {"updates_per_env_step": 2.0, "warmup_env_steps": 10}
    trainer = make(tmp_path, algorithm=Stopping, replay=replay, unroll_length=2, num_env_steps=60)
    for report in run(trainer):
        assert trainer.batches.state_dict()["num_updates"] == max(0, 2 * (report.env_steps - 10))
    losses = len(trainer.algorithm.batches)
    assert 0 < report.updates == losses - losses // 3 < 100


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "gpu"}, "ReplayBatches.device is 'gpu'; it must be auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "ReplayBatches.device is 'meta', which alfish does not use"),
    ],
)
def test_an_invalid_device_is_refused(tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        make(tmp_path, replay=settings)


def test_an_uncreatable_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory, but .*rows must be written there"):
        make(tmp_path / "run", replay={"directory": str(tmp_path / "file" / "rows")}).train()


def minibatches(chunk):
    return [take(chunk.source, index) for index in chunk.minibatches()]


@pytest.mark.parametrize(
    ("ratio", "window_length", "unroll_length", "num_envs"), [(1.5, 2, 4, 3), (2, 4, 0.5, 1), (0.25, 2, 1, 2)]
)
def test_reported_iterations_equal_yielded_iterations(tmp_path, ratio, window_length, unroll_length, num_envs):
    trainer = make(
        tmp_path, num_envs=num_envs, unroll_length=unroll_length, num_env_steps=100, env_kwargs={"length": 1000},
        replay={"updates_per_env_step": ratio, "window_length": window_length, "warmup_env_steps": 12},
    )  # fmt: skip
    updates = [report.updates for report in run(trainer) if report.env_steps >= 12]
    assert trainer.batches.updates_per_iteration == ratio * unroll_length * num_envs
    assert abs(updates[-1] - updates[0] - (len(updates) - 1) * trainer.batches.updates_per_iteration) <= 1
    [chunk] = trainer.batches.chunks(trainer.clock.env_steps + 8)
    assert {batch.mask.numel() for batch in minibatches(chunk)} == {trainer.batches.rows_per_update}
    assert trainer.batches.rows_per_update == 4 * (window_length - 1)


@pytest.mark.parametrize("ratio", [0.25, 0.8, 1.25])
def test_another_ratio_counts_from_where_a_run_continues(ratio):
    schedule = UpdateSchedule(1.0, 1000, 0)
    schedule.num_updates += schedule.num_due(100_000)
    assert schedule.num_updates == 99_000
    for clock in (100_100, 100_300):  # the second one continues with the same ratio
        state, schedule = schedule.state_dict(), UpdateSchedule(ratio, 1000, 0)
        schedule.load_state_dict(state)
        schedule.num_updates += schedule.num_due(clock)
        assert schedule.num_updates == 99_000 + ratio * (clock - 100_000)
    early, other = UpdateSchedule(1.0, 1000, 0), UpdateSchedule(ratio, 1000, 0)
    assert early.num_due(600) == 0
    other.load_state_dict(early.state_dict())
    assert other.num_due(1400) == ratio * 400


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1 / 3, 0.7, 1.1])
def test_inexact_update_ratios_lose_no_update(tmp_path, ratio):
    trainer = make(tmp_path, replay={"updates_per_env_step": ratio}, num_env_steps=105)
    for report in run(trainer):
        steps = max(0, report.env_steps - 10)
        assert report.updates == math.floor(Fraction(ratio).limit_denominator(10) * steps)


def test_how_updates_are_chunked_does_not_change_what_is_trained(tmp_path):
    counts = []
    for max_chunk_size in (1, 5, 64):
        trainer = make(
            tmp_path / str(max_chunk_size), unroll_length=8, num_envs=2,
            replay={"updates_per_env_step": 1.5, "max_chunk_size": max_chunk_size, "window_length": 3},
        )  # fmt: skip
        per_iteration = [report.updates for report in run(trainer)]
        shapes = {tuple(batch.time_step.reward.shape) for batch in trainer.algorithm.batches}
        assert shapes == {(3, 4)}
        counts.append((per_iteration, len(trainer.algorithm.batches)))
    assert counts[0] == counts[1] == counts[2] and counts[0][1] > 100


@pytest.mark.parametrize("for_graph", [False, True])
@pytest.mark.parametrize(("max_chunk_size", "sizes"), [(1, [1] * 12), (5, [5, 5, 2]), (64, [12])])
def test_a_chunk_has_at_most_its_maximum_of_updates(tmp_path, max_chunk_size, sizes, for_graph):
    trainer = make(tmp_path, replay={"max_chunk_size": max_chunk_size}, num_env_steps=11)
    list(run(trainer))
    chunks = list(trainer.batches.chunks(23, for_graph))
    assert [len(minibatches(chunk)) for chunk in chunks] == sizes
    for chunk, size in zip(chunks, sizes):  # windows of their own for every update
        assert isinstance(chunk.source, RingView) == for_graph
        positions = torch.cat([batch.position for batch in minibatches(chunk)])
        drawn = torch.cat([start.position for start in chunk.index]) if for_graph else chunk.source.position
        assert positions.shape == (4 * size,) and torch.equal(positions, drawn)
    assert list(trainer.batches.chunks(23)) == []


# Windows that a graph gathers by itself.


def in_both_ways(source, num_updates):
    """The minibatches of one draw, as they are handed to plain updates and to graphs; and the latter's chunk."""
    made = []
    for for_graph in (False, True):
        torch.manual_seed(0)
        chunk = source._chunk([(source._collected, 20)], num_updates, for_graph)
        made.append(minibatches(chunk))
    return *made, chunk


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others):
        leaves, found = nest.leaves(batch), nest.leaves(other)
        assert nest.paths(batch) == nest.paths(other) and len(leaves) > 10
        torch.testing.assert_close(leaves, found, rtol=0, atol=0, equal_nan=True)


def test_a_graph_transforms_the_windows_that_it_gathers(tmp_path):
    transforms = [ObservationNormalizer, functools.partial(RewardScale, scale=2.0)]
    trainer = make(tmp_path, num_envs=3, replay={"window_length": 3}, transforms=transforms, env_kwargs={"length": 7})
    list(run(trainer))
    source = trainer.batches
    handed, gathered, chunk = in_both_ways(source, 3)
    assert isinstance(chunk.source, RingView) and chunk.is_steady
    assert_same(handed, gathered)
    raw = chunk.source._replace(transforms=None).windows(chunk.index[0]).experience.time_step
    assert not torch.equal(raw.observation, handed[0].experience.time_step.observation)
    assert torch.equal(2 * raw.reward, handed[0].experience.time_step.reward)
    source.transforms.others[0]._moments[0].scale.mul_(0.5)  # statistics are read again in each update
    assert not torch.equal(
        minibatches(chunk)[0].experience.time_step.observation, handed[0].experience.time_step.observation
    )


def test_transforms_that_read_more_than_a_row_are_not_part_of_a_graph(tmp_path):
    trainer = make(tmp_path, transforms=[functools.partial(FrameStack, num_frames=2)])
    list(run(trainer))
    assert trainer.batches._collected.in_place() is None


@pytest.mark.parametrize(
    ("num_envs", "num_env_steps", "window_length"), [(1, 60, 4), (3, 60, 2), (1, 130, 2), (3, 150, 4)]
)
def test_a_graph_gathers_what_plain_updates_are_handed(tmp_path, num_envs, num_env_steps, window_length):
    """Of 100 rows: those of one and of several columns, of a ring that is not full and of one that has wrapped."""
    replay = {"capacity": 100, "window_length": window_length, "warmup_env_steps": 40, "updates_per_env_step": 0.1}
    trainer = make(
        tmp_path, num_envs=num_envs, num_env_steps=num_env_steps, replay=replay, env_kwargs={"length": 7}
    )  # fmt: skip
    list(run(trainer))
    source = trainer.batches
    for sampler, num_updates in itertools.product((Uniform, Prioritized), (1, 3)):
        source._collected.sampler = sampler()
        source._collected.sampler.bind(source.buffer, window_length)
        handed, gathered, chunk = in_both_ways(source, num_updates)
        assert_same(handed, gathered)
        assert any(not batch.mask.all() for batch in handed) or window_length == 2
        assert isinstance(chunk.source, RingView) and chunk.is_steady
        assert (handed[0].weight is None) == (chunk.update_priorities is None) == (sampler is Uniform)
        assert source._chunk([(source._collected, 20)], num_updates, True).source is chunk.source
    store = source.buffer._store.rows[1]
    store += 1  # nothing is a copy
    assert torch.equal(minibatches(chunk)[0].experience.time_step.reward, handed[0].experience.time_step.reward + 1)


class Preprocessing(Recorder):
    def preprocess_experience(self, experience):
        return experience._replace(info=experience.time_step.reward * 2)


class Returning(Recorder):
    replay_needs = ReplayNeeds(info=("kept",), return_gamma=0.9)


class Flipping(Recorder):
    replay_needs = ReplayNeeds()

    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(len(time_step.step_type), dtype=torch.int64), state)


HINDSIGHT = functools.partial(HindsightReplay, bit_flip_reward, terminated_fn=bit_flip_reached)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": Preprocessing},
        {"algorithm": Returning},
        {"transforms": [functools.partial(FrameStack, num_frames=2)]},
        {"env_id": BitFlip, "algorithm": Flipping, "replay": {"hindsight": HINDSIGHT}},
    ],
    ids=["preprocessed", "with returns", "stacked", "relabelled"],
)
def test_windows_with_derived_leaves_are_passed_to_graphs(tmp_path, options):
    trainer = make(tmp_path, **options)
    list(run(trainer))
    handed, given, chunk = in_both_ways(trainer.batches, 3)
    assert_same(handed, given)
    assert not chunk.is_steady


@pytest.mark.parametrize("compile", [True, False, "auto"])
def test_the_trainer_logs_whether_updates_are_graphs(tmp_path, compile):
    """Until the learner falls back, where a hook leaves torch."""

    class Leaving(Recorder):
        def calc_loss(self, experience, info):
            float(experience.time_step.reward.sum())
            return super().calc_loss(experience, info)

    trainer = make(tmp_path, algorithm=Leaving, learner=functools.partial(Learner, compile=compile))
    told, chunks = [], trainer.batches.chunks
    trainer.batches.chunks = lambda steps, for_graph: told.append(for_graph) or chunks(steps, for_graph)
    *_, last = run(trainer)
    assert told[0] == (compile is True) and not told[-1] and last.updates > 50
    assert trainer.learner.is_plain


def test_update_pace_does_not_change_after_interaction(tmp_path):
    trainer = make(
        tmp_path, num_envs=2, unroll_length=3, replay={"updates_per_env_step": 1.5}, num_updates=300,
        interaction_env_steps=60, env_kwargs={"length": 1000},
    )  # fmt: skip
    reports = list(run(trainer))
    acting = [report for report in reports if report.env_steps < 60]
    idle = reports[len(acting) + 1 :]
    assert {report.env_steps for report in idle} == {60} and trainer.batches.buffer.num_pushed == 60
    updates = [report.updates for report in reports]
    increments = {after - before for before, after in zip(updates[len(acting) :], updates[len(acting) + 1 :])}
    assert increments == {9} and len(idle) > 20  # 1.5 x 3 x 2, as before
    assert updates[-1] >= 300 and trainer.clock.finished
    assert updates[len(acting)] == math.floor(1.5 * 50)


def test_listeners_continue_after_interaction_has_ended(tmp_path):
    listeners = [Evaluate(40, num_episodes=1), CheckpointSaver(40, keep_last=9, keep_best=False), Summaries()]
    trainer = make(
        tmp_path, num_updates=110, interaction_env_steps=60, summary_period=20, listeners=listeners,
        env_kwargs={"length": 100}, replay={"updates_per_env_step": 0.5},
    )  # fmt: skip
    trainer.train()
    # 0.5 updates a step after 10: the budget is spent at step 230, of which 60 were taken.
    assert trainer.clock.env_steps == 60 and trainer.clock.value == 230
    assert trainer.directory.checkpoints.steps() == [40, 80, 120, 160, 200, 230]
    evaluated = [int(path.stem.removeprefix("evaluation-")) for path in sorted((tmp_path / "eval").iterdir())]
    assert evaluated == trainer.directory.checkpoints.steps()
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["steps"]) for row in rows] == [*range(20, 221, 20), 230]
    assert [int(row["env_steps"]) for row in rows] == [min(60, int(row["steps"])) for row in rows]
    assert trainer.load_policy(160) == 60


def test_an_end_of_interaction_with_an_unreachable_budget_is_refused(tmp_path):
    with pytest.raises(UsageError, match="interaction_env_steps ends acting"):
        make(tmp_path, num_env_steps=100, interaction_env_steps=50)


# Who acts.


def actions_in(buffer):
    """All stored actions that were executed, row by row `[rows, B]`; at LAST rows nothing is."""
    position = torch.arange(buffer.num_pushed // buffer.num_envs)[:, None].expand(-1, buffer.num_envs)
    rows = buffer.read(torch.arange(buffer.num_envs), position)
    return rows.action, rows.time_step


def test_only_warm_up_acts_uniformly_at_random(tmp_path):
    trainer = make(
        tmp_path, Bandit, num_envs=4, env_kwargs={"length": 4}, num_env_steps=2400,
        replay={"capacity": 4000, "warmup_env_steps": 1600, "updates_per_env_step": 0.00125},
    )  # fmt: skip
    list(run(trainer))
    action, step = actions_in(trainer.batches.buffer)
    # 5 rows an episode, of which 4 are arrivals: 1600 environment steps are 500 rows of 4 environments.
    early, late = action[:500], action[500:]
    counts = early.flatten().bincount()
    assert len(counts) == 4 and (counts - 500).abs().max() < 100
    pairs = (4 * early[:, 0] + early[:, 1]).bincount(minlength=16)  # environments apart from one another
    assert pairs.min() > 10 and pairs.max() < 60
    assert late.numel() > 900 and not late.any()
    # What was stored is what was executed.
    arrives = step.step_type[1:] != FIRST
    assert torch.equal(step.prev_action[1:][arrives], action[:-1][arrives])


def test_random_boxes_are_uniform_between_their_bounds(tmp_path):
    replay = {"capacity": 9000, "warmup_env_steps": 4000}
    trainer = make(tmp_path, num_envs=4, replay=replay, num_env_steps=4001, unroll_length=10)
    list(run(trainer))
    action = actions_in(trainer.batches.buffer)[0][:1000].flatten()
    assert action.min() >= -1 and action.max() <= 1 and abs(action.mean()) < 0.04
    assert abs(action.std() - 3**-0.5) < 0.02


# On what.


def test_the_learner_sees_windows_of_consecutive_rows_of_one_environment(tmp_path):
    trainer = make(
        tmp_path, Stamped, num_envs=3, unroll_length=7, num_env_steps=300,
        replay={"capacity": 60, "window_length": 4, "warmup_env_steps": 12, "updates_per_env_step": 2.0},
    )  # fmt: skip
    list(run(trainer))
    assert len(trainer.algorithm.batches) > 500
    for experience in trainer.algorithm.batches:
        env, episode, step = experience.time_step.observation.unbind(-1)
        ended = experience.time_step.step_type == LAST
        assert (env == env[0]).all() and (experience.time_step.env_id == experience.time_step.env_id[0]).all()
        assert torch.equal(episode[1:], episode[:-1] + ended[:-1])
        assert torch.equal(step[1:], torch.where(ended[:-1], 0, step[:-1] + 1))
        assert torch.equal(experience.time_step.reward, step)
        assert not ended[0].any()
        # Of rollout's info, what `replay_needs` names.
        assert set(experience.info) == {"kept"} and torch.equal(experience.info["kept"], step.double())
        assert experience.info["kept"].dtype == torch.float64


def test_rows_are_stored_raw_and_transformed_when_they_are_used(tmp_path):
    trainer = make(
        tmp_path, Stamped, num_envs=2, unroll_length=5, replay={"capacity": 50, "window_length": 3},
        transforms=[functools.partial(FrameStack, num_frames=3)],
    )  # fmt: skip
    list(run(trainer))
    assert trainer.batches.buffer.observation(torch.zeros(1, dtype=int), torch.zeros(1, 1, dtype=int)).shape[-1] == 3
    for experience in trainer.algorithm.batches:
        frames = experience.time_step.observation.unflatten(-1, (3, 3))  # [L, N, frame, (env, episode, step)]
        step = frames[..., -1, 2]
        for back in (1, 2):
            assert torch.equal(frames[..., -1 - back, 2], (step - back).clamp(min=0))
        assert (frames[..., :2] == frames[..., -1:, :2]).all()  # of one environment and episode


# What is refused.


@pytest.mark.parametrize(("settings", "message"), [
    ({"updates_per_env_step": 0}, "updates_per_env_step is 0; it must be a positive number"),
    ({"updates_per_env_step": -1.5}, "updates_per_env_step is -1.5; it must be a positive"),
    ({"window_length": 1}, "window_length is 1; it must be an integer of at least 2"),
    ({"capacity": 99, "warmup_env_steps": 100}, "capacity is 99, less than the 100 steps of warm-up"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_value(tmp_path, settings, message):
    with pytest.raises(UsageError, match=f"ReplayBatches.{message}"):
        make(tmp_path, replay=settings)


def test_a_capacity_too_small_for_a_window_of_each_environment_is_refused(tmp_path):
    replay = {"capacity": 23, "window_length": 6, "warmup_env_steps": 20}
    make(tmp_path, num_envs=3, replay=replay)
    with pytest.raises(UsageError, match="capacity is 23, too small for one window of 6 rows of each of 4 env"):
        make(tmp_path, num_envs=4, replay=replay)
    with pytest.raises(UsageError, match="capacity is 23, too small for one window"):
        make(tmp_path, Stamped, num_envs=3, replay=replay, transforms=[FrameStack])  # 3 more rows for the stack


@pytest.mark.parametrize("warmup, batch_size, first", [(40, 4, 48), (39, 4, 40), (0, 4, 40), (0, 64, 64)])
def test_short_warm_up_delays_updates_without_losing_any(tmp_path, warmup, batch_size, first):
    """8 environments, and windows of 5 rows: the first update would find none before step 40."""
    replay = {"window_length": 5, "warmup_env_steps": warmup, "updates_per_env_step": 2, "batch_size": batch_size}
    updates = {report.env_steps: report.updates for report in run(make(tmp_path, num_envs=8, replay=replay))}
    assert min(steps for steps, count in updates.items() if count) == first
    assert all(count == 2 * (steps - warmup) for steps, count in updates.items() if steps >= first)


def test_updates_without_windows_wait_for_the_next_unroll(tmp_path):
    """Episodes of 6 actions end at row 0 of some unrolls of 2 rows, where the only window would start."""
    replay = {"clear_after_use": True, "warmup_env_steps": 0, "updates_per_env_step": 1.0}
    reports = list(run(make(tmp_path, env_kwargs={"length": 6}, replay=replay, unroll_length=2)))
    missing = {report.env_steps: report.env_steps - report.updates for report in reports}
    assert [missing[steps] for steps in (4, 6, 7, 9, 12)] == [0, 0, 1, 0, 0], "made later, and none is lost"


def test_what_draws_windows_is_checked(tmp_path):
    with pytest.raises(UsageError, match="the hindsight of windows made an Uniform; it must be a class, or a function"):
        make(tmp_path, replay={"hindsight": Uniform})
    with pytest.raises(UsageError, match="the sampler of windows made a HindsightReplay"):
        make(tmp_path, replay={"sampler": HindsightReplay})


@pytest.mark.parametrize("shows", [True, False])
def test_hindsight_refuses_rewards_in_observations(tmp_path, shows):
    transforms, replay = [functools.partial(PreviousStep, reward=shows)], {"hindsight": HindsightReplay}
    with pytest.raises(
        UsageError,
        match="a transform shows the reward before row 0" if shows else "reads goals from a dict observation, but the",
    ):
        make(tmp_path, transforms=transforms, replay=replay)


def test_an_unroll_that_a_column_cannot_hold_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(UsageError, match="unroll"):
        make(tmp_path, num_envs=4, replay={"capacity": 40}, unroll_length=11)
    make(tmp_path, num_envs=4, replay={"capacity": 40}, unroll_length=10)


def test_on_policy_algorithms_refuse_replay(tmp_path):
    with pytest.raises(UsageError, match="OnPolicyRecorder is on-policy, but Trainer.batches is ReplayBatches"):
        make(tmp_path, algorithm=OnPolicyRecorder)
    with pytest.raises(UsageError, match="Recorder is off-policy, but Trainer.batches is EpochBatches"):
        make(tmp_path, batches=EpochBatches)


@pytest.mark.parametrize(
    ("length", "words"),
    [(0, "0, which only AsyncUnroller supports; it must be positive"), (-1, "-1; it must be a number")],
)
def test_an_unroll_length_that_is_not_positive_is_refused(tmp_path, length, words):
    with pytest.raises(UsageError, match=f"Trainer.unroll_length is {words}"):
        make(tmp_path, unroll_length=length)


def test_off_policy_trains_from_replay_by_default(tmp_path):
    trainer = make(tmp_path, batches=None)
    assert isinstance(trainer.batches, ReplayBatches)
    assert all(isinstance(leaf, int | float) for leaf in nest.leaves(trainer.batches.state_dict()))  # no rows


def test_a_capacity_beyond_memory_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="capacity is 1,000,000,000,000,000,000 rows, which does not fit into memory"):
        make(tmp_path, replay={"capacity": 10**18})


class Beyond(Recorder):
    """Adds noise to its actions, and does not clamp them."""

    def rollout_step(self, time_step, state):
        return super().rollout_step(time_step, state)._replace(output=torch.full((len(time_step.reward), 1), 15.0))


def test_actions_beyond_their_bounds_are_warned_of_because_others_are_executed(tmp_path, caplog):
    list(run(make(tmp_path, algorithm=Beyond, replay={"warmup_env_steps": 4})))
    (record,) = [one for one in caplog.records if "beyond the bounds" in one.getMessage()]
    assert "Beyond chose an action that is 14 beyond the bounds [-1, 1], but" in record.getMessage()


def test_acting_must_last_until_replay_holds_a_batch(tmp_path):
    with pytest.raises(
        UsageError, match="interaction_env_steps is 3, but the first batch requires 4 environment steps"
    ):
        make(tmp_path, num_updates=20, interaction_env_steps=3)
