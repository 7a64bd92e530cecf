import math

import pytest
import torch

from alfish.parameters.schedules import Constant, Cosine, Cyclical, Exponential, Linear, Steps, as_schedule

SCHEDULES = {
    "constant": Constant(0.3),
    "linear": Linear(1.0, 0.1),
    "linear, part of the way": Linear(0.5, -1.0, begin=0.25, finish=0.75),
    "exponential": Exponential(1e-2, 1e-5),
    "cosine": Cosine(3e-4, 1e-5),
    "steps": Steps([1.0, 0.1, 0.01], [0.5, 0.8]),
    "cyclical": Cyclical(Linear(1.0, 0.2), 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_float_and_tensor_agree(name):
    schedule = SCHEDULES[name]
    for progress in (0.0, 0.1, 0.25, 0.5, 0.79, 0.8, 1.0):
        on_host = schedule(progress)
        assert isinstance(on_host, float)
        on_device = schedule(torch.tensor(progress, dtype=torch.float64))
        assert torch.as_tensor(on_device).ndim == 0
        assert float(on_device) == pytest.approx(on_host, rel=1e-6, abs=1e-9), progress


@pytest.mark.parametrize(
    ("name", "start", "middle", "end"),
    [
        ("constant", 0.3, 0.3, 0.3),
        ("linear", 1.0, 0.55, 0.1),
        ("linear, part of the way", 0.5, -0.25, -1.0),
        ("exponential", 1e-2, math.sqrt(1e-7), 1e-5),
        ("cosine", 3e-4, 1.55e-4, 1e-5),
        ("steps", 1.0, 0.1, 0.01),
        ("cyclical", 1.0, 0.6, 0.2),
    ],
)
def test_values_at_start_middle_and_end(name, start, middle, end):
    assert [SCHEDULES[name](p) for p in (0.0, 0.5, 1.0)] == pytest.approx([start, middle, end])


def test_linear_is_flat_outside_its_range():
    schedule = SCHEDULES["linear, part of the way"]
    assert [schedule(p) for p in (0.0, 0.2, 0.25)] == pytest.approx([0.5, 0.5, 0.5])
    assert [schedule(p) for p in (0.75, 0.9, 1.0)] == pytest.approx([-1, -1, -1])


@pytest.mark.parametrize("name", ["linear", "exponential", "cosine", "cyclical"])
def test_progress_outside_the_run_is_clipped(name):
    schedule = SCHEDULES[name]
    assert schedule(-0.5) == pytest.approx(schedule(0.0))
    assert float(schedule(torch.tensor(1.5))) == pytest.approx(schedule(1.0))


def test_a_step_schedule_changes_at_its_boundary():
    schedule = SCHEDULES["steps"]
    assert [schedule(p) for p in (0.499, 0.5, 0.799, 0.8)] == [1, 0.1, 0.1, 0.01]


def test_each_cycle_is_the_whole_schedule():
    schedule = SCHEDULES["cyclical"]
    assert [schedule(p) for p in (0, 1 / 6, 0.999 / 3)] == pytest.approx([1, 0.6, 0.2], abs=1e-3)
    assert [schedule(p) for p in (1.001 / 3, 0.5, 0.6666, 0.6667)] == pytest.approx([1, 0.6, 0.2, 1], abs=3e-3)


def test_numbers_become_constant_schedules():
    assert as_schedule(0.25)(0.7) == 0.25
    assert as_schedule(SCHEDULES["linear"]) is SCHEDULES["linear"]


def test_a_schedule_does_not_depend_on_earlier_calls():
    schedule = Linear(1.0)
    before = [schedule(p) for p in (0.2, 0.9)]
    for _ in range(20):
        schedule(0.5)
    assert [schedule(p) for p in (0.2, 0.9)] == before


@pytest.mark.parametrize(
    "build",
    [
        lambda: Linear(1.0, begin=0.5, finish=0.5),
        lambda: Linear(1.0, finish=1.5),
        lambda: Linear(1.0, begin=-0.1),
        lambda: Exponential(0.0, 1.0),
        lambda: Exponential(1.0, -1.0),
        lambda: Steps([1.0], [0.5]),
        lambda: Steps([1.0, 2.0, 3.0], [0.8, 0.5]),
    ],
)
def test_impossible_settings_are_refused(build):
    with pytest.raises(ValueError, match="needs|must be"):
        build()
