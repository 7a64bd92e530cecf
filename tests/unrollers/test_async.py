"""The asynchronous unroller: no row torn, lost or doubled, no wait without an end, nothing left behind."""

import contextlib
import functools
import gc
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import gin
import numpy as np
import pytest
import torch
import worker_parts
from scripted import FIRST, LAST, MID, PAD, Expert, ScriptedOffPolicy, check_stamps
from toys import OneState, Stamped
from worker_parts import (
    Curriculum,
    Diverged,
    Failing,
    Faulty,
    Following,
    Informing,
    Levels,
    NotCorrecting,
    Seeing,
    SeeingOffPolicy,
    Slowed,
)

from alfish import nest
from alfish.algorithms.appo import APPO
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.configuration import reading
from alfish.data import Experience, TimeStep, in_line
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.processes import pool
from alfish.processes.channel import from_bytes, to_bytes
from alfish.processes.messages import Died, Plan, Seconds, Segment, Stepping
from alfish.processes.server import SERVER
from alfish.processes.shared_memory import Heartbeat
from alfish.replay import RingBuffer
from alfish.runs import stop_signals
from alfish.runs.checkpoints import Checkpoints
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer
from alfish.transforms import RewardNormalizer, Transforms
from alfish.unrollers import AsyncUnroller, SyncUnroller, Workers
from alfish.unrollers.workers.environment_maker import EnvironmentMaker

QUICK = functools.partial(Workers, close_timeout=2.0)
# For tests of workers that end by themselves, which a busy machine delays.
PATIENT = functools.partial(Workers, close_timeout=60.0)
ALIKE = functools.partial(make_environment, Stamped, num_envs=2)


class InTensors(AsyncUnroller):
    """Unrolls in tensors, for tests that compute with them."""

    def unroll(self, *arguments, **keywords):
        return nest.tensors(super().unroll(*arguments, **keywords))


def unroller_of(environment=ALIKE, algorithm=Seeing, length=4, seed=0, **settings):
    """An unroller in whose workers such an environment is stepped."""
    here = environment(seed=seed)
    transforms = Transforms((), here.observation_spec, here.reward_spec)
    made = algorithm(transforms.observation_spec, here.action_spec, here.reward_spec)
    settings = {"workers": QUICK} | settings
    unroller = InTensors(here, made, transforms, **settings)
    unroller.bind(environment, length, seed)
    unroller.log = LOG.append
    LOG.clear()
    return unroller


LOG: list[str] = []


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    """Workers that hang are looked at more often than users need it."""
    monkeypatch.setattr(pool, "CHECK_SECONDS", 0.1)


@pytest.fixture
def made():
    """Makes unrollers, and closes them."""
    unrollers = []

    def make(*arguments, **settings):
        unrollers.append(unroller_of(*arguments, **settings))
        return unrollers[-1]

    yield make
    for unroller in unrollers:
        unroller.close()


def filled(worker_index, slot, version, num_records=5):
    """What a worker tells of a slot that it filled."""
    return Segment(worker_index, slot, 0, version, [num_records], [[]], Seconds(0, 0, 0, 0))


def processes(unroller):
    return [worker.process for worker in unroller._workers.all if worker.alive]


def wait_until_slots_are_full(unroller):
    (worker,) = unroller._workers.all
    began = time.monotonic()
    while worker.heartbeat.get()[0] != Heartbeat.IDLE or worker.heartbeat.get()[1] < 0.2:
        assert time.monotonic() - began < 60
        time.sleep(0.05)


def columns_of(unrolls, num_envs):
    """Each environment's rows (step type, reward, observation), in order."""
    columns = [[] for _ in range(num_envs)]
    for unroll in unrolls:
        step = unroll.time_step
        for b in range(step.step_type.shape[1]):
            for t in range(step.step_type.shape[0]):
                if step.step_type[t, b] != PAD:
                    row = int(step.step_type[t, b]), float(step.reward[t, b]), step.observation[t, b].tolist()
                    columns[int(step.env_id[t, b])].append(row)
    return columns


def step_only(step):
    """An unroll of one column, its environment's id 0."""
    return Experience(step._replace(env_id=torch.zeros_like(step.env_id)), None, None, None, None)


@pytest.mark.parametrize(("mode", "num_workers"), [("free", 1), ("lockstep", 2), ("free", 2)])
def test_off_policy_every_row_comes_once_and_in_order(made, mode, num_workers):
    unroller = made(algorithm=SeeingOffPolicy, num_workers=num_workers, mode=mode, unroll_length=4)
    unrolls, seen = [], set()
    while len(unrolls) < 8 or len(seen) < unroller.num_envs:  # a worker may start later than another
        experience = unroller.unroll()
        unrolls.append(nest.map(torch.clone, experience))
        seen |= set(experience.time_step.env_id[experience.time_step.step_type != PAD].tolist())
        assert experience.time_step.step_type.shape[1] == unroller.num_envs == 2 * num_workers
        real = experience.time_step.step_type != PAD
        assert (experience.info["seen"] == experience.time_step.observation)[real].all()
        assert (experience.time_step.env_id[0][real[0]] == torch.arange(unroller.num_envs)[real[0]]).all()
    for rows in columns_of(unrolls, unroller.num_envs):
        assert len(rows) >= 8 or mode == "free"
        check_stamps(rows)
    stamps = {rows[0][2][0] for rows in columns_of(unrolls, unroller.num_envs) if rows}
    assert len(stamps) == unroller.num_envs  # the environments' own seeds


@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_on_policy_unrolls_overlap_by_one_row(made, mode):
    unroller = made(mode=mode)
    unrolls = [nest.map(torch.clone, unroller.unroll(4)) for _ in range(6)]
    for before, after in zip(unrolls, unrolls[1:]):
        assert before.time_step.step_type.shape == (5, 2)
        assert all(
            torch.equal(a[-1], b[0]) for a, b in zip(nest.leaves(before.time_step), nest.leaves(after.time_step))
        )
    whole = [unroll._replace(time_step=nest.at(unroll.time_step, slice(0, 4))) for unroll in unrolls]
    for rows in columns_of(whole, 2):
        check_stamps(rows)


def test_an_unroll_is_unchanged_until_the_next_unroll(made):
    unroller = made()
    for _ in range(2):
        unroll = unroller.unroll(4)
        before = nest.map(torch.clone, unroll)
        wait_until_slots_are_full(unroller)
        assert all(map(torch.equal, nest.leaves(unroll), nest.leaves(before)))


@pytest.mark.parametrize("on_policy", [True, False])
def test_environments_that_reset_in_the_same_step_lose_no_row(made, on_policy):
    environment = functools.partial(make_environment, worker_parts.same_step_vector, num_envs=3)
    unroller = made(environment, Seeing if on_policy else SeeingOffPolicy, length=6)
    steps = arrived = 0
    unrolls = []
    for _ in range(8):
        unroll = in_line(nest.map(torch.clone, unroller.unroll(6))).experience
        types = unroller.records.step_type
        arrived += ((types == MID) | (types == LAST)).sum()
        if on_policy:  # the last real row of each column is row 0 of the next unroll
            count = (unroll.time_step.step_type != PAD).sum(0)
            for b in range(3):
                unroll.time_step.step_type[count[b] - 1, b] = PAD
        unrolls.append(unroll)
    for rows in columns_of(unrolls, 3):
        check_stamps(rows)
        steps += sum(row[0] in (MID, LAST) for row in rows)
    assert 0 <= arrived - steps <= 3  # those that arrived last are row 0 of the next unroll


