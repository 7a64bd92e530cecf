"""Confs and runs are read where gin has other libraries' names too, as of torch's classes."""

import importlib
import subprocess
import sys
import warnings

import gin
import pytest
from gin.selector_map import SelectorMap

import alfish
from alfish.__main__ import main
from alfish.configuration import locating, reading
from alfish.errors import UsageError

MODULE = "gin.torch.external_configurables"
CONFS = sorted(path.name for path in locating.confs_directory().glob("*.gin"))


@pytest.fixture
def torchs_names(monkeypatch):
    """Registers what `gin.torch.external_configurables` does, for one test."""
    for name in CONFS:
        reading.read([name], [])  # which imports what registers itself; at the end it would be forgotten
    monkeypatch.setattr(gin.config, "_INVERSE_REGISTRY", gin.config._INVERSE_REGISTRY.copy())
    for name in ("_REGISTRY", "_CONSTANTS"):
        copied = SelectorMap()
        for selector, value in getattr(gin.config, name).items():
            copied[selector] = value
        monkeypatch.setattr(gin.config, name, copied)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about classes that it deprecates
        importlib.import_module(MODULE)
    yield
    monkeypatch.undo()
    sys.modules.pop(MODULE, None)


def test_confs_can_be_read_with_gins_torch_names(torchs_names):
    for name in CONFS:
        reading.read([name], [])
        assert gin.config_str(), name
    words = "^Adam.eps=1e-3: Adam is torch.optim.Adam or alfish.learner.optimizers.Adam; write which one you mean"
    with pytest.raises(UsageError, match=words):
        reading.read(["ppo_cartpole.gin"], ["Adam.eps=1e-3"])
    reading.read(["ppo_cartpole.gin"], ["optimizers.Adam.eps=1e-3", "torch.optim.Adam.lr=0.1"])


def test_a_run_is_opened_after_ambiguous_names_were_registered(tmp_path, request):
    settings = [
        *("Trainer.num_env_steps=64", "Trainer.unroll_length=8", "Trainer.listeners=[@CheckpointSaver()]"),
        *("MLP.layers=(4,)", "EpochBatches.num_epochs=1", "EpochBatches.minibatch_size=16"),
    ]
    parameters = [f"--gin_param={one}" for one in settings]
    assert main(["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path / 'run'}", *parameters]) == 0
    assert "\nAdam.eps = 1e-05" in (tmp_path / "run" / "config.gin").read_text()
    request.getfixturevalue("torchs_names")
    assert alfish.load(tmp_path / "run").env_steps == 64
    mine = tmp_path / "mine.gin"
    mine.write_text(f"import {MODULE}\ninclude 'ppo_cartpole.gin'\nLearner.optimizer = @optimizers.Adam\n")
    assert main(["train", f"--gin_file={mine}", f"--root_dir={tmp_path / 'own'}", *parameters]) == 0
    assert "optimizers.Adam.eps = 1e-05" in (tmp_path / "own" / "config.gin").read_text()
    assert alfish.load(tmp_path / "own").env_steps == 64


@pytest.mark.long
def test_configurations_do_not_change_if_gins_names_of_torch_are_imported_first():
    script = f"import {MODULE}\nfrom alfish.configuration import reading\nfor name in {CONFS}: reading.read([name], [])"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=120).returncode == 0
