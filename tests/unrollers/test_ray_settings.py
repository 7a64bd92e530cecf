"""What RayWorkers refuses before a cluster is asked, and parts of it that need none."""

import asyncio
import functools
import importlib
import importlib.util
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
from test_async import ALIKE, unroller_of

from alfish.data import StepType, TimeStep
from alfish.errors import RunError, UsageError
from alfish.processes.host import Greeting, Host, Order, Publication
from alfish.processes.messages import Died, Grant
from alfish.processes.shared_memory import Publications
from alfish.runs.stop_signals import Interrupted
from alfish.unrollers import Workers
from alfish.unrollers.ray import RayWorkers, cluster, ray_workers
from alfish.unrollers.ray.object_store import PublishedWeights
from alfish.unrollers.ray.remote_host import Actors, RemoteHost
from alfish.unrollers.workers.shared_tensors import Layout, form_of
from benchmarks.ray_runs import StampedRows

INSTALLED = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not INSTALLED, reason="the extra 'ray' is not installed")


def test_a_host_imports_no_torch_which_takes_seconds():
    code = "import sys, alfish.processes.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_extra_the_command_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"RayWorkers needs the extra 'ray': pip install 'alfish\[ray\]'"):
        RayWorkers(4)


@needs_ray
@pytest.mark.parametrize("count, nearest", [(7, "4 or 8"), (3, "4")])
def test_indivisible_worker_numbers_are_refused_with_the_nearest(count, nearest):
    with pytest.raises(UsageError, match=rf"num_workers is {count}, .*per_host = 4 does not divide; .* is {nearest}$"):
        RayWorkers(count)


@needs_ray
def test_the_log_states_that_hosts_step_the_environments():
    here, there = (unroller_of(ALIKE, num_workers=4, workers=one) for one in (Workers, RayWorkers))
    assert here.stepping == "in 4 workers on this machine" and there.stepping == "in 4 workers on a Ray cluster"


@needs_ray
def test_lockstep_takes_all_hosts():
    workers = functools.partial(RayWorkers, per_host=1, min_hosts=1)
    with pytest.raises(UsageError, match=r"RayWorkers.min_hosts requires AsyncUnroller.mode = 'free'"):
        unroller_of(ALIKE, num_workers=2, mode="lockstep", workers=workers)
    shrinking = functools.partial(RayWorkers, per_host=1, workers=functools.partial(Workers, on_failure="shrink"))
    with pytest.raises(UsageError, match=r"Workers.on_failure = 'shrink' requires"):
        unroller_of(ALIKE, num_workers=2, mode="lockstep", workers=shrinking)


@needs_ray
@pytest.mark.parametrize(
    "address, sentence",
    [
        ("127.0.0.1:1", r"no Ray cluster answers at .*'127.0.0.1:1' \(.*refused\); start its head with `RAY"),
        ("ray://127.0.0.1:1", "address of Ray Client; start the run on a machine of the cluster"),
    ],
)
def test_an_address_without_a_cluster_is_refused(monkeypatch, address, sentence):
    with pytest.raises(UsageError, match=sentence):
        cluster.Cluster(address, "same").connect()
    monkeypatch.setenv("RAY_ADDRESS", address)
    unroller = unroller_of(ALIKE, num_workers=1, workers=functools.partial(RayWorkers, per_host=1))
    with pytest.raises(UsageError, match=sentence):
        unroller.unroll(4)
    unroller.close()


@needs_ray
def test_a_cluster_that_asks_for_another_token_is_refused(monkeypatch):
    import ray

    class AuthenticationError(ray.exceptions.RayError):
        """As Ray 2.60 raises it."""

    def init(*_, **__):
        raise AuthenticationError("Token authentication is enabled but no authentication token was found")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "_check_address", lambda *_: None)
    words = (
        "requires a token that this machine does not have .Token authentication.*copy ~/.ray/auth_token from the head"
    )
    with pytest.raises(UsageError, match=words):
        cluster.Cluster("head:6379", "same").connect()