def test_replay_rows_are_correct_for_same_step_resets(made):
    environment = functools.partial(make_environment, worker_parts.same_step_vector, num_envs=3)
    unroller = made(environment, SeeingOffPolicy, unroll_length=6, slots=4)
    ring = RingBuffer(3000, 3)
    has_joined = False  # several segments; a busy machine may take a while to fill the slots
    began = time.monotonic()
    while not has_joined:
        assert time.monotonic() - began < 60
        experience = in_line(unroller.unroll()).experience
        pad = experience.time_step.step_type == PAD
        assert (pad[1:] | ~pad[:-1]).all()  # at the end of a column alone, however many segments there were
        acted = ~pad & (experience.time_step.step_type != LAST)
        assert (experience.info["seen"] == experience.time_step.observation)[acted].all()
        ring.push(experience._replace(info=None))
        has_joined = len(experience.action) > 7
        wait_until_slots_are_full(unroller)
    ring.check_valid()
    for column in range(3):
        step = ring.read(torch.tensor([column]), torch.arange(ring._store.end[column])[:, None]).time_step
        (rows,) = columns_of([step_only(step)], 1)
        check_stamps(rows)


def test_environments_of_tensors_go_into_workers_too(made):
    environment = functools.partial(make_environment, functools.partial(TensorPointMass, length=3), num_envs=3)
    unroller = made(environment, worker_parts.Pushing, length=8)
    step = unroller.unroll(8).time_step
    assert step.step_type[:, 0].tolist() == [FIRST, MID, MID, LAST, FIRST, MID, MID, LAST, FIRST]


def trained(seed, mode="lockstep", num_workers=2, **budget):
    batches = functools.partial(ReplayBatches, capacity=2000, batch_size=16, warmup_env_steps=40)
    unroller = functools.partial(AsyncUnroller, num_workers=num_workers, mode=mode, workers=QUICK)
    from alfish.algorithms.dqn import DQN

    environment = functools.partial(make_environment, "CartPole-v1", num_envs=2)
    trainer = Trainer(
        ROOT[0] / f"{seed}-{len(os.listdir(ROOT[0]))}",
        algorithm=DQN,
        environment=environment,
        unroller=unroller,
        batches=batches,
        **(budget or {"num_iterations": 5}),
        seed=seed,
        unroll_length=0,
        listeners=[],
    )
    trainer.train()
    return trainer


ROOT: list[Path] = []


@pytest.fixture
def root(tmp_path):
    ROOT[:] = [tmp_path]
    return tmp_path


def test_in_lockstep_the_same_seed_gives_the_same_bits(root):
    first, again, other = (list(trained(seed).algorithm.parameters()) for seed in (3, 3, 4))
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_returns_do_not_continue_across_episodes_after_a_resume(tmp_path):
    """Workers begin new episodes, whose first rows no earlier unroll had."""
    settings = {
        "algorithm": APPO,
        "environment": functools.partial(make_environment, functools.partial(OneState, 50), num_envs=2),
        "unroller": functools.partial(AsyncUnroller, num_workers=1, mode="lockstep"),
        "transforms": [functools.partial(RewardNormalizer, gamma=1.0, largest_return=5.0)],
        "batches": functools.partial(EpochBatches, num_epochs=1),
        "unroll_length": 20,
        "listeners": [CheckpointSaver()],
        "device": "cpu",
    }
    Trainer(tmp_path, num_iterations=7, **settings).train()
    trainer = Trainer(tmp_path, num_iterations=12, **settings)
    trainer.train()
    assert trainer.transforms.others[0].largest == 50


def test_updates_are_as_many_as_the_environment_steps_ask_for(root):
    trainer = trained(0, mode="free", num_env_steps=200)
    assert trainer.clock.env_steps >= 200
    assert trainer.clock.updates == trainer.clock.env_steps - 40


def test_lockstep_lags_one_iteration_and_free_at_most_the_slots(made):
    unroller = made(mode="lockstep")
    for k in range(5):
        unroll = unroller.unroll(4)
        assert unroll.policy_version.tolist() == [max(0, k - 1)] * 2
        unroller.publish()
    for slots in (2, 3):
        unroller = made(mode="free", slots=slots)
        for k in range(5):
            lag = k - unroller.unroll(4).policy_version
            assert lag.max() <= slots - 1
            wait_until_slots_are_full(unroller)  # training takes longer than acting
            unroller.publish()
        stats = unroller.stats()
        assert stats["lag_max"] == slots - 1 and stats["worker_wait_fraction"] > 0.3


def test_a_segment_is_made_with_one_version_of_the_weights(made):
    unroller = made(slots=3)
    for k in range(10):
        unroll = unroller.unroll(4)
        weights = unroll.info["weight"]
        assert (weights == weights[0, 0]).all()
        assert weights[0, 0] == 3 * unroll.policy_version[0]
        unroller._algorithm.weight.data.fill_(k + 1)
        unroller.publish()


def test_weights_are_published_every_so_many_iterations(made):
    unroller = made(mode="lockstep", parameter_update_period=3)
    versions = []
    for _ in range(9):
        versions.append(int(unroller.unroll(4).policy_version[0]))
        unroller.publish()
    assert versions == [0, 0, 0, 0, 3, 3, 3, 6, 6]


def test_rows_that_are_too_old_are_not_trained_on(made):
    unroller = made(slots=4, max_policy_lag=1)
    for k in range(8):
        if k == 2:
            wait_until_slots_are_full(unroller)
        unroll = unroller.unroll(4)
        old = k - unroll.policy_version > 1
        assert ((unroll.time_step.step_type == PAD).all(0) == old).all()
        assert (unroller.records.step_type != PAD).all()  # metrics count what happened
        unroller.publish()
    assert unroller.stats()["masked_rows"] > 0


def test_only_columns_of_old_segments_are_masked(made):
    unroller = made(num_workers=2, max_policy_lag=1)
    for _ in range(5):
        experience = nest.map(torch.clone, unroller.unroll(4))
        assert experience.time_step.step_type.shape == (5, 4)
    unroller.policy_version = 3
    given = experience.time_step.step_type.numpy().copy()
    segments = [filled(0, 0, version=2), filled(1, 2, version=1)]
    masked = unroller._mask_old(unroller._policies[0], nest.arrays(experience), segments)
    assert (masked.time_step.step_type[:, :2] != PAD).all() and (masked.time_step.step_type[:, 2:] == PAD).all()
    assert (experience.time_step.step_type.numpy() == given).all()  # a transport may share what it returned
    assert unroller.stats()["masked_rows"] == 8


def test_in_lockstep_segments_are_in_the_order_of_workers(made):
    unroller = made(num_workers=2, mode="lockstep")
    unroller._ledger.ready.extend(filled(worker_index, 2 * worker_index, version=0) for worker_index in (1, 0))
    assert [segment.worker_index for segment in unroller._take()] == [0, 1]


@pytest.mark.parametrize("algorithm", [worker_parts.Remembering, worker_parts.RememberingOnPolicy])
def test_what_a_policy_remembers_is_that_of_row_0(made, algorithm):
    unroller = made(algorithm=algorithm, unroll_length=4, slots=4)
    for _ in range(3):
        unroll = unroller.unroll(4)
        assert torch.equal(unroll.state, unroll.info["memory"][0]) and unroll.state.shape == (2,)
        assert torch.equal(unroll.state, unroll.time_step.observation[0, :, 2])  # the step of the episode
        assert len(unroll.action) == 4 + algorithm.on_policy
        wait_until_slots_are_full(unroller)


