"""Stopping a run, and comparing all that it is with another run, bit for bit."""

import os
import signal

import torch

from alfish import nest
from alfish.__main__ import main
from alfish.training.trainer import Trainer


def stop_after(trainer, num_iterations):
    """Runs `num_iterations` iterations and saves, as an interrupted run does."""
    trainer.start()
    for report in trainer.iterate():
        if report.iterations == num_iterations:
            break
    trainer.save()
    trainer.close()
    return trainer


def run_killed_after_a_save(arguments):
    """Runs a command in a process that is killed when it has saved its first checkpoint."""
    process = os.fork()  # which has imported everything already
    if not process:
        save = Trainer.save

        def save_and_die(*arguments, **settings):
            save(*arguments, **settings)
            os.kill(os.getpid(), signal.SIGKILL)

        Trainer.save = save_and_die
        main(arguments)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL


def parameters(trainer):
    """Returns a copy of all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in trainer.algorithm.parameters()])


def tensors_of(trainer):
    """Returns the state of a run: everything but times, with its replay."""
    state = trainer.state_dict()
    names = ("algorithm", "transforms", "learner", "batches", "metrics", "unroller", "rng")
    kept = {name: state[name] for name in names}
    kept["counters"] = {name: value for name, value in state["counters"].items() if name != "wall_seconds"}
    if not trainer.algorithm.on_policy:
        kept["replay"] = trainer.batches.buffer.state_dict()
        kept["sampler"] = trainer.batches._collected.sampler.state_dict()
    return kept


def assert_same(one, other):
    assert nest.paths(one) == nest.paths(other)
    for path, a, b in zip(nest.paths(one), nest.leaves(one), nest.leaves(other)):
        equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert equal, f"{path}: {a} and {b}"
