"""docs/offline.md is run as it stands, block by block, in the order of the page."""

import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from test_alf import checkpoint

import alfish
from alfish.__main__ import main
from alfish.offline import OfflineBuffer, Spaces, open_source
from alfish.offline.recorded_spaces import NO_SPACES

PAGE = Path(alfish.__file__).parent.parent / "docs" / "offline.md"
LIBRARIES = {"minari": "minari", "h5py": "h5py", "stable_baselines3": "stable_baselines3", "d3rlpy": "d3rlpy",
             "pyarrow": "pyarrow"}  # fmt: skip

# Of what the page trains: the number of updates does not change the rows that are collected.
SMALL = ("MLP.layers = (8,)", "CriticEnsemble.layers = (8,)", "Evaluate.num_episodes = 1")
FEW_UPDATES = "--gin_param=ReplayBatches.updates_per_env_step = 0.1"
OF_ROBOMIMIC = Spaces(Dict(angle=Box(-1, 1, (2,)), speed=Box(-8, 8, (1,))), Box(-2, 2, (1,)))


def blocks():
    return re.findall(r"^```(python|sh)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def alf_checkpoint(path):
    """Writes the page's data as a checkpoint of ALF."""
    episodes = list(open_source("alfish:data/pendulum").episodes())
    columns = [
        {
            "time_step|step_type": np.concatenate([[0, *[1] * (e.length - 1), 2] for e in part]).astype(np.int32),
            "time_step|reward": np.concatenate([[0, *e.rewards] for e in part]).astype(np.float32),
            "time_step|discount": np.ones(sum(e.length + 1 for e in part), np.float32),
            "time_step|observation": np.concatenate([e.observations for e in part]),
            "action": np.concatenate([np.concatenate([e.actions, e.actions[:1]]) for e in part]),
        }
        for part in (episodes[:20], episodes[20:])
    ]
    path.parent.mkdir(parents=True)
    torch.save({"algorithm": checkpoint(columns, 1020)}, path)


def foreign_files():
    """Writes the page's data as robomimic and Tianshou store them."""
    h5py = pytest.importorskip("h5py")
    episodes = list(open_source("alfish:data/pendulum").episodes())
    with h5py.File("robomimic.hdf5", "w") as file:
        for e in episodes:
            demo = file.create_group(f"data/demo_{e.id}")
            demo["actions"], demo["rewards"], demo["dones"] = e.actions, e.rewards, e.terminated | e.truncated
            demo["obs/angle"], demo["next_obs/angle"] = e.observations[:-1, :2], e.observations[1:, :2]
            demo["obs/speed"], demo["next_obs/speed"] = e.observations[:-1, 2:], e.observations[1:, 2:]
    with h5py.File("tianshou.hdf5", "w") as file:
        for name, parts in (
            ("obs", [e.observations[:-1] for e in episodes]),
            ("obs_next", [e.observations[1:] for e in episodes]),
            ("act", [e.actions for e in episodes]),
            ("rew", [e.rewards for e in episodes]),
            ("terminated", [e.terminated for e in episodes]),
            ("truncated", [e.truncated for e in episodes]),
        ):
            file[name] = np.concatenate(parts)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    imported, skipping = [], False
    for language, text in blocks():
        if language == "python":
            needed = [name for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE) if name in LIBRARIES]
            skipping = any(importlib.util.find_spec(name) is None for name in needed)
            if not skipping:
                if "robomimic" in text:
                    foreign_files()
                exec(compile(text, "offline.md", "exec"), {"__name__": "__main__"})
            continue
        for line in text.splitlines():
            command, *arguments = shlex.split(line)
            if command != "alfish":
                continue
            if "alf:" in line:
                alf_checkpoint(tmp_path / "train/algorithm/ckpt-1000-replay_buffer")
            elif skipping or ("minari:" in line and importlib.util.find_spec("minari") is None):
                continue
            if arguments[0] == "train":
                arguments += [f"--gin_param={small}" for small in SMALL]
                arguments += [FEW_UPDATES] if "num_env_steps" in line else []
            assert main(arguments) == 0, capsys.readouterr().err
            imported += [argument.partition("=")[2] for argument in arguments if argument.startswith("--output=")]
        skipping = False
    sources = [name if name.startswith("minari:") else f"alfish:{name}" for name in imported]
    counts = {
        name: OfflineBuffer([source], spaces=OF_ROBOMIMIC if "robomimic" in name else NO_SPACES).num_starts()
        for name, source in zip(imported, sources)
    }
    expected = {
        "data/pendulum": 2000, "data/from_minari": 2000, "data/from_d4rl": 2000, "data/from_sb3": 600,
        "data/from_d3rlpy": 1960, "data/from_lerobot": 1960, "data/from_alf": 2000, "data/recorded": 2000,
        "minari:pendulum/recorded-v0": 2000, "data/from_robomimic": 2000, "data/from_tianshou": 2000,
    }  # fmt: skip
    of_replay = [name for name in counts if "replay" in name or name == "data/from_run"]
    kept = {counts.pop(name) for name in of_replay}
    assert len(kept) == 1 and kept.pop() > 1900
    assert counts == {name: expected[name] for name in counts} and "data/from_alf" in counts