def test_states_of_all_rows_are_stored_where_that_is_requested(made):
    unroller = made(algorithm=worker_parts.RememberingOnPolicy, num_workers=2, unroll_length=4, mode="lockstep")
    unroller.stores_states = True
    for _ in range(3):
        unroll = unroller.unroll(4)
        info, state = unroll.info
        acted = unroll.time_step.step_type != FIRST  # there it is reset
        assert state.shape == (5, unroller.num_envs) and torch.equal(info["memory"][acted], state[acted])
        assert torch.equal(unroll.state, info["memory"][0])
        unroller.publish()


def test_actions_are_random_on_request(made):
    unroller = made(mode="lockstep")
    is_own = []
    for at_random in (False, True, True, False, False):
        unroll = unroller.unroll(4, at_random)
        own = unroll.info["seen"].sum(-1).long() % int(unroller._algorithm.action_spec.n)
        is_own.append(torch.equal(unroll.action[:-1], own[:-1]))
    assert is_own == [True, True, False, False, True]  # a segment is granted an unroll ahead


def test_workers_have_cores_of_their_own_and_one_thread(made, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    cpus = sorted(os.sched_getaffinity(0))[:2]
    workers = functools.partial(Workers, cpus=cpus, close_timeout=2.0)
    unroller = made(num_workers=2, workers=workers, mode="lockstep")
    unroller.unroll(4)
    for i, process in enumerate(processes(unroller)):
        assert os.sched_getaffinity(process.pid) == {cpus[i % len(cpus)]}
        assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")


def test_off_policy_unrolls_take_ready_segments_up_to_a_limit(made):
    for settings, num_rows in (({}, 20), ({"max_unroll_length": 8}, 8)):
        unroller = made(algorithm=SeeingOffPolicy, unroll_length=4, slots=5, **settings)
        unroller.unroll()
        wait_until_slots_are_full(unroller)
        assert len(unroller.unroll().action) == num_rows


def test_workers_in_excess_of_others_fill_up_with_pad_rows(made):
    unroller = made(algorithm=SeeingOffPolicy, num_workers=2, unroll_length=4, slots=3)
    unrolls = [nest.map(torch.clone, unroller.unroll()) for _ in range(20)]
    assert any((unroll.time_step.step_type == PAD).any() for unroll in unrolls)
    for unroll in unrolls:
        pad = unroll.time_step.step_type == PAD
        assert (pad[1:] | ~pad[:-1]).all()  # at the end of a column alone
    for rows in columns_of(unrolls, 4):
        check_stamps(rows)


@pytest.mark.parametrize("algorithm", [Seeing, SeeingOffPolicy])
def test_a_waiting_worker_uses_no_processor_time(made, algorithm):
    unroller = made(algorithm=algorithm)
    unroller.unroll(4)
    wait_until_slots_are_full(unroller)
    (process,) = processes(unroller)

    def seconds():
        return sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")

    before = seconds()
    time.sleep(0.5)
    assert seconds() - before < 0.1  # a few ticks, where a loop would take 0.5


def test_statistics_follow_environments_whose_columns_change(made):
    unroller = made(num_workers=2)
    normalizer = RewardNormalizer((), unroller._algorithm.reward_spec, gamma=0.9)
    running, so_far = [0.0] * 4, []

    def observe_until(wanted):
        env_ids, began = None, time.monotonic()
        while env_ids is None or not wanted(env_ids):
            step = nest.at(unroller.unroll(4).time_step, slice(1, None))
            normalizer.observe(step)
            env_ids = step.env_id[0].tolist()
            for column, i in enumerate(env_ids):
                for kind, reward in zip(step.step_type[:, column].tolist(), step.reward[:, column].tolist()):
                    running[i] = 0.0 if kind == FIRST else 0.9 * running[i] + reward
                    so_far.extend([running[i]] * (kind != FIRST))
            assert time.monotonic() - began < 60
        return env_ids

    observe_until(lambda env_ids: 2 in env_ids)
    other = unroller._workers.all[1].process.pid
    os.kill(other, signal.SIGSTOP)
    assert observe_until(lambda env_ids: 2 not in env_ids) == [0, 1, 0, 1]  # both segments are one worker's
    os.kill(other, signal.SIGCONT)
    observe_until(lambda env_ids: 2 in env_ids)
    moments = normalizer._moments
    assert int(moments.count) == len(so_far)
    assert (moments.mean.item(), moments.squares.item()) == pytest.approx(
        (np.mean(so_far), np.var(so_far) * len(so_far))
    )


# Failures.


KINDS = ("raise", "reset", "nan", "nan_reset", "inf_reward", "shape")


def each_failing(kinds, tmp_path, base=Faulty, **arguments):
    """An environment factory whose environments fail once in a worker, each in a way of its own."""
    failing = functools.partial(worker_parts.failing_once, base, kinds, os.getpid(), str(tmp_path), arguments)
    return functools.partial(make_environment, failing, num_envs=len(kinds))


@pytest.mark.parametrize("algorithm", [Seeing, SeeingOffPolicy])
def test_a_failed_environment_is_rebuilt_after_its_episode_ends(made, algorithm, tmp_path):
    unroller = made(each_failing(KINDS, tmp_path), algorithm, mode="lockstep")
    unrolls = [nest.map(torch.clone, unroller.unroll(4)) for _ in range(12)]
    assert unroller.num_env_errors == 6 and unroller.stats()["env_errors"] == 6
    assert all("is replaced" in text for text in LOG)
    for words, count in (("shape", 1), ("not finite", 3), ("broken on purpose", 2)):
        assert sum(words in text for text in LOG) == count, words
    if algorithm.on_policy:
        unrolls = [unroll._replace(time_step=nest.at(unroll.time_step, slice(0, 4))) for unroll in unrolls]
    for unroll in unrolls:
        assert all(torch.isfinite(leaf).all() for leaf in nest.leaves(unroll.time_step))
        assert (unroll.time_step.discount[unroll.time_step.step_type == PAD] == 1).all()
    for kind, rows in zip(KINDS, columns_of(unrolls, 6), strict=True):
        # The row before may already have been handed over, as the last one of an unroll; it trains nothing then.
        check_stamps(rows, may_break=True)
        cut = [k for k, row in enumerate(rows[:-1]) if row[0] == MID and rows[k + 1][0] == FIRST]
        short = [k for k, row in enumerate(rows) if row[0] == LAST and row[2][2] not in (5, 7, 4)]
        at_reset = kind in ("reset", "nan_reset")
        assert len(cut) + len(short) == (0 if at_reset else 1), (kind, rows)
    assert len(processes(unroller)) == 1 and unroller.stats()["restarts"] == 0


def test_a_broken_episode_is_truncated_with_the_row_before(made, tmp_path):
    kinds = "raise", "nan", "shape"
    step = made(each_failing(kinds, tmp_path), length=30).unroll(30).time_step
    for column, kind in enumerate(kinds):
        types, steps = step.step_type[:, column].tolist(), step.observation[:, column, 2].tolist()
        # Episode 0 of 5 actions; episode 1 breaks on its way to step 3, so its row of step 2 is the last.
        assert steps[:11] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1], kind
        assert types[:11] == [FIRST, MID, MID, MID, MID, LAST, FIRST, MID, LAST, FIRST, MID], kind
        discount, reward, action = step.discount[8, column], step.reward[9, column], step.prev_action[9, column]
        assert (discount, reward, action) == (1, 0, 0), kind


