"""The profile: where a run's time goes, told without changing the run."""

import functools
import json
import re

import pytest
import torch

from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.compiler import kernels
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.networks import MLP, CriticEnsemble
from alfish.runs.timer import LOOP
from alfish.training.listener import LISTENERS
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.loop import METRICS, SAMPLE, STORE, UPDATE
from alfish.training.profiler import Measured, Profile, advice
from alfish.training.trainer import Trainer
from alfish.unrollers.unroller import ENVIRONMENT, POLICY

SMALL_SAC = functools.partial(
    SAC, actor_mlp=functools.partial(MLP, layers=(8,)), critic=functools.partial(CriticEnsemble, layers=(8,))
)


def train(root_dir, listeners, algorithm=SMALL_SAC, **options):
    if algorithm is PPO:
        options["batches"] = functools.partial(EpochBatches, num_epochs=2)
    else:
        options["batches"] = functools.partial(ReplayBatches, capacity=500, batch_size=8, warmup_env_steps=20)
    trainer = Trainer(
        root_dir,
        algorithm=algorithm,
        environment=functools.partial(make_environment, TensorPointMass, num_envs=2),
        listeners=listeners,
        unroll_length=4,
        device="cpu",
        **{"num_env_steps": 80, **options},
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A run of SAC that was profiled, and its profile."""
    profile = Profile(warmup_updates=4, trace_seconds=0)
    trainer = train(tmp_path_factory.mktemp("profiled"), [Evaluate(40, 1), CheckpointSaver(), profile])
    return trainer, profile


def test_the_table_tells_where_all_of_the_time_went(tmp_path, profiled):
    on_policy = Profile(warmup_updates=4, trace_seconds=0)
    listeners = [Evaluate(200, 1), CheckpointSaver(), on_policy]
    for trainer, profile in [profiled, (train(tmp_path, listeners, PPO, num_env_steps=400), on_policy)]:
        table = profile.table()
        assert all(line in (trainer.directory.path / "log.txt").read_text() for line in table.splitlines())
        shares = [float(share) for share in re.findall(r"^ +(-?[0-9.]+)%", table, re.MULTILINE)]
        assert sum(shares) == pytest.approx(100, abs=0.5) and min(shares) >= 0
        assert shares == sorted(shares, reverse=True)
        for part in (LOOP, LISTENERS, SAMPLE, STORE, UPDATE, ENVIRONMENT, POLICY, METRICS):
            assert f"  {part}\n" in table + "\n"


def test_a_profiled_run_is_the_same_run(tmp_path, profiled):
    plain = train(tmp_path, [Evaluate(40, 1), CheckpointSaver()])
    for a, b in zip(plain.algorithm.parameters(), profiled[0].algorithm.parameters()):
        assert torch.equal(a, b)


def test_the_trace_has_the_format_of_trace_viewers(tmp_path, capsys):
    profile = Profile(warmup_updates=4, trace_seconds=0.01)
    train(tmp_path, [profile, Profile(warmup_updates=10**6)])  # the other one ends during its warm-up
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" or event.get("name") == "aten::addmm" for event in events)
    assert profile.table()  # counts begin when the trace has ended
    assert capsys.readouterr().err.count("share") == 1


def measured(**seconds):
    """One second of a run, of which parts took these seconds in one call each."""
    return Measured(1.0, 10, 1, seconds, dict.fromkeys(seconds, 1))


def test_it_advises_to_compile_where_updates_are_most_of_it(profiled):
    run, _ = profiled
    assert any("Learner.compile = True" in line for line in advice(measured(**{UPDATE: 0.5, LOOP: 0.5}), run))
    assert not list(advice(measured(**{LOOP: 1.0}), run))


@pytest.mark.parametrize(
    ("is_plain", "milliseconds", "threads", "cores", "is_advised"),
    [
        (False, 2, 1, 2, True),
        (False, 0.5, 1, 2, False),
        (False, 2, 1, 1, False),
        (True, 2, 1, 2, False),
        (False, 2, "auto", 2, False),
        (False, 2, 2, 4, False),
    ],
)
def test_it_advises_threads_where_compiled_updates_are_long(
    profiled, monkeypatch, is_plain, milliseconds, threads, cores, is_advised
):
    run, _ = profiled
    monkeypatch.setattr(type(run.learner), "is_plain", is_plain)
    monkeypatch.setattr(kernels, "num_threads", lambda: threads)
    monkeypatch.setattr(kernels, "available_cores", lambda: cores)
    seconds = milliseconds / 1000
    long = Measured(seconds, 10, 1, {UPDATE: seconds}, {UPDATE: 1})
    assert any("Trainer.num_threads" in line for line in advice(long, run)) == is_advised
