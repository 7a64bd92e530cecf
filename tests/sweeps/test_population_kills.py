"""Populations of real runs, whose controller and members are killed: they equal uninterrupted ones to the byte."""

import os
from pathlib import Path

import pytest
import torch
import toy_confs
from kills import assert_nothing_is_left, kill, progress, run

from alfish import nest
from alfish.runs.checkpoints import Checkpoints
from alfish.sweeps.population import BEST, CSV, MEMBER
from alfish.training.joint_population import CSV as JOINT_CSV

RATE = "--perturb=Learner.learning_rate=1e-4..1e-1"
COEF = "--perturb=PPO.entropy_coef=0.001..0.1"
LONGER = "Trainer.num_env_steps = 10000\nEvaluate.period = 1000\n"


def assert_equal(one, other):
    """The same members with the same parents, settings, evaluations, values and weights."""
    names = sorted(str(path.parent.relative_to(one)) for path in one.glob(f"g*/m*/{MEMBER}"))
    assert names == sorted(str(path.parent.relative_to(other)) for path in other.glob(f"g*/m*/{MEMBER}"))
    for name in names:
        texts = [
            {path.name: path.read_bytes() for path in (root / name / MEMBER, *(root / name / "eval").iterdir())}
            for root in (one, other)
        ]
        assert texts[0] == texts[1], name
        states = [Checkpoints(root / name / "checkpoints").load("latest") for root in (one, other)]
        assert states[0][0] == states[1][0]
        for part in ("algorithm", "transforms", "learner", "rng"):
            leaves = zip(*(nest.leaves(state[part]) for _, state in states), strict=True)
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in leaves), (name, part)
    assert (one / CSV).read_bytes() == (other / CSV).read_bytes()
    assert os.readlink(one / BEST) == os.readlink(other / BEST)


@pytest.mark.long
def test_a_killed_population_equals_an_uninterrupted_one(toy, tmp_path):
    flags = "--members=2", "--share=0.5", "--generations=2", "--jobs=2", RATE, COEF
    victims = kill("population", toy, tmp_path / "killed", 2, 6 * 1000, *flags)
    run("population", toy, tmp_path / "whole", *flags)
    assert_equal(tmp_path / "killed", tmp_path / "whole")
    assert len(victims) == 2
    assert_nothing_is_left(tmp_path / "killed")


@pytest.mark.long
@pytest.mark.parametrize(
    "text, flags",
    [
        (toy_confs.PPO + LONGER, ("--members=6", "--share=0.34", "--generations=5", "--last=2", COEF)),
        # With a replay that is saved and linked.
        (
            toy_confs.SAC,
            ("--members=4", "--share=0.25", "--generations=4", "--gap=0.5", "--perturb=SAC.gamma=0.5..0.99"),
        ),
    ],
    ids=["ppo", "sac"],
)
def test_a_population_killed_20_times_equals_an_uninterrupted_one(toy, tmp_path, text, flags):
    toy.write_text(text)
    flags = *flags, "--jobs=2", RATE
    run("population", toy, tmp_path / "whole", *flags)
    total = progress(tmp_path / "whole")
    victims = kill("population", toy, tmp_path / "killed", 20, total, *flags)
    assert_equal(tmp_path / "killed", tmp_path / "whole")
    assert len(victims) == 20 and set(victims) == {"controller", "members", "both"}
    assert_nothing_is_left(tmp_path / "killed")


@pytest.mark.long
def test_a_run_of_several_policies_killed_20_times_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    """The policies have replay, and are members of a population in the run."""
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_confs.__file__).parent))
    conf = tmp_path / "joint.gin"
    conf.write_text(toy_confs.JOINT_POPULATION)
    run("train", conf, tmp_path / "whole")
    victims = kill("train", conf, tmp_path / "killed", 20, progress(tmp_path / "whole"))
    assert victims == ["controller"] * 20
    states = [Checkpoints(tmp_path / name / "checkpoints").load("latest") for name in ("whole", "killed")]
    assert states[0][0] == states[1][0]
    for _, state in states:
        del state["counters"]["wall_seconds"]
    leaves = zip(*(nest.named_leaves(state, "state") for _, state in states), strict=True)
    for (name, one), (_, other) in leaves:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    tables = [(tmp_path / name / JOINT_CSV).read_bytes() for name in ("whole", "killed")]
    assert tables[0] == tables[1] and tables[0].count(b"\n") > 100