def test_an_episode_that_fails_at_its_ends_has_no_other_rows(made, tmp_path):
    kinds = "raise", "reset"
    step = made(each_failing(kinds, tmp_path, at=1), length=12).unroll(12).time_step
    for column, again in enumerate(([FIRST, MID], [MID, MID])):
        types = step.step_type[:9, column].tolist()
        assert types == [FIRST, MID, MID, MID, MID, LAST, FIRST, *again], kinds[column]


def test_too_many_errors_of_environments_end_the_run_with_the_traceback(made):
    environment = functools.partial(make_environment, functools.partial(Faulty, "raise", at=1, episode=0))
    unroller = made(environment, max_env_errors=3)
    with pytest.raises(RunError, match="broken on purpose") as raised:
        for _ in range(10):
            unroller.unroll(4)
    words = "^environment 0: Faulty.step raised RuntimeError: broken on purpose"
    place = rf"\({worker_parts.__file__}:\d+, in step\)"
    assert re.match(rf"{words} {place}\nThat is error 4 of environments .*max_env_errors = 3$", str(raised.value))
    trace = "".join(traceback.format_exception(raised.value))
    assert 'raise RuntimeError("broken on purpose")' in trace


def test_a_non_finite_first_reset_is_an_environment_error(made, tmp_path):
    faulty = functools.partial(Faulty, "nan_reset", episode=0, once=str(tmp_path / "once"))
    unroller = made(functools.partial(make_environment, faulty, num_envs=3))
    step = unroller.unroll(4).time_step
    assert (step.step_type[0] == FIRST).all() and (step.step_type[1:] == MID).all()
    assert torch.isfinite(step.observation).all() and (step.observation[:, :, 2] == torch.arange(5)[:, None]).all()
    stats = unroller.stats()
    assert (stats["env_errors"], stats["restarts"]) == (1, 0) and "not finite" in LOG[0]


@pytest.mark.parametrize("episode", [0, 1])
def test_an_always_non_finite_environment_ends_the_run(made, episode, tmp_path):
    infinite = functools.partial(worker_parts.Infinite, str(tmp_path / "infinite"), episode)
    unroller = made(functools.partial(make_environment, infinite), max_env_errors=3)
    with pytest.raises(RunError, match=r" not finite.*\n.*error 4 of environments"):
        for _ in range(10):
            unroller.unroll(4)
    assert unroller.stats()["restarts"] == 0


def test_without_max_env_errors_an_error_ends_the_worker_which_is_started_again(made, tmp_path):
    environment = functools.partial(make_environment, functools.partial(Faulty, "raise", once=str(tmp_path / "once")))
    unroller = made(environment, max_env_errors=None)
    unrolls = [nest.map(torch.clone, unroller.unroll(4)) for _ in range(5)]
    assert "broken on purpose" in LOG[0] and "restarted" in LOG[0]
    assert unroller.stats()["restarts"] == 1
    assert unrolls[-1].time_step.step_type.shape == (5, 1)


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_a_killed_worker_is_replaced_without_duplicate_rows(made, mode):
    unroller = made(algorithm=SeeingOffPolicy, num_workers=2, mode=mode, unroll_length=4)
    unrolls = [nest.map(torch.clone, unroller.unroll())]
    os.kill(processes(unroller)[0].pid, signal.SIGKILL)
    unrolls += [nest.map(torch.clone, unroller.unroll()) for _ in range(30 if mode == "free" else 6)]
    began = time.monotonic()
    dead = unroller._workers.all[0]
    while unroller.stats()["restarts"] < 1 or not dead.started or (unrolls[-1].time_step.step_type[:, 0] == PAD).all():
        unrolls.append(nest.map(torch.clone, unroller.unroll()))
        assert time.monotonic() - began < 60
    for rows in columns_of(unrolls, 4):
        check_stamps(rows, may_break=True)
        assert len({tuple(row[2]) for row in rows}) == len(rows)  # a stamp comes once
    assert any("SIGKILL" in text for text in LOG)


def test_replay_ends_an_episode_lost_with_its_worker():
    unroller = unroller_of(algorithm=SeeingOffPolicy, unroll_length=5)
    ring = RingBuffer(400, 2)
    try:
        ring.push(unroller.unroll()._replace(info=None))
        os.kill(processes(unroller)[0].pid, signal.SIGKILL)
        began = time.monotonic()
        while unroller.stats()["restarts"] < 1 or unroller._ledger.ready:
            ring.push(unroller.unroll()._replace(info=None))
            assert time.monotonic() - began < 60
        ring.push(unroller.unroll()._replace(info=None))
    finally:
        unroller.close()
    ring.check_valid()
    for column in range(2):
        positions = torch.arange(ring._store.end[column])[:, None]
        types = ring.read(torch.tensor([column]), positions).time_step.step_type[:, 0].tolist()
        assert types.count(FIRST) > 1  # the new worker's first episode is one of them
        assert all(before in (LAST, FIRST) for before, after in zip(types, types[1:]) if after == FIRST)


def test_replay_ends_an_episode_lost_between_unrolls():
    def push(*rows):
        types = torch.tensor(rows, dtype=torch.int32)
        zeros, ids = torch.zeros(types.shape), torch.arange(4, dtype=torch.int32).expand(types.shape)
        step = TimeStep(types, zeros, zeros + 1, zeros, zeros, ids)
        ring.push(Experience(step, zeros, None, None, None))
        ring.check_valid()

    ring = RingBuffer(40, 4)
    push((FIRST, FIRST, FIRST, PAD), (MID, MID, LAST, PAD))
    push((FIRST, MID, FIRST, FIRST), (MID, MID, FIRST, MID))
    push((MID, FIRST, FIRST, FIRST), (MID, MID, MID, MID))
    columns = []
    for column in range(4):
        rows = ring.read(torch.tensor([column]), torch.arange(ring._store.end[column])[:, None]).time_step
        columns.append(rows.step_type[:, 0].tolist())
        assert (rows.discount == 1).all()
    assert columns == [
        [FIRST, LAST, FIRST, MID, MID, MID],
        [FIRST, MID, MID, LAST, FIRST, MID],
        [FIRST, LAST, FIRST, FIRST, FIRST, MID],
        [FIRST, LAST, FIRST, MID],
    ]


def test_replay_ends_an_episode_lost_within_an_unroll():
    types = torch.tensor([[FIRST, FIRST], [MID, MID], [FIRST, LAST], [MID, FIRST], [MID, MID]], dtype=torch.int32)
    zeros, columns = torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int32)
    step = TimeStep(types, zeros, zeros + 1, zeros, zeros, columns)
    ring = RingBuffer(20, 2)
    ring.push(Experience(step, zeros, None, None, None))
    ring.check_valid()
    stored = ring.read(torch.tensor([0, 1]), torch.arange(5)[:, None].expand(5, 2)).time_step
    assert stored.step_type[:, 0].tolist() == [FIRST, LAST, FIRST, MID, MID] and types[1, 0] == MID
    assert stored.step_type[:, 1].tolist() == types[:, 1].tolist() and (stored.discount == 1).all()


