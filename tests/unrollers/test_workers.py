"""Parts of the asynchronous unroller by themselves: weights, limits, deaths."""

import os
import socket
import time
import types

import pytest
import torch

from alfish.environments import make_environment
from alfish.errors import RunError
from alfish.parameters import description
from alfish.processes.channel import Channel
from alfish.processes.messages import Died, EnvironmentFailed, Grant, Seconds, Segment, Started
from alfish.processes.shared_memory import Heartbeat
from alfish.unrollers import Workers
from alfish.unrollers.workers.environment_maker import EnvironmentMaker
from alfish.unrollers.workers.shared_tensors import Block, SharedWeights


def reading(board, reader, meanwhile):
    """A reader's board that calls `meanwhile` when it has taken a half of what it reads for the first time."""
    own = SharedWeights([reader], *map(os.dup, board.fds))
    calls = []

    def take(k):
        source, target = board._publications._whole[k], own._publications._taken
        half = len(source) // 2
        target[:half] = source[:half]
        if not calls:
            meanwhile()
        calls.append(k)
        target[half:] = source[half:]

    own._publications._take = take
    return own


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_weights_overwritten_during_a_read_are_read_again(times):
    weights, reader = torch.zeros(2), torch.ones(2)
    board = SharedWeights([weights])
    board.publish(0)

    def publish():
        for _ in range(times):
            weights.add_(1)
            board.publish(int(weights[0]))

    version = reading(board, reader, publish).read()
    assert reader.tolist() == [version] * 2
    assert version == (0 if times < 2 else times)


@pytest.mark.parametrize("late", ["all of it", "the first half", "the second half"])
def test_weights_that_become_visible_after_their_number_are_waited_for(late):
    """As on processors that show a writer's words in another order than it has written them."""
    weights, reader = torch.zeros(2), torch.ones(2)
    board = SharedWeights([weights])
    for version in (10, 11, 12):
        weights.fill_(version)
        board.publish(version)
    words = board._publications._whole[3 % 2]
    new = words.copy()
    SharedWeights.publish(old := SharedWeights([torch.full((2,), 10.0)]), 10)
    half = len(words) // 2
    part = {"all of it": slice(None), "the first half": slice(half), "the second half": slice(half, None)}[late]
    words[part] = old._publications._whole[1][part]
    takes = []
    own = SharedWeights([reader], *map(os.dup, board.fds))

    def take(k):
        takes.append(k)
        own._publications._taken[:] = board._publications._whole[k]
        words[:] = new  # has arrived for the next time

    own._publications._take = take
    assert own.read() == 12 and reader.tolist() == [12, 12] and takes == [1, 1]


def test_a_publication_that_is_named_is_read_or_refused():
    weights = torch.zeros(2)
    board = SharedWeights([weights])
    for version in (10, 11):
        board.publish(version)
    reader = torch.ones(2)
    other = SharedWeights([reader], *map(os.dup, board.fds))
    assert (other.read(1), other.read(2), board.newest) == (10, 11, 2)
    board.publish(12)
    with pytest.raises(LookupError, match="publication 1 has been overwritten"):
        other.read(1)


def test_a_publication_that_was_only_begun_is_not_the_newest():
    weights = torch.zeros(2)
    board = SharedWeights([weights])
    board.publish(5)

    board._tensors = [types.SimpleNamespace()]  # nothing that could be copied
    with pytest.raises(TypeError):
        board.publish(6)
    reader = torch.ones(2)
    assert SharedWeights([reader], *map(os.dup, board.fds)).read() == 5 and reader.tolist() == [0, 0]


def test_copies_in_a_block_do_not_overlap():
    forms = [((3,), torch.int32), ((), torch.float32), ((2, 0), torch.int64), ((5,), torch.uint8)]
    block = Block(forms, 3)
    leaves = [leaf for copy in block.copies for leaf in copy]
    for k, leaf in enumerate(leaves):
        leaf.fill_(k)
    assert all((leaf == k).all() for k, leaf in enumerate(leaves))
    assert [(tuple(leaf.shape), leaf.dtype) for leaf in block.copies[1]] == forms


SEGMENT = Segment(0, 0, 0, 0, [5], [[]], Seconds(0, 0, 0, 0))
FILL = Grant(0, False, None)


def kinds(messages):
    return [type(message) for _, message in messages]


@pytest.fixture
def one():
    """Workers of which there is one, that is no process."""
    made = []

    def make(**settings):
        workers = Workers(1, **settings)
        (worker,) = workers.all
        ours, theirs = socket.socketpair()
        worker.channel, worker.peer, worker.failure, worker.alive = Channel(ours), Channel(theirs), None, True
        worker.killed = 0

        def kill():
            worker.killed += 1

        worker.process, worker.kill = types.SimpleNamespace(poll=lambda: None, lost_server=None), kill
        worker.end = lambda timeout: -9
        worker.stacks = lambda: "here"
        workers.log = lambda text: None
        workers._selector.register(worker.channel, 1, worker)
        made.append(workers)
        return workers, worker

    yield make
    for workers in made:
        (worker,) = workers.all
        worker.alive = False
        worker.channel.close()
        worker.peer.close()
        workers.close()


