"""LeanRL's side of `benchmarks.throughput`: its script for SAC, with CUDA graphs if torch finds a GPU.

  git clone https://github.com/pytorch-labs/LeanRL benchmarks/peers/.leanrl

The script logs only to Weights & Biases, so a module that keeps the numbers takes the place of the package `wandb`. The
script is of September 2024: it needs a gymnasium before 1.0, HalfCheetah is version 4, CHANGES lets today's tensordict
run it, and its option --compile is left out, because the compiler of torch 2.13 fails on it.
"""

import runpy
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import script

SCRIPTS = Path(__file__).parents[1] / "peers" / ".leanrl" / "leanrl"
NUM_ENV_STEPS, WARMUP = 3_000, 1_000
# The module of the policy returns three tensors, which tensordict no longer accepts under one name; and its parameters
# require gradients with today's tensordict.
CHANGES = {
    'out_keys=["action"]': 'out_keys=["action", "log_prob", "mean"]',
    "actions = policy(obs)": "actions = policy(obs)[0].detach()",
}


def sac(seed: int) -> None:
    readings: list[script.Reading] = []
    returns: list[float] = []

    def log(numbers: dict[str, Any], step: int) -> None:  # every 100 steps after the first updates
        readings.append(script.read(step, step - WARMUP))
        returns.append(float(numbers["episode_return"]))

    has_gpu = torch.cuda.is_available()
    sys.modules["wandb"] = types.ModuleType("wandb")
    vars(sys.modules["wandb"]).update(init=lambda **_: None, log=log)
    options = {"seed": seed, "total-timesteps": NUM_ENV_STEPS + 1, "learning-starts": WARMUP, "buffer-size": 100_000}
    sys.argv[1:] = [f"--{name}={value}" for name, value in options.items()]
    sys.argv += ["--cudagraphs"] if has_gpu else ["--no-cuda"]
    path = SCRIPTS / "sac_continuous_action_torchcompile.py"
    if not path.is_file():
        raise SystemExit(f"there is no {path}; clone LeanRL as the docstring of {__file__} says")
    text = path.read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as directory:
        changed = Path(directory) / path.name
        changed.write_text(text)
        runpy.run_path(str(changed), run_name="__main__")
    script.report(readings[0], readings[-1], returns[-1], script.versions("torch", "torchrl", "tensordict"))


if __name__ == "__main__":
    script.main({"sac_halfcheetah": sac})