def test_an_environment_that_hangs_is_killed_with_its_stack_in_the_log(made, tmp_path):
    environment = functools.partial(make_environment, functools.partial(Faulty, "hang", once=str(tmp_path / "once")))
    workers = functools.partial(Workers, step_timeout=0.7, close_timeout=0.3)
    unroller = made(environment, workers=workers, num_workers=2)
    began = time.monotonic()
    while unroller.stats()["restarts"] == 0:  # the other worker goes on, which must not hide it
        unroller.unroll(4)
        assert time.monotonic() - began < 60
    assert "stepping environments for" in LOG[0] and 'worker_parts.py", line' in LOG[0] and "in step" in LOG[0]
    assert unroller.stats()["restarts"] == 1


def test_an_environment_that_ends_its_process_is_replaced(made, tmp_path):
    environment = functools.partial(make_environment, functools.partial(Faulty, "exit", once=str(tmp_path / "once")))
    unroller = made(environment)
    for _ in range(6):
        unroller.unroll(4)
    assert "exit code 3" in LOG[0]


def test_too_many_deaths_end_the_run(made):
    environment = functools.partial(make_environment, functools.partial(Faulty, "exit"))
    unroller = made(environment, workers=functools.partial(Workers, max_deaths=1, close_timeout=1.0))
    with pytest.raises(RunError, match=r"exit code 3\nThat is death 2 of workers .* Workers.max_deaths = 1"):
        for _ in range(20):
            unroller.unroll(4)


def test_a_run_may_continue_with_fewer_workers(made, tmp_path):
    workers = functools.partial(Workers, max_deaths=0, on_failure="shrink", close_timeout=1.0)
    unroller = made(algorithm=SeeingOffPolicy, num_workers=2, workers=workers)
    unroller.unroll()
    os.kill(processes(unroller)[0].pid, signal.SIGKILL)
    while len(processes(unroller)) > 1:  # whenever that is noticed
        unroller.unroll()
    for _ in range(5):  # the first of which may have rows that were ready
        step_type = unroller.unroll().time_step.step_type
    assert (step_type[:, :2] == PAD).all() and (step_type[:, 2:] != PAD).all() and "continues without" in LOG[0]
    os.kill(processes(unroller)[0].pid, signal.SIGKILL)
    with pytest.raises(RunError, match="death"):
        while True:
            unroller.unroll()


def test_run_ends_if_remaining_workers_have_too_few_slots(made):
    workers = functools.partial(Workers, max_deaths=0, on_failure="shrink", close_timeout=1.0)
    unroller = made(num_workers=3, workers=workers)
    unroller.unroll(4)
    for process in processes(unroller)[:2]:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="1 workers with 2 slots are left, .*segments_per_unroll = 3"):
        for _ in range(20):
            unroller.unroll(4)
            time.sleep(0.1)


def test_worker_deaths_are_noticed_despite_surviving_children(made):
    unroller = made(functools.partial(make_environment, worker_parts.Serving))
    unroller.unroll(4)
    os.kill(processes(unroller)[0].pid, signal.SIGKILL)
    began = time.monotonic()
    while unroller.stats()["restarts"] < 1:
        unroller.unroll(4)
    assert time.monotonic() - began < 10


def test_a_worker_that_was_stopped_with_the_trainer_is_not_killed(made):
    workers = functools.partial(Workers, step_timeout=0.7, close_timeout=1.0)
    unroller = made(functools.partial(make_environment, worker_parts.Dozing), workers=workers, slots=8)
    unroller.unroll(4)
    (process,) = processes(unroller)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.0)
    unroller._workers._checked_at = 0.0
    assert [message for _, message in unroller._workers.wait(0) if isinstance(message, Died)] == []
    os.kill(process.pid, signal.SIGCONT)
    for _ in range(4):
        unroller.unroll(4)
    assert unroller.stats()["restarts"] == 0 and LOG == []


def test_where_a_worker_hangs_is_reported_each_time(made):
    unroller = made()
    unroller.unroll(4)
    (worker,) = unroller._workers.all
    for _ in range(2):
        os.lseek(worker._stacks.fd, 1 << 16, os.SEEK_SET)  # as many stacks have been written before
        assert "worker_process.py" in worker.stacks()


def test_a_traceback_appears_even_if_environments_do_not_close(made):
    environment = functools.partial(make_environment, functools.partial(worker_parts.NotClosing, os.getpid()))
    unroller = made(environment, algorithm=Failing, workers=functools.partial(Workers, close_timeout=0.3))
    with pytest.raises(RunError, match="the policy is at fault"):
        for _ in range(5):
            unroller.unroll(4)
    began = time.monotonic()
    unroller.close()
    assert time.monotonic() - began < 30


def test_workers_take_subnormal_numbers_as_zero(made):
    unroller = made(functools.partial(make_environment, functools.partial(worker_parts.Flushing, (50,))))
    reward = unroller.unroll(4).time_step.reward
    assert reward[1:].eq(1).all()


def test_images_are_not_printed_with_non_finite_rewards(made, tmp_path):
    environment = functools.partial(make_environment, functools.partial(worker_parts.Blind, str(tmp_path / "once")))
    unroller = made(environment, SeeingOffPolicy)
    unroller.unroll()
    (text,) = LOG
    assert "reward nan" in text and len(text) < 1000


def test_an_interrupt_from_the_terminal_is_not_for_workers(made):
    unroller = made(num_workers=2)
    unroller._start()
    for process in processes(unroller):
        assert os.getpgid(process.pid) == process.pid and os.getsid(process.pid) != os.getsid(0)
    unroller.unroll(4)
    for process in processes(unroller):
        process.send_signal(signal.SIGINT)
    for _ in range(5):
        unroller.unroll(4)
    assert LOG == [] and unroller.stats()["restarts"] == 0


def test_processes_of_an_environment_that_hangs_are_killed_with_their_worker(made, tmp_path):
    environment = functools.partial(
        make_environment, functools.partial(Faulty, "hang", once=str(tmp_path / "once")), 2, "async"
    )
    unroller = made(environment, workers=functools.partial(Workers, step_timeout=1.0, close_timeout=0.3))
    unroller.unroll(4)
    (process,) = processes(unroller)
    stepping = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    while unroller.stats()["restarts"] == 0:
        unroller.unroll(4)
    assert len(stepping) == 2
    began = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in stepping):  # until somebody has waited for what was killed
        assert time.monotonic() - began < 20
        time.sleep(0.05)


def test_a_constructor_that_fails_is_raised_here_with_its_traceback(made):
    maker = functools.partial(worker_parts.Unbuildable, os.getpid())
    unroller = made(functools.partial(make_environment, maker))
    with pytest.raises(RunError, match="no such robot") as raised:
        unroller.unroll(4)
    words = "^worker 0: the constructor of Unbuildable raised ValueError: no such robot"
    assert re.match(rf"{words} \({worker_parts.__file__}:\d+, in __new__\)", str(raised.value))
    assert 'raise ValueError("no such robot")' in "".join(traceback.format_exception(raised.value))


def test_a_first_reset_that_fails_is_raised_here(made):
    maker = functools.partial(Faulty, "reset", episode=0)
    unroller = made(functools.partial(make_environment, maker))
    with pytest.raises(RunError, match="broken on purpose"):
        unroller.unroll(4)


def test_a_policy_that_raises_is_raised_here_at_once(made):
    unroller = made(algorithm=Failing)
    with pytest.raises(RunError, match="the policy is at fault"):
        for _ in range(5):
            unroller.unroll(4)