def test_a_machine_without_alfish_is_named():
    text = (
        "The actor died because of an error raised in its creation task, ray::Host.__init__() (pid=7, ip=10.0.0.9, x)\n"
    )
    error = ray_workers._unable(text + "  File ...\nModuleNotFoundError: No module named 'alfish'\n")
    assert str(error).startswith("the machine 10.0.0.9 of the Ray cluster cannot run a host of workers: ModuleNotFound")


def test_the_trainers_signal_handlers_stay_installed():
    received = []
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in (2, 15)}
    ours = signal.getsignal(signal.SIGTERM)

    def exits(number, frame):  # as Ray's handler does
        sys.exit(1)

    try:
        with cluster.handlers_kept():
            signal.signal(signal.SIGTERM, exits)
        assert signal.getsignal(signal.SIGTERM) is ours and received == []
        with pytest.raises(Interrupted), cluster.handlers_kept():
            signal.signal(signal.SIGTERM, exits)
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]  # the trainer saves, and stops
        with pytest.raises(ConnectionError), cluster.handlers_kept():
            raise ConnectionError
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("cause", [Interrupted, KeyboardInterrupt, ValueError])
def test_what_a_handler_raises_in_rays_code_is_raised(cause):
    with pytest.raises(SystemError if cause is ValueError else cause), cluster._exceptions_of_handlers():
        raise SystemError("returned a result with an exception set") from cause()


