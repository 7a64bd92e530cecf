"""Threads of a process: torch's and helpers, and the cores that there are."""

import csv
import functools
import os

import pytest
import torch

from alfish.algorithms.dqn import DQN
from alfish.compiler import kernels, matmul
from alfish.compiler.kernels import HelperCounts
from alfish.environments import make_environment
from alfish.learner.batches import ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, QNetwork, Torso
from alfish.training.listeners import Summaries
from alfish.training.trainer import Trainer


@pytest.fixture(autouse=True)
def one_thread():
    yield
    kernels.set_num_threads(1)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 8)]
)
def test_a_processor_time_limit_counts_as_cores(monkeypatch, tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(kernels, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 11)), raising=False)
    assert kernels.available_cores() == cores


def test_auto_uses_one_torch_thread_and_helpers_on_other_cores(monkeypatch):
    monkeypatch.setattr(kernels, "available_cores", lambda: 3)
    kernels.set_num_threads("auto")
    assert torch.get_num_threads() == 1 and kernels._wanted == (2, True) and kernels.num_threads() == "auto"
    for count in (2, 1):
        kernels.set_num_threads(count)
        assert torch.get_num_threads() == count == kernels.num_threads() and kernels._wanted == (0, True)
    monkeypatch.setattr(kernels, "available_cores", lambda: 1)
    kernels.set_num_threads("auto")
    assert kernels.num_threads() == 1


@pytest.mark.skipif(not matmul.suits_products(), reason="there is no kernel for this processor or torch")
@pytest.mark.parametrize("shape", [(1, 256, 256, 256), (2, 200, 256, 200), (1, 7, 900, 2000), (1, 2000, 300, 40)])
def test_helpers_change_no_bit_of_a_product(shape):
    """Some have one panel or few rows; transposes are copied by each task."""
    members, rows, inner, columns = shape
    assert matmul.has_products()
    torch.manual_seed(0)
    a, b = torch.randn(members, rows, inner), torch.randn(members, inner, columns)
    for right in (b, b.mT.contiguous().mT):
        kernels.set_num_threads(1)
        expected = torch.ops.alfish.product(a, right)
        before = kernels.helper_counts()
        for number in (1, 3):
            kernels.use_helpers(number, adapts=False)
            for _ in range(30):
                assert torch.equal(torch.ops.alfish.product(a, right), expected)
        assert kernels.helper_counts().calls == before.calls + 60
        for _ in range(10_000):  # on a busy machine a helper may come late often
            if kernels.helper_counts().helped > before.helped:
                break
            assert torch.equal(torch.ops.alfish.product(a, right), expected)
        assert kernels.helper_counts().helped > before.helped


@pytest.mark.skipif(not matmul.suits_products(), reason="there is no kernel for this processor or torch")
def test_small_products_and_explicit_threads_have_no_helpers():
    assert matmul.has_products()
    a, large = torch.randn(64, 64), torch.randn(256, 256)
    try:
        kernels.use_helpers(1, adapts=False)
        before = kernels.helper_counts().calls
        torch.ops.alfish.product(a, a)
        torch.set_num_threads(2)
        torch.ops.alfish.product(large, large)
        assert kernels.helper_counts().calls == before
    finally:
        torch.set_num_threads(1)


def test_helpers_are_set_before_the_library_is_loaded(monkeypatch):
    class Library:
        def alfish_configure_helpers(self, number, adapts):
            self.configured = number, adapts

    monkeypatch.setattr(kernels, "_file", "")  # an earlier run of this process may have set it
    monkeypatch.setattr(kernels, "library", functools.cache(kernels.library.__wrapped__))
    kernels.use_helpers(5)
    assert kernels.helper_counts() == HelperCounts()
    monkeypatch.setattr(kernels, "_being_built", lambda: Library)
    assert kernels.library().configured == (5, True)
    kernels.use_helpers(2)
    assert kernels.library().configured == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(not matmul.suits_products(), reason="there is no kernel for this processor or torch")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_runs_are_bit_identical_on_any_number_of_cores(tmp_path):
    def train(name, num_threads, num_helpers):
        torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(256, 256)))
        trainer = Trainer(
            tmp_path / name,
            algorithm=functools.partial(DQN, q_network=functools.partial(QNetwork, torso=torso)),
            environment=functools.partial(make_environment, "CartPole-v1"),
            batches=functools.partial(ReplayBatches, capacity=500, batch_size=256, warmup_env_steps=300),
            learner=functools.partial(Learner, compile=True),
            listeners=[Summaries()],
            unroll_length=4,
            num_env_steps=400,
            summary_period=20,
            device="cpu",
            num_threads=num_threads,
        )
        kernels.use_helpers(num_helpers, adapts=False)
        trainer.train()
        assert not trainer.learner.is_plain
        with open(tmp_path / name / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert sum(bool(row["train/loss"]) for row in rows) > 3
        times = ("wall_seconds", "time/")
        return [{key: value for key, value in row.items() if not key.startswith(times)} for row in rows]

    alone = train("alone", 1, 0)
    before = kernels.helper_counts().helped
    assert train("auto", "auto", 2) == alone
    assert kernels.helper_counts().helped > before