def test_workers_end_in_order_though_a_process_has_a_copy_of_their_sockets():
    unroller = unroller_of()
    unroller.unroll(4)
    running = processes(unroller)
    copy = os.fork()
    if copy == 0:
        time.sleep(60)
        os._exit(0)
    try:
        unroller.close()
        assert [process.poll() for process in running] == [0]
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


@contextlib.contextmanager
def forked(function, *arguments):
    """Process id of a copy of this process that calls a function, until the context ends; the copy has no server."""
    copy = os.fork()
    if copy == 0:
        try:
            function(*arguments)
        finally:
            os._exit(1)
    try:
        yield copy
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


def start_workers(end):
    """Starts workers that wait and one that hangs in a step, and writes process ids: the server's and theirs."""
    waiting = unroller_of(num_workers=2)
    waiting.unroll(4)
    hanging = unroller_of(functools.partial(make_environment, functools.partial(Faulty, "hang", at=1)))
    hanging._start()
    (worker,) = hanging._workers.all
    while not worker.started:
        for message in hanging._workers.wait(1):
            hanging._receive(*message)
    hanging._grant()
    while worker.heartbeat.get()[0] != Heartbeat.STEPPING:
        time.sleep(0.01)
    running = [*processes(waiting), *processes(hanging)]
    os.write(end, " ".join(str(pid) for pid in (SERVER.pid, *(process.pid for process in running))).encode())
    time.sleep(1000)  # keeps the unrollers


def start_workers_in_another_thread(end):
    threading.Thread(target=start_workers, args=(end,)).start()
    time.sleep(1000)


@pytest.mark.parametrize("start", [start_workers, start_workers_in_another_thread])
def test_a_killed_trainer_leaves_no_processes(start):
    """Workers that wait, and workers in the midst of a step, whichever thread of the trainer started them."""
    shared_before = set(os.listdir("/dev/shm"))
    read, write = os.pipe()
    with forked(start, write):
        os.close(write)
        pids = [int(pid) for pid in os.read(read, 1000).split()]
        os.close(read)
        assert len(pids) == 4 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    began = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - began < 4.5  # less than the lifeline takes
        time.sleep(0.05)
    began = time.monotonic()
    while not set(os.listdir("/dev/shm")) <= shared_before:  # tests in other processes may hold some for a while
        assert time.monotonic() - began < 20
        time.sleep(0.1)


@pytest.mark.parametrize("at_start", [False, True])
def test_a_signal_ends_a_run_with_a_frozen_worker(tmp_path, at_start, monkeypatch):
    monkeypatch.setattr(stop_signals, "GRACE_SECONDS", 0.1)
    environment = functools.partial(worker_parts.Freezing, os.getpid(), at_start)
    trainer = Trainer(
        tmp_path,
        algorithm=Seeing,
        environment=functools.partial(make_environment, environment),
        unroller=functools.partial(AsyncUnroller, workers=functools.partial(Workers, close_timeout=10_000)),
        batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=8),
        listeners=[CheckpointSaver(0)],
        unroll_length=8,
        num_iterations=10_000,
        device="cpu",
    )
    report = trainer.train()
    assert report.finished and trainer.interrupted_by == signal.SIGTERM
    assert Checkpoints(tmp_path / "checkpoints").steps() == ([] if at_start else [report.env_steps])
    assert [worker.process.poll() for worker in trainer.unroller._workers.all] == [-signal.SIGKILL]


def test_processes_of_environments_end_with_a_worker_that_exits(made):
    unroller = made(functools.partial(make_environment, worker_parts.Serving), workers=PATIENT)
    unroller.unroll(4)
    (process,) = processes(unroller)
    os.killpg(process.pid, 0)
    unroller.close()
    assert process.returncode == 0
    began = time.monotonic()
    while True:  # until whoever has adopted it has taken its exit code
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in members(process.pid)]
        if all(state[0] == "Z" for state in states):
            break
        assert time.monotonic() - began < 10
        time.sleep(0.05)


