"""The tutorials of docs/ show the files of examples/ as they are, and their commands run."""

import re

import pytest
import yaml
from test_examples import PROJECT

import alfish
from alfish.__main__ import main
from examples import swing_up

PAGES = PROJECT / "docs" / "tutorials"
SHOWN = {
    "environment": ["reach.py", "reach.gin"],
    "algorithm": ["reinforce.py"],
    "network": ["residual.py", "residual_cartpole.gin"],
    "data": ["swing_up.py"],
}
FEW = ("Trainer.num_env_steps=1024", "Evaluate.num_episodes=2")


def train(tmp_path, gin_file, *bindings):
    command = ["train", f"--gin_file={gin_file}", f"--root_dir={tmp_path / 'run'}"]
    return main([*command, *(f"--gin_param={binding}" for binding in bindings)])


@pytest.mark.parametrize("page", SHOWN)
def test_a_tutorial_shows_its_files_as_they_are(page):
    blocks = re.findall(r"^```(?:python|gin)\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    for name in SHOWN[page]:
        assert (PROJECT / "examples" / name).read_text() in blocks, name


def test_the_citation_has_the_present_version():
    assert yaml.safe_load((PROJECT / "CITATION.cff").read_text())["version"] == alfish.__version__


def test_an_environment_of_ones_own_is_checked_trained_in_and_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    assert main(["check-env", "--gin_file=examples/reach.gin"]) == 0
    assert re.search(r"^PPO +yes$", capsys.readouterr().out, re.MULTILINE)
    assert train(tmp_path, "examples/reach.gin", *FEW) == 0
    assert main(["evaluate", f"--root_dir={tmp_path / 'run'}", "--num_episodes=2"]) == 0


def test_a_network_of_ones_own_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    assert train(tmp_path, "examples/residual_cartpole.gin", *FEW, "Trainer.unroll_length=64") == 0
    assert "ResidualMLP.num_blocks = 1" in (tmp_path / "run" / "operative_config.gin").read_text()


def test_data_of_a_controller_are_imported_and_cloned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    swing_up.record("pendulum.npz", 8)
    assert main(["import", "--source=npz:pendulum.npz", "--env_id=Pendulum-v1", "--output=data/pendulum"]) == 0
    assert "8 episodes read, 8 kept" in capsys.readouterr().out
    few = ("OfflineBuffer.sources=['alfish:data/pendulum']", "Trainer.num_updates=20", "Evaluate.num_episodes=2")
    assert train(tmp_path, "bc_pendulum.gin", *few) == 0


def test_recorded_episodes_have_their_final_observation(tmp_path):
    swing_up.record(tmp_path / "pendulum.npz", 2)
    data = swing_up.np.load(tmp_path / "pendulum.npz")
    assert data["lengths"].tolist() == [200, 200] and len(data["observations"]) == 402 and len(data["actions"]) == 400
    env = swing_up.gymnasium.make("Pendulum-v1")
    for k in range(2):
        env.reset(seed=k)
        last = [env.step(action)[0] for action in data["actions"][200 * k : 200 * k + 200]][-1]
        swing_up.np.testing.assert_array_equal(data["observations"][201 * k + 200], last)


def test_the_controller_swings_the_pendulum_up():
    controlled = swing_up.controller
    assert abs(controlled(swing_up.np.array([1.0, 0.0, 0.0]))[0]) < 1e-6, "no torque where it stands upright"
    assert controlled(swing_up.np.array([-1.0, 0.0, 1.0]))[0] == 2, "it pushes where the pendulum moves"
