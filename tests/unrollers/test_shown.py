"""What metrics see of observations and actions: the rows that arrived, whoever steps the environments."""

import functools

import numpy as np
import pytest
import worker_parts
from scripted import (
    DISABLED,
    FIRST,
    LAST,
    MID,
    NEXT_STEP,
    PAD,
    SAME_STEP,
    Scripted,
    ScriptedOffPolicy,
    recorded,
    unroller_of,
)
from toys import Stamped

from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.metrics import Metric, Metrics
from alfish.metrics.step_batch import StepBatch
from alfish.training.trainer import Trainer
from alfish.unrollers import AsyncUnroller
from alfish.unrollers.workers.transport import Workers


class Witness(Metric):
    """Checks that each row follows from the one before: the policy acts by what it sees (`observation.sum() % 3`)."""

    name = "witness"
    reads_observations = reads_actions = True

    def __init__(self):
        self._before = None
        self.num_checked = 0

    def update(self, rows):
        for t in range(len(rows.step_type)):
            for b in range(rows.num_envs):
                kind, observation, action = rows.step_type[t, b], rows.observation[t, b], rows.action[t, b]
                if kind == PAD:
                    continue
                before = None if self._before is None else self._before.get(b)
                self._before = {**(self._before or {}), b: observation}
                if kind == FIRST:
                    assert observation[2] == 0 and action == 0
                elif before is not None:
                    assert observation.tolist() == [*before[:2], before[2] + 1] and rows.reward[t, b] == observation[2]
                    assert action == int(before.sum()) % 3
                    self.num_checked += 1

    def result(self):
        return {self.name: float(self.num_checked)}

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
@pytest.mark.parametrize("algorithm", [Scripted, ScriptedOffPolicy])
def test_each_arrival_is_passed_once_with_its_action(mode, algorithm):
    unroller, metric = unroller_of(recorded(mode), algorithm), Witness()
    metrics = Metrics([metric], 3, flush_rows=10)
    unroller.shown = metrics.reads
    num_arrived = 0
    for length in (1 if mode == NEXT_STEP else 2, 4, 7, 3):
        unroller.unroll(length)
        arrived = unroller.records
        num_arrived += np.isin(arrived.step_type, (MID, LAST)).sum()
        metrics.update(*arrived)
    assert metrics.results() == {"witness": num_arrived} and num_arrived > 20


class NeverAtRandom(ReplayBatches):
    def acts_at_random(self, env_steps):
        return False


@pytest.mark.parametrize("algorithm", [worker_parts.Seeing, worker_parts.SeeingOffPolicy])
def test_workers_show_the_same(algorithm, tmp_path):
    metric = Witness()
    trainer = Trainer(
        tmp_path,
        algorithm=algorithm,
        environment=functools.partial(make_environment, Stamped, num_envs=2),
        unroller=functools.partial(
            AsyncUnroller, num_workers=2, mode="lockstep", workers=functools.partial(Workers, close_timeout=2.0)
        ),
        batches=EpochBatches if algorithm.on_policy else functools.partial(NeverAtRandom, batch_size=8),
        metrics=[metric],
        listeners=[],
        unroll_length=6,
        num_iterations=4,
        device="cpu",
    )
    trainer.train()
    trainer.metrics.results()
    assert metric.num_checked == trainer.clock.env_steps > 40


def test_nothing_is_kept_for_metrics_that_do_not_ask():
    unroller = unroller_of(recorded(NEXT_STEP))
    unroller.unroll(4)
    assert unroller.shown == () and unroller.records.observation is unroller.records.action is None
    rows = StepBatch(np.zeros((1, 1), np.int32), np.zeros((1, 1)))
    for name in ("observation", "action"):
        with pytest.raises(UsageError) as error:
            getattr(rows, name)
        assert str(error.value) == (
            f"a metric reads rows.{name}, which is stored only for metrics that declare it; set reads_{name}s = True "
            "in the metric's class"
        )
    with pytest.raises(ValueError, match=r"A metric reads rows\.observation, which update.. did not receive"):
        Metrics([Witness()], 1).update(np.zeros((1, 1), np.int32), np.zeros((1, 1)))