def members(group):
    """Processes of a group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[2]) == group:
                yield int(path.parent.name)


def test_a_worker_that_is_importing_dies_with_the_trainer(tmp_path):
    """And the signal of a Ctrl-C does not end it."""
    (tmp_path / "gin").mkdir()
    pid_file = tmp_path / "pid"
    (tmp_path / "gin" / "__init__.py").write_text(
        "import os, signal, time\n"
        "assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
        f"open({str(pid_file) + '.new'!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(pid_file) + '.new'!r}, {str(pid_file)!r})\n"
        "time.sleep(10000)\n"
    )

    def train():
        sys.path.insert(0, str(tmp_path))
        unroller_of().unroll(4)

    began = time.monotonic()
    with forked(train) as trainer:
        while not pid_file.exists():
            assert os.waitpid(trainer, os.WNOHANG) == (0, 0) and time.monotonic() - began < 300
            time.sleep(0.05)
    killed = time.monotonic()
    while Path(f"/proc/{pid_file.read_text()}").exists():
        assert time.monotonic() - killed < 60
        time.sleep(0.05)


def test_closing_ends_the_processes_and_gives_descriptors_back():
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    unroller_of().close()  # never started
    for is_first in (True, False):
        unroller = unroller_of(num_workers=2, workers=PATIENT)
        unroller.unroll(4)
        running = processes(unroller)
        unroller.close()
        unroller.close()
        assert all(process.poll() == 0 for process in running)
        del unroller
        if is_first:
            before = descriptors()  # that of the server, which stays, among them
    assert descriptors() <= before


def test_closing_closes_environments(made, tmp_path):
    parting = functools.partial(worker_parts.Parting, os.getpid(), str(tmp_path / "closed"))
    unroller = made(functools.partial(make_environment, parting))
    unroller.unroll(4)
    unroller.close()
    assert (tmp_path / "closed").exists()


# What workers are given.


def test_an_on_policy_algorithm_that_does_not_correct_is_refused():
    with pytest.raises(UsageError, match="NotCorrecting is on-policy and does not correct .* APPO"):
        unroller_of(algorithm=NotCorrecting)


def test_what_a_worker_cannot_import_is_refused_with_the_remedy(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(
        "import functools\n"
        "from alfish.environments import make_environment\n"
        "from toys import Stamped\n"
        "from alfish.unrollers.workers.environment_maker import EnvironmentMaker\n"
        "class Mine(Stamped): pass\n"
        "import gin\n"
        "@gin.configurable\n"
        "class Named(Stamped): pass\n"
        "for thing in (Mine, functools.partial(make_environment, Mine), Mine(), make_environment):\n"
        "    if thing is make_environment:\n"
        "        gin.parse_config('make_environment.env_id = @Named')\n"
        "    try:\n"
        "        EnvironmentMaker(thing)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    runpy.run_path(str(program), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line, name in zip(lines, ("Mine", "Mine", "Mine", "Named")):
        assert f"'{name}'" in line or f"{name}'" in line
        assert "move it into a module" in line and "SyncUnroller" in line


def test_a_lambda_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match="cannot be sent to a worker process .* without lambdas"):
        unroller_of(environment=lambda seed: make_environment(Stamped, seed=seed))


def test_a_lambda_in_the_environments_settings_is_named():
    with reading.preserved():
        reading.read(["ppo_cartpole.gin"], [])
        gin.bind_parameter("make_environment.env_id", lambda: Stamped())
        with pytest.raises(
            UsageError, match=r"^make_environment\.env_id needs .*<lambda>, which is defined in the main prog"
        ):
            EnvironmentMaker(gin.get_bindings("alfish.Trainer")["environment"])


def test_a_lambda_read_by_a_worker_environment_is_named():
    with reading.preserved():
        reading.read(["ppo_cartpole.gin"], ["make_environment.env_id=@Bandit"])
        gin.bind_parameter("Bandit.length", lambda: 3)
        gin.bind_parameter("Trainer.listeners", [lambda: 3])  # which no environment reads
        maker = from_bytes(to_bytes(EnvironmentMaker(gin.get_bindings("alfish.Trainer")["environment"]), "maker"))
    with reading.preserved():
        gin.clear_config()
        factory = maker()
        with pytest.raises(UsageError, match=r"^Bandit\.length needs .*<lambda>, which is defined in the main"):
            factory()
        gin.bind_parameter("Bandit.length", 3)
        factory().close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"slots": 1}, "slots is 1"),
        ({"unroll_length": 0}, "unroll_length is 0"),
        ({"unroll_length": 5}, "on-policy the two must be equal"),
        ({"mode": "lockstep", "segments_per_unroll": 2}, "in lockstep it is num_workers"),
        ({"segments_per_unroll": 5, "num_workers": 2}, "2 workers with 2 slots have at most 4"),
        ({"mode": "lockstep", "workers": functools.partial(Workers, on_failure="shrink")}, "lockstep waits for every"),
        ({"workers": functools.partial(Workers, on_failure="ignore")}, "on_failure is 'ignore'"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        unroller_of(**settings)


class Remembering(SeeingOffPolicy):
    """Trains on windows that begin with a state of its memory."""

    replay_needs = ReplayNeeds(recurrent_state=True)


def test_segments_are_as_short_as_unrolls_where_replay_stores_states(made):
    assert made(algorithm=Remembering, length=4)._length == 4
    assert made(algorithm=SeeingOffPolicy, length=4)._length == 8
    with pytest.raises(
        UsageError, match="AsyncUnroller.unroll_length is 32 and Trainer.unroll_length is 4; replay stores"
    ):
        unroller_of(algorithm=Remembering, length=4, unroll_length=32)


def test_gin_reaches_workers_scopes_included(made, tmp_path):
    import gin

    gin.parse_config(
        "import alfish.training.trainer\nimport toys\n"
        "Trainer.environment = @training/make_environment\n"
        "training/make_environment.env_id = @Stamped\n"
        "training/make_environment.num_envs = 3\n"
        "Stamped.lengths = (2,)\n"
    )
    environment = gin.get_bindings("alfish.Trainer")["environment"]
    unroller = made(environment, length=6)
    step = unroller.unroll(6).time_step
    assert step.step_type.shape == (7, 3)
    assert step.step_type[:, 0].tolist() == [FIRST, MID, LAST, FIRST, MID, LAST, FIRST]


def test_environment_ids_and_seeds_are_unique_across_workers():
    plan = Plan(3, 4, 6, Stepping(None, 0, 0.0, True, 0, False), "program", b"", 8, 0, 0, b"", 0)
    setups = [plan.setup(index, generation) for generation in range(3) for index in range(3)]
    setups += [plan._replace(seed=seed).setup(index, 0) for seed in (1, 2) for index in range(3)]
    assert len({setup.seed for setup in setups}) == len(setups) == 9 + 6
    assert [setup.first_env_id for setup in setups] == [0, 4, 8] * 5
    resumed = plan._replace(first_generation=1).setup(2, 1)  # goes on counting
    assert resumed.seed == plan.setup(2, 2).seed


def test_a_resumed_run_begins_with_other_seeds(made):
    first = made()
    first.unroll(4)
    saved = first.state_dict()
    resumed = made()
    resumed.load_state_dict(saved)
    stamps = {int(unroller.unroll(4).time_step.observation[0, 0, 0]) for unroller in (first, resumed)}
    assert len(stamps) == 2


def test_a_run_that_an_error_ended_continues_with_other_seeds(root):
    trainer = Trainer(
        root,
        algorithm=SeeingOffPolicy,
        environment=functools.partial(make_environment, functools.partial(Faulty, "raise", episode=2)),
        unroller=functools.partial(AsyncUnroller, max_env_errors=0, mode="lockstep", workers=QUICK),
        batches=functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=20),
        num_iterations=20,
        unroll_length=4,
        listeners=[],
    )
    with pytest.raises(RunError, match="broken on purpose"):
        trainer.train()
    _, saved = trainer.directory.checkpoints.load("latest")
    assert saved["unroller"]["generation"] == 0


@pytest.mark.parametrize("gather", [True, False])
def test_the_reported_executed_action_is_stored(made, gather):
    environment = functools.partial(make_environment, Expert, num_envs=2)
    unroller = made(
        environment, ScriptedOffPolicy, length=8, mode="lockstep", num_workers=1, overwrite_policy_output=True
    )
    if not gather:
        unroller.ignore_infos()
    actions = unroller.unroll(8).action[:4, 0, 0].tolist()
    assert [actions[k] for k in (0, 2, 3)] == [0.0, -0.5, -0.75]


def test_a_curriculum_receives_the_progress_of_training(made):
    unroller = made(functools.partial(make_environment, Curriculum, num_envs=2), mode="lockstep")
    told = []
    for k in range(5):
        unroll = unroller.unroll(4)
        told.append(unroll.time_step.observation[1, :, 0].tolist())
        unroller._algorithm.progress.fill_((k + 1) / 8)
        unroller.publish()
    assert told == [[0, 0], [0, 0], [0.125] * 2, [0.25] * 2, [0.375] * 2]


def test_a_curriculum_receives_the_progress_before_its_first_episode_too(made):
    unroller = made(functools.partial(make_environment, Curriculum, num_envs=2))
    unroller._algorithm.progress.fill_(0.5)
    assert unroller.unroll(4).time_step.observation[0, :, 0].tolist() == [0.5, 0.5]
    unroller._algorithm.progress.fill_(0.75)
    unroller.publish()
    os.kill(processes(unroller)[0].pid, signal.SIGKILL)
    while unroller.stats()["restarts"] < 1:
        unroller.unroll(4)
    assert unroller.unroll(4).time_step.observation[0, 0, 0] == 0.75


def test_a_rebuilt_environment_receives_the_training_progress(made, tmp_path):
    kinds = "raise", "nan", "shape"
    unroller = made(each_failing(kinds, tmp_path, worker_parts.FaultyCurriculum, at=1, episode=0))
    unroller._algorithm.progress.fill_(0.5)
    step = unroller.unroll(4).time_step  # they break within these rows
    assert (step.step_type[1] == FIRST).all() and unroller.num_env_errors == 3
    assert (step.observation[:, :, 0] == 0.5).all()


@pytest.mark.parametrize("kinds", [(SyncUnroller, AsyncUnroller), (AsyncUnroller, SyncUnroller)])
def test_a_run_continues_with_another_unroller(root, kinds):
    def trainer(kind, iterations):
        return Trainer(
            root,
            algorithm=SeeingOffPolicy,
            environment=ALIKE,
            unroller=kind,
            batches=functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=20),
            num_iterations=iterations,
            unroll_length=8,
            listeners=[],
        )

    first = trainer(kinds[0], 4)
    first.train()
    first.save()
    second = trainer(kinds[1], 8)
    second.train()
    assert second.clock.iterations == second.unroller.policy_version == 8
    assert second.clock.env_steps > first.clock.env_steps


def test_first_episodes_can_be_staggered(made):
    environment = functools.partial(make_environment, functools.partial(OneState, length=50), num_envs=4)
    algorithm = worker_parts.SeeingOffPolicy
    unroller = made(environment, algorithm, unroll_length=48, stagger=40)
    types = unroller.unroll().time_step.step_type[:48]  # a slow machine may have more segments ready
    ends = [(types[:, b] == LAST).nonzero().flatten().tolist() for b in range(4)]
    assert ends == [[], [10], [20], [30]]
    assert unroller._workers._plan.setup(0, generation=1).starts == [0] * 4  # the others' ends are spread already


def test_worker_step_interval_delays_steps(made):
    unroller = made(worker_step_interval=0.05, mode="lockstep")
    unroller.unroll(4)
    began = time.monotonic()
    unroller.unroll(4)
    unroller.unroll(4)
    assert time.monotonic() - began > 0.3


def test_infos_reach_metrics_with_a_mask_for_each_environment(root):
    from alfish.metrics import EnvInfo

    metrics = [EnvInfo()]
    trainer = Trainer(
        root,
        algorithm=SeeingOffPolicy,
        environment=functools.partial(make_environment, Informing, num_envs=2),
        unroller=functools.partial(AsyncUnroller, num_workers=2, mode="lockstep", workers=QUICK),
        batches=functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=20),
        metrics=metrics,
        num_iterations=6,
        unroll_length=8,
        listeners=[],
    )
    trainer.train()
    results = trainer.metrics.results()
    assert results["env_info/count"] == 3 and results["env_info/deep.twice"] == 2
    assert results["env_info/count/n"] >= 40


def test_metrics_count_every_step_once(root):
    from alfish.metrics import AverageEpisodeLength, AverageReturn, EnvironmentSteps

    trainer = Trainer(
        root,
        algorithm=Slowed,
        environment=ALIKE,
        unroller=functools.partial(AsyncUnroller, num_workers=2, workers=QUICK),
        batches=functools.partial(EpochBatches, num_epochs=1),
        metrics=[EnvironmentSteps(), AverageEpisodeLength(), AverageReturn()],
        num_iterations=20,
        unroll_length=8,
        listeners=[],
    )
    trainer.train()
    results = trainer.metrics.results()
    assert results["environment_steps"] == trainer.clock.env_steps
    assert results["average_episode_length"] == pytest.approx((3 + 5 + 1 + 8) / 4, abs=0.5)
    assert results["average_return"] == pytest.approx((6 + 15 + 1 + 36) / 4, abs=3)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system pins no processes")
def test_a_missing_core_is_named():
    pool = Workers(1, cpus=[999])
    with pytest.raises(
        UsageError, match="Workers.cpus has the core 999, but .* may run only on the cores .*; list only"
    ):
        pool.start(None, [], None, [], 0)


def test_calls_reach_workers_with_earlier_published_weights(made):
    """In lockstep, the segment of the next iteration is granted before the call, like that of published weights."""
    unroller = made(functools.partial(make_environment, Levels, num_envs=2), mode="lockstep", num_workers=2, length=5)
    told = []
    for k in range(5):
        told.append(unroller.unroll(5).time_step.observation[1, :, 1].tolist())
        unroller.publish()
        unroller.environment.call("set_level", float(k))
        unroller.environment.call("set_level", k + 1.0)
    assert told == [[0.0] * 4, [0.0] * 4, [1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_a_restarted_worker_begins_with_the_last_call(made):
    environment = functools.partial(make_environment, Levels, num_envs=2, env_kwargs={"lengths": (100_000,)})
    unroller = made(environment, length=5)
    unroller.environment.call("set_level", 1.0)  # before the workers start
    assert (unroller.unroll(5).time_step.observation[0, :, 0] == 1.0).all()
    unroller.environment.call("set_level", 2.0)
    os.kill(processes(unroller)[0].pid, signal.SIGKILL)
    restarts = 0
    while restarts < 1:
        unroller.unroll(5)
        restarts = unroller.stats()["restarts"]
    for _ in range(3):  # segments that the first process had filled
        step = unroller.unroll(5).time_step
    assert (step.observation[:, :, 0] == 2.0).all(), "the episode that begins with the restart has the last level"


def test_an_environment_that_is_built_again_receives_the_last_call(made, tmp_path):
    kinds = "raise", "nan", "shape"
    unroller = made(each_failing(kinds, tmp_path, worker_parts.FaultyLevels, at=1, episode=0))
    unroller.environment.call("set_level", 0.5)
    step = unroller.unroll(4).time_step
    assert (step.step_type[1] == FIRST).all() and unroller.num_env_errors == 3
    assert (step.observation[:, :, 0] == 0.5).all()


def test_saved_calls_are_made_by_workers_of_a_resumed_run(made):
    environment = functools.partial(make_environment, Levels, num_envs=2)
    unroller = made(environment, length=5)
    unroller.environment.call("set_level", 4.0)
    unroller.unroll(5)
    state = unroller.state_dict()
    assert state["calls"] == [["set_level", [4.0]]]
    resumed = made(environment, length=5)
    resumed.load_state_dict(state)
    assert (resumed.unroll(5).time_step.observation[0, :, 0] == 4.0).all()


def test_a_wrong_call_is_refused_where_it_is_made(made):
    unroller = made(functools.partial(make_environment, Levels, num_envs=1), length=5)
    unroller.unroll(5)
    with pytest.raises(UsageError, match="Levels has no method 'set_lewel'"):
        unroller.environment.call("set_lewel", 1.0)


def test_a_policy_whose_actions_are_not_finite_is_named_and_no_environment_is_replaced(made):
    environment = functools.partial(make_environment, Following, num_envs=2)
    unroller = made(environment, algorithm=Diverged, max_env_errors=100)
    with pytest.raises(
        UsageError, match=r"the policy's action in environment [01] is not finite: \[nan\]; check rollou"
    ):
        for _ in range(20):
            unroller.unroll()
    assert unroller.num_env_errors == 0


def test_episodes_of_environments_that_are_not_stepped_one_by_one_cannot_be_staggered(made):
    environment = functools.partial(make_environment, "CartPole-v1", 2, vectorization="vector_entry_point")
    with pytest.raises(UsageError, match="AsyncUnroller.stagger is 8, but the environments of CartPole-v1 are not"):
        made(environment, stagger=8)


@pytest.mark.parametrize("max_env_errors", [100, None])
def test_an_evaluation_in_which_an_environment_fails_is_left_out_where_errors_are_tolerated(root, max_env_errors):
    def environment(**arguments):
        kind = functools.partial(Faulty, "raise", episode=0) if arguments.get("evaluation") else Stamped
        return make_environment(kind, **arguments)

    trainer = Trainer(
        root,
        algorithm=SeeingOffPolicy,
        environment=functools.partial(make_environment, Stamped),
        evaluation_environment=environment,
        unroller=functools.partial(AsyncUnroller, max_env_errors=max_env_errors, mode="lockstep", workers=QUICK),
        batches=functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=20),
        num_iterations=20,
        unroll_length=4,
        listeners=[Evaluate(20, num_episodes=1)],
    )
    if max_env_errors is None:
        with pytest.raises(RunError, match="broken on purpose"):
            trainer.train()
        return
    assert trainer.train().evaluation is None
    log = (root / "log.txt").read_text()
    assert log.count("is left out, because an environment failed: ") > 2 and "broken on purpose" in log