def die(workers, worker):
    """What a death is answered by: seconds until the next start."""
    assert kinds(workers._on_death(worker)) == [Died]
    workers._selector.register(worker.channel, 1, worker)
    return worker.retry_at - time.monotonic()


def test_a_failing_worker_is_restarted_with_growing_delay(one):
    workers, worker = one(max_deaths=5000)
    delays = [die(workers, worker) for _ in range(9)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10], abs=0.05)
    worker.grant(FILL)
    worker.peer.send(SEGMENT)
    assert list(workers._receive(worker)) == [(worker, SEGMENT)]
    assert die(workers, worker) == pytest.approx(0.1, abs=0.05)
    worker.failures_in_row = 3000
    assert die(workers, worker) == pytest.approx(10, abs=0.05)


def test_deaths_long_ago_do_not_count(one):
    workers, worker = one(max_deaths=1, death_window=0.2)
    for _ in range(3):
        die(workers, worker)
        time.sleep(0.25)
    die(workers, worker)
    with pytest.raises(RunError, match="death 2 of workers within 0.2 s"):
        die(workers, worker)


def test_deaths_with_the_forking_process_count_once(one):
    workers, worker = one(max_deaths=2)
    die(workers, worker)
    for _ in range(3):
        worker.process.lost_server = 17
        die(workers, worker)
    worker.process.lost_server = 18  # the next one
    with pytest.raises(RunError, match="ended with the process 18 that forks workers\nThat is death 3 of workers"):
        die(workers, worker)


@pytest.mark.parametrize(
    ("activity", "is_limited"),
    [
        (Heartbeat.IDLE, False),
        (Heartbeat.STARTING, True),
        (Heartbeat.RESETTING, True),
        (Heartbeat.STEPPING, True),
        (Heartbeat.ACTING, True),
    ],
)
def test_each_activity_has_its_limit(one, activity, is_limited):
    workers, worker = one(start_timeout=0.01, step_timeout=0.01)
    worker.heartbeat.set(activity)
    time.sleep(0.02)
    assert list(workers._check(worker)) == [] and worker.killed == 0  # it is looked at twice
    assert kinds(workers._check(worker)) == [Died] * is_limited
    assert worker.killed == is_limited


def test_a_worker_that_ignores_a_slot_is_overdue(one):
    """A process that is frozen while it waits for the trainer, where other workers give rows enough."""
    workers, worker = one(step_timeout=0.01)
    lines = []
    workers.log = lines.append
    worker.heartbeat.set(Heartbeat.IDLE)
    worker.heartbeat._words[1] -= 3600 * 10**9
    worker.grant(FILL)
    assert worker.activity()[1] < 60 < worker.heartbeat.get()[1]  # from the grant on, not from the heartbeat
    time.sleep(0.02)
    assert list(workers._check(worker)) == [] and worker.killed == 0
    assert kinds(workers._check(worker)) == [Died] and worker.killed == 1
    assert "worker 0 has been about to fill a slot for" in lines[0]


def test_a_worker_with_full_slots_may_wait_forever(one):
    workers, worker = one(step_timeout=0.01)
    worker.grant(FILL)
    worker.grant(FILL)
    worker.heartbeat.set(Heartbeat.IDLE)
    for _ in range(2):
        worker.peer.send(SEGMENT)
    assert kinds(workers._receive(worker)) == [Segment, Segment]
    for _ in range(3):
        time.sleep(0.02)
        assert list(workers._check(worker)) == []
    assert worker.killed == 0


def test_a_worker_that_is_at_something_new_is_not_overdue(one):
    workers, worker = one(step_timeout=0.01)
    for _ in range(3):
        worker.heartbeat.set(Heartbeat.STEPPING)
        time.sleep(0.02)
        assert list(workers._check(worker)) == []
    assert worker.killed == 0


def test_split_messages_are_joined_and_incomplete_ones_ignored():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    whole, torn = socket.socketpair()
    Channel(whole).send(SEGMENT)
    data = torn.recv(1000)
    theirs.send(data[:5])
    assert channel.drain() == ([], False)
    theirs.send(data[5:] + data + data[:50])
    assert channel.drain() == ([SEGMENT] * 2, False)
    theirs.close()
    assert channel.drain() == ([], True)
    for end in (ours, whole, torn):
        end.close()


def test_messages_of_a_dead_worker_are_handled_first(one):
    workers, worker = one()
    lines = []
    workers.log = lines.append
    worker.grant(FILL)
    for message in (Started(1), SEGMENT, EnvironmentFailed("a reason", "for this reason\n")):
        worker.peer.send(message)
    worker.peer.close()
    assert kinds(workers.wait(1.0)) == [Started, Segment, Died]
    assert "worker 0 ended by SIGKILL:\nfor this reason\nIt is restarted" in lines
    assert worker.started and worker.failures_in_row == 1


def test_an_ended_worker_is_removed_despite_an_open_socket(one):
    workers, worker = one()
    worker.process.poll = lambda: -9
    worker.grant(FILL)
    worker.peer.send(SEGMENT)
    assert kinds(workers._check(worker)) == [Segment, Died]


def test_without_a_configuration_a_worker_needs_no_part_of_an_earlier_run(monkeypatch):
    monkeypatch.setitem(description._REGISTERED, "not_imported.Part", ("not_imported", "Part"))
    assert EnvironmentMaker(make_environment)() is make_environment
