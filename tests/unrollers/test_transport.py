"""Another transport than processes: AsyncUnroller asks for no more than `Transport` has."""

import functools
import types

import pytest
import torch
from test_async import ALIKE, unroller_of
from worker_parts import Seeing, SeeingOffPolicy

from alfish import nest
from alfish.processes.channel import from_bytes
from alfish.processes.messages import Died, Seconds, Segment, Started
from alfish.unrollers import SyncUnroller, Workers
from alfish.unrollers.workers.transport import Transport


class InProcess(Transport):
    """Workers that are objects of this process. Each fills its slots when the trainer waits."""

    num_left = newest = 0

    def __init__(self, count):
        super().__init__()
        self.all = [types.SimpleNamespace(index=i, started=False, alive=True, generation=0) for i in range(count)]
        self.num_left = count
        self._published, self._granted, self._slots = {}, [], {}
        self.closed = 0

    def start(self, plan, forms, structure, tensors, version):
        self._plan, self._tensors = plan, tensors
        self.publish(version)
        for worker in self.all:
            self._build(worker)

    def _build(self, worker):
        setup = self._plan.setup(worker.index, worker.generation)
        policies, _ = from_bytes(self._plan.policies)
        ((algorithm, transforms),) = policies.networks()
        environment = from_bytes(self._plan.make_environment)()(seed=setup.seed)
        environment.env_id += setup.first_env_id
        worker.tensors = policies.tensors()
        worker.unroller = SyncUnroller(
            environment, algorithm.train(False), transforms, self._plan.stepping.numpy_policy
        )
        worker.unroller.shown, worker.sequence, worker.started = policies._shown, 0, False

    def publish(self, version):
        self.newest += 1
        self._published[self.newest] = version, [tensor.detach().clone() for tensor in self._tensors]

    def grant(self, worker, grant):
        self._granted.append((worker, grant))
        return True

    def wait(self, timeout):
        for worker in self.all:
            if not worker.started:
                worker.started = True
                yield worker, Started(worker.unroller.environment.num_envs)
        granted, self._granted = self._granted, []
        for worker, grant in granted:
            version, values = self._published[grant.publication or self.newest]
            with torch.no_grad():
                for tensor, value in zip(worker.tensors, values, strict=True):
                    tensor.copy_(value)
            experience = worker.unroller.unroll(self._plan.length, grant.at_random)
            versions = torch.full((experience.time_step.step_type.shape[1],), version)
            records = worker.unroller.records
            copy = nest.map(torch.clone, nest.tensors(experience))._replace(policy_version=versions)
            self._slots[grant.slot] = [(copy, records)]
            told = [len(records.step_type)], [records.infos], Seconds(0, 0, 0, 0)
            yield worker, Segment(worker.index, grant.slot, worker.sequence, version, *told)
            worker.sequence += 1

    def read(self, segment):
        return self._slots[segment.slot]

    def activities(self):
        return "all at once"

    def kill(self, worker):
        """What AsyncUnroller sees of a death and of the successor."""
        self._granted = [(other, grant) for other, grant in self._granted if other is not worker]
        worker.generation += 1
        self.num_restarts += 1
        self._build(worker)
        return worker, Died()

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("algorithm", [Seeing, SeeingOffPolicy])
def test_lockstep_is_bit_identical_to_local_processes(algorithm):
    unrolls = []
    for transport in (functools.partial(Workers, close_timeout=2.0), InProcess):
        unroller = unroller_of(ALIKE, algorithm, num_workers=2, mode="lockstep", workers=transport)
        rows = []
        for k in range(4):
            rows.append((nest.map(torch.clone, unroller.unroll(4)), unroller.records))
            unroller._algorithm.weight.data.fill_(k + 1)
            unroller.publish()
            unroller._ledger.check_valid()
            assert set(rows[-1][0].policy_version.tolist()) == {max(0, k - 1)}  # one iteration old, and no more
        unroller.close()
        unrolls.append(rows)
    for (here, arrived), (there, also) in zip(*unrolls, strict=True):
        assert all(map(torch.equal, nest.leaves(here), nest.leaves(there)))
        assert (arrived.step_type == also.step_type).all() and (arrived.reward == also.reward).all()


@pytest.mark.parametrize("algorithm", [Seeing, SeeingOffPolicy])
def test_a_reported_worker_death_releases_its_slots(algorithm):
    unroller = unroller_of(ALIKE, algorithm, num_workers=2, slots=3, workers=InProcess)
    transport = unroller._workers
    unroller.unroll(4)
    for _ in range(3):
        unroller._receive(*transport.kill(transport.all[0]))
        unroller._ledger.check_valid()
        unroller.unroll(4)
    assert unroller.stats()["restarts"] == 3 and unroller.state_dict()["generation"] == 3
    unroller.close()
    assert transport.closed == 1
