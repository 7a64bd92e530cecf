"""The sums that tell whether the bits of training are as they were; `make fingerprints` compares all confs."""

import pytest
import torch
from torch import nn

from alfish.bin.confs import read
from alfish.configuration.locating import confs_directory
from benchmarks import fingerprints
from benchmarks.tables import read_rows


def test_a_checksum_depends_only_on_bits():
    torch.manual_seed(0)
    a, b = nn.Linear(3, 2), nn.Linear(2, 3)
    total = fingerprints.digest(nn.ModuleDict({"a": a, "b": b}))
    assert fingerprints.digest(nn.ModuleList([b, a])) == total
    with torch.no_grad():
        a.bias[0] = torch.nextafter(a.bias[0], torch.tensor(1.0))
    assert fingerprints.digest(nn.ModuleDict({"a": a, "b": b})) != total


def test_the_table_has_each_conf_of_a_task():
    tasks = sorted(path.stem for path in confs_directory().glob("*.gin") if read(path).task)
    assert [row["conf"] for row in read_rows(fingerprints.TABLE)] == tasks


@pytest.mark.slow
def test_three_confs_train_with_the_same_bits_as_before(capsys):
    for name in ("ppo_cartpole", "dqn_cartpole", "sac_mountaincar_continuous"):
        status = fingerprints.main(["--check", name])
        printed = capsys.readouterr().out
        if "not compared" in printed:  # the rows of all three are of one machine
            pytest.skip(printed.splitlines()[0])
        assert status == 0, printed
        assert printed.count("equal") == 1


def test_one_policy_is_named_where_a_conf_has_several(tmp_path):
    asked = {
        name: fingerprints.settings(confs_directory() / f"{name}.gin", tmp_path) for name in ("ppo_tag", "ppo_cartpole")
    }
    assert asked["ppo_tag"]["policy"] == "chaser" and "policy" not in asked["ppo_cartpole"]
