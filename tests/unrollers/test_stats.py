"""What summaries say of asynchronous unrolling."""

import types

import pytest

from alfish.processes.messages import Seconds
from alfish.unrollers.workers.stats import Stats


def test_shares_cover_all_workers_since_the_previous_call():
    stats = Stats()
    stats.filled(Seconds(wait=1, env=2, policy=3, copy=0))
    stats.filled(Seconds(wait=1, env=0, policy=0, copy=1))
    stats.delivered([0, 3])
    stats.delivered([3])
    stats.masked(8)
    stats.masked(4)
    taken = stats.take()
    shares = [taken[f"worker_{name}_fraction"] for name in ("wait", "env", "policy", "copy")]
    assert shares == pytest.approx([2 / 8, 2 / 8, 3 / 8, 1 / 8])
    assert (taken["lag_min"], taken["lag_mean"], taken["lag_max"], taken["masked_rows"]) == (0, 2, 3, 12)
    assert all(type(value) is float for value in taken.values())
    nothing = {"worker_wait_fraction", "worker_env_fraction", "worker_policy_fraction", "worker_copy_fraction"}
    assert stats.take() == dict.fromkeys(nothing | {"trainer_wait_fraction", "masked_rows"}, 0.0)


def test_trainer_waiting_is_a_share_of_the_time_between_calls(monkeypatch):
    now = 100.0
    monkeypatch.setattr("alfish.unrollers.workers.stats.time", types.SimpleNamespace(perf_counter=lambda: now))
    stats = Stats()
    stats.waited(1.0)
    stats.waited(0.5)
    now = 106.0
    assert stats.take()["trainer_wait_fraction"] == pytest.approx(0.25)
    stats.waited(1.0)
    now = 108.0
    assert stats.take()["trainer_wait_fraction"] == pytest.approx(0.5)