def test_modules_of_the_working_directory_are_sent(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text("x = 1\n")
    (tmp_path / "mine_whole" / "deep").mkdir(parents=True)
    (tmp_path / "mine_whole" / "__init__.py").write_text("")
    (tmp_path / "not_imported.py").write_text("")
    (tmp_path / "runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    importlib.import_module("mine_alone")
    importlib.import_module("mine_whole")
    assert cluster.modules_here() == [str(tmp_path / "mine_alone.py"), str(tmp_path / "mine_whole")]


def test_a_grant_names_the_process_that_it_is_meant_for():
    host = RemoteHost(1, 2)
    assert [worker.index for worker in host.workers] == [2, 3] and host.first == 2
    host.grant(host.workers[1], Grant(0, False, 5))
    host.workers[1].generation += 1
    host.grant(host.workers[1], Grant(1, False, 6))
    assert [order[:2] for order in host._orders] == [(1, 0), (1, 1)] and host.needs == 6
    host.leave()
    assert not host.has_orders and host.needs == 0
    assert [worker.generation for worker in host.workers] == [1001, 1001]
    host.grant(host.workers[0], Grant(0, False, None))
    assert host._orders[0][:2] == (0, 0)  # a new actor counts from 0


class StubPool:
    """What a host asks of its pool."""

    def __init__(self):
        self.all = [types.SimpleNamespace(index=0, generation=1)]
        self.granted = []

    def grant(self, worker, grant):
        self.granted.append(grant.slot)

    def wait(self, timeout):
        return iter(())


@pytest.fixture
def host():
    """A host whose workers are no processes."""
    host = Host()
    host._pool, host._weights = StubPool(), Publications(2)
    host._weights.publish(np.zeros(2, np.int64), 3, 0)
    return host


def test_a_host_drops_grants_for_a_process_that_has_died(host):
    host._orders = [Order(0, 0, Grant(5, False, None)), Order(0, 1, Grant(6, False, None))]
    host._grant()
    assert host._pool.granted == [6] and host._orders == []


def test_a_host_drops_outdated_weights(host):
    read = []
    for number in (4, 6, 5, 4):
        host._published = [(Publication(number, 10 * number), np.full(2, number))]
        host._publish()
        read.append((host._weights.read(host._weights.newest), host._weights.own.tolist()))
    assert read == [(40, [4, 4]), *[(60, [6, 6])] * 3] and host._weights.newest == 6


def test_a_grant_waits_for_the_weights_that_it_names(host):
    """Ray may deliver a call with large weights after calls that were made later."""
    host._orders = [Order(0, 1, Grant(slot, False, number)) for slot, number in [(5, 4), (6, 5), (7, None)]]
    granted = []
    for published in ([], [5], [4]):
        host._published = [(Publication(number, 10 * number), np.full(2, number)) for number in published]
        host._publish()
        host._grant()
        granted.append(list(host._pool.granted))
    assert granted == [[7], [7, 6], [7, 6, 5]] and host._orders == []
    assert (host._weights.read(4), host._weights.own.tolist()) == (40, [4, 4])
    assert (host._weights.read(), host._weights.own.tolist()) == (50, [5, 5]) and host._weights.newest == 5


def test_an_idle_host_ends_itself(host, monkeypatch):
    class Ended(Exception):
        pass

    def end(self):
        raise Ended

    monkeypatch.setattr(Host, "_end", end)

    async def attend():
        host._called_at, host._patience = host._now, 0.5
        attending = asyncio.create_task(host._attend())
        for _ in range(5):
            await asyncio.sleep(0.2)
            await host.keep()
        assert not attending.done()
        with pytest.raises(Ended):
            await asyncio.wait_for(attending, 30)

    asyncio.run(attend())


class FakeActor:
    """An actor, its class and its method; a greeting is a text."""

    requested: list["FakeActor"] = []

    @classmethod
    def remote(cls):
        cls.requested.append(cls())
        return cls.requested[-1]

    @property
    def greet(self):
        return types.SimpleNamespace(remote=lambda program: f"greeting {self.requested.index(self)}")


@pytest.fixture(autouse=True)
def no_actors():
    FakeActor.requested.clear()


def test_without_spares_an_actor_is_requested_when_one_is_needed():
    actors = Actors(0)
    actors.actor_class = FakeActor
    actors.replenish()
    assert FakeActor.requested == []
    assert actors.take() == (FakeActor.requested[0], "greeting 0")


def test_spares_are_used_in_order_and_end_with_the_run(monkeypatch):
    killed = []
    monkeypatch.setattr(cluster, "kill", killed.append)
    actors = Actors(2)
    actors.actor_class = FakeActor
    for _ in range(2):
        actors.replenish()
    assert len(FakeActor.requested) == 2
    assert [actors.take()[1] for _ in range(3)] == ["greeting 0", "greeting 1", "greeting 2"]
    actors.replenish()
    actors.close()
    assert killed == FakeActor.requested[:2:-1]


@pytest.fixture
def on_ray(monkeypatch):
    """A pool of two hosts that were requested, without Ray."""
    monkeypatch.setattr(RemoteHost, "kill", lambda host: None)
    made = RayWorkers(2, per_host=1, max_deaths=2, start_timeout=0.1)
    made._actors.actor_class, made.lines = FakeActor, []
    made.log = made.lines.append
    for host in made.hosts:
        host.asked_at, host.newest, host.is_overdue = time.monotonic(), 1, False
        host.greeting = Greeting("a", 7, {})
    return made


@needs_ray
def test_a_host_is_given_up_after_two_silent_checks(on_ray):
    host = on_ray.hosts[0]
    assert list(on_ray._check(host)) == []
    host.asked_at -= 31
    assert list(on_ray._check(host)) == []  # its answer may be on the way, if the trainer was stopped
    host.workers[0].started = True
    assert list(on_ray._check(host)) == [(host.workers[0], Died())]
    assert on_ray.lines == ["host 0 on a is dead: it has been silent for 31 s\nAnother one is requested"]
    assert not host.workers[0].started and host.workers[0].generation == 1000 and on_ray.num_restarts == 1
    host.asked_at -= 100
    assert list(on_ray._check(host)) == []  # it waits for room


@needs_ray
def test_spares_replace_dead_hosts_after_all_hosts_have_begun(on_ray, monkeypatch):
    monkeypatch.setattr(RemoteHost, "begin", lambda host, greeting, *weights: setattr(host, "greeting", greeting))
    on_ray._actors._num_spares, on_ray._plan = 1, None
    on_ray._weights = types.SimpleNamespace(publication=None, words=lambda: None)
    first, second = on_ray.hosts
    first.greeting = None
    on_ray._begin(second, Greeting("a", 8, {}))
    assert FakeActor.requested == [], "a spare could take the room of the first host"
    on_ray._begin(first, Greeting("a", 9, {}))
    assert len(FakeActor.requested) == 1
    list(on_ray._on_death(second, OSError("gone")))
    assert second.answer == "greeting 0" and len(FakeActor.requested) == 1, "the next spare comes when it has begun"
    on_ray._begin(second, Greeting("a", 10, {}))
    assert len(FakeActor.requested) == 2


@needs_ray
def test_one_death_of_a_host_too_many_ends_the_run(on_ray):
    for _ in range(2):
        assert len(list(on_ray._on_death(on_ray.hosts[1], OSError("gone")))) == 1
    with pytest.raises(RunError, match=r"host 1 is dead: gone\nThat is death 3 of hosts .*RayWorkers.max_deaths = 2"):
        list(on_ray._on_death(on_ray.hosts[1], OSError("gone")))


@needs_ray
def test_a_start_without_room_ends_with_what_was_asked_for(on_ray):
    on_ray.hosts[1].greeting = None
    on_ray._deadline = time.monotonic() + 100
    on_ray._check_start()
    on_ray._deadline = time.monotonic() - 1
    with pytest.raises(RunError, match=r"1 hosts of 1 CPUs answered .* = 0.1 s, but the run needs 2"):
        on_ray._check_start()


def test_part_of_a_plan_has_the_seeds_of_the_whole():
    unroller = unroller_of(ALIKE, num_workers=4, stagger=8)
    plan = unroller._plan(first_generation=0, policies=b"", slot_words=0)
    part = plan.part(2, 2, 0)
    assert part.num_slots == plan.num_slots // 2
    for place in range(2):
        whole, own = plan.setup(2 + place, 0), part.setup(place, 0)
        assert (own.seed, own.first_env_id, own.starts) == (whole.seed, whole.first_env_id, whole.starts)
    successor = plan.part(2, 2, 1000).setup(0, 0)
    assert successor.seed == plan.setup(2, 1000).seed and not any(successor.starts)
    unroller.close()


def test_published_weights_do_not_change_with_the_tensors():
    tensors = [torch.arange(3.0), torch.tensor([[1, 2]]), torch.zeros(0), torch.tensor(2.0, dtype=torch.bfloat16)]
    weights = PublishedWeights(tensors)
    weights.publish(7)
    assert weights.publication == (1, 7)
    words = weights.words().copy()
    tensors[0].fill_(9)
    again = weights.words()
    assert (again == words).all()
    leaves = Layout([form_of(tensor) for tensor in tensors]).split(words)
    assert [leaf.tolist() for leaf in leaves] == [[0.0, 1.0, 2.0], [[1, 2]], [], 2.0]
    weights.publish(8)
    assert weights.publication == (2, 8) and not (weights.words() == words).all()


@pytest.mark.parametrize("wrong", ["lost", "doubled", "torn", "late"])
def test_the_soak_can_fail(wrong):
    types = [StepType.FIRST, StepType.MID, StepType.MID, StepType.LAST, StepType.FIRST, StepType.MID]
    stamps = np.array([[7, 0, 0], [7, 0, 1], [7, 0, 2], [7, 0, 3], [7, 1, 0], [7, 1, 1]], float)[:, None]

    def step(rows):
        kinds = np.array(types)[rows][:, None]
        return TimeStep(kinds, stamps[rows][:, :, 2], None, stamps[rows], None, None)

    right = StampedRows(1)
    assert right.add(step([0, 1])) == [0] and right.add(step([2, 3, 4, 5])) == [] and right.count == 6
    rows = StampedRows(1)
    rows.add(step([0, 1, 2]))
    with pytest.raises(AssertionError):
        if wrong == "late":
            other = step([0])
            rows.add(other._replace(observation=other.observation + [1, 0, 0]))
            rows.add(step([3]))
        else:
            rows.add(step({"lost": [4], "doubled": [2, 3], "torn": [5]}[wrong]))
