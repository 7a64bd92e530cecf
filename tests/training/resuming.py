"""Stopping a run, and comparing all that it is with another run, bit for bit."""

import torch

from alfish import nest


def stop_after(trainer, num_iterations):
    """Runs `num_iterations` iterations and saves, as an interrupted run does."""
    trainer.start()
    for report in trainer.iterate():
        if report.iterations == num_iterations:
            break
    trainer.save()
    trainer.close()
    return trainer


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
