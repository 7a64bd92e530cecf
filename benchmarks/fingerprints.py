"""Compares the bits of training with those of earlier code.

    python -m benchmarks.fingerprints                       # writes docs/results/fingerprints.csv
    python -m benchmarks.fingerprints --check               # compares with it; exit status 1 where bits differ
    python -m benchmarks.fingerprints --check ppo_cartpole  # one conf only

A row holds two SHA-256 sums of a shipped conf, seed 0: of the algorithm's parameters and buffers before training, and
after it. Training takes `NUM_STEPS` environment steps after warm-up, fewer where these are more than `MOST_UPDATES`
updates (`FEWER_UPDATES` has exceptions), or `NUM_STEPS` updates where a conf trains on recorded data (`recorded` makes
these, and `trained` an expert). Updates are plain. Names and order of tensors do not enter the sums, so that code may
be moved and renamed. Float operations give other bits on other processors and versions, so rows of another machine are
not compared.
"""

import argparse
import contextlib
import hashlib
import io
import json
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import alfish
from alfish.bin.confs import read
from alfish.configuration.locating import confs_directory
from alfish.offline import DataSetWriter, Episode, Spaces
from alfish.training.listener import Listener, Report, Run
from benchmarks.tables import read_rows, write_rows

TABLE = Path(__file__).parents[1] / "docs" / "results" / "fingerprints.csv"
FIELDS = ["conf", "clock", "updates", "initial", "trained", "machine"]
SUMS = "fingerprint.json"
NUM_STEPS = 2000
MOST_UPDATES = 4000  # from replay
# Networks that take long; `xqc_hopper` and `redq_pendulum` make 4000 updates of the same kinds.
FEWER_UPDATES = {"flashsac_halfcheetah": 400, "xqc_halfcheetah": 400, "redq_halfcheetah": 2000}
WARMUP = 200
NUM_EPISODES = 20  # of a data set
EPISODE_LENGTH = 50


class Fingerprint(Listener):
    """Writes the sums at the run's beginning and end into its directory."""

    def start(self, run: Run) -> None:
        self._initial = digest(run.algorithm)

    def after_iteration(self, run: Run, report: Report) -> None:
        if report.finished:
            sums = {"updates": str(report.updates), "initial": self._initial, "trained": digest(run.algorithm)}
            (run.directory.path / SUMS).write_text(json.dumps(sums))


def digest(module: nn.Module) -> str:
    """Returns a sum over the bits of all parameters and buffers, whatever their names and order."""
    tensors = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}.values()
    each = (f"{tensor.dtype} {list(tensor.shape)} {_bits(tensor)}" for tensor in tensors)
    return hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()[:16]


def _bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes()).hexdigest()


def machine() -> str:
    """Returns what bits depend on besides the code: processor and versions.

    Libraries choose products by the processor's model, also among those with the same instructions.
    """
    info = Path("/proc/cpuinfo")
    lines = (line.partition(":")[::2] for line in info.read_text().splitlines()) if info.is_file() else ()
    about = {name.strip(): value.strip() for name, value in lines}
    model = " ".join(about.get(name, "") for name in ("vendor_id", "cpu family", "model")).strip()
    versions = f"torch {torch.__version__}, numpy {np.__version__}"
    return f"{model or platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {versions}"


def recorded(env_id: str, directory: Path) -> str:
    """Writes episodes of random actions in an environment; returns the name of the source."""
    env = gymnasium.make(env_id, max_episode_steps=EPISODE_LENGTH)
    env.action_space.seed(0)
    with DataSetWriter(directory, Spaces(env.observation_space, env.action_space)) as writer:
        for k in range(NUM_EPISODES):
            first, steps, ended = env.reset(seed=k)[0], [], False
            while not ended:
                action = env.action_space.sample()
                observation, reward, terminated, truncated, _ = env.step(action)
                steps.append((observation, action, reward, terminated, truncated))
                ended = terminated or truncated
            observations, *others = zip(*steps)
            writer.add(Episode(str(k), np.array([first, *observations]), *map(np.array, others)))
        writer.finish({})
    env.close()
    return f"alfish:{directory}"


def trained(env_id: str, directory: Path) -> str:
    """Trains an expert for one iteration; returns its run's directory."""
    with contextlib.redirect_stderr(io.StringIO()):
        alfish.train("PPO", env_id, root_dir=directory, num_iterations=1, max_evaluation_length=EPISODE_LENGTH)
    return str(directory)


def settings(path: Path, directory: Path) -> dict[str, Any]:
    """Returns settings with which a conf trains early and for a short time."""
    text = _with_included(path)
    chosen: dict[str, Any] = {"seed": 0, "max_evaluation_length": EPISODE_LENGTH, "Evaluate.num_episodes": 1}
    chosen["Learner.compile"] = False
    if "@CompiledUnroller" in text:
        chosen["CompiledUnroller.compile"] = False
    env_id = next(iter(re.findall(r"make_environment.env_id = '([^']+)'", text)[::-1]), "")
    if policies := re.findall(r"^Trainer.policies = {'(\w+)'", text, re.MULTILINE):
        chosen["policy"] = policies[-1]  # which of them is returned has no effect on the bits
    if "@OfflineBuffer" in text:
        chosen["OfflineBuffer.sources"] = [recorded(env_id, directory / "data")]
    if "@saved_policy" in text:
        chosen["saved_policy.root_dir"] = trained(env_id, directory / "expert")
    if re.findall(r"^Trainer.batches = @(\w+)", text, re.MULTILINE)[-1:] == ["OfflineBatches"]:
        return chosen | {"num_updates": NUM_STEPS}
    if "@ReplayBatches" not in text:
        return chosen | {"num_env_steps": NUM_STEPS}
    replay = {"ReplayBatches.warmup_env_steps": WARMUP, "ReplayBatches.capacity": 10_000}
    if "ReplayBatches.offline_updates" in text:
        replay["ReplayBatches.offline_updates"] = WARMUP
    rate = float(*(re.findall(r"ReplayBatches.updates_per_env_step = ([\d.]+)", text)[-1:] or ["1"]))
    most = FEWER_UPDATES.get(path.stem, MOST_UPDATES)
    return chosen | replay | {"num_env_steps": WARMUP + min(NUM_STEPS, int(most / rate))}


def _with_included(path: Path) -> str:
    text = path.read_text()
    included = re.findall(r"^include '([^']+)'", text, re.MULTILINE)
    return "".join(_with_included(path.parent / name) for name in included) + text


def fingerprint(path: Path) -> dict[str, str]:
    """Trains a conf and returns its row of the table."""
    with tempfile.TemporaryDirectory() as directory:
        chosen = settings(path, Path(directory))
        clock = chosen.get("num_env_steps") or chosen["num_updates"]
        root_dir, printed = Path(directory) / "run", io.StringIO()
        with contextlib.redirect_stderr(printed):
            alfish.train(conf=str(path), root_dir=root_dir, extra_listeners=[Fingerprint()], **chosen)
        sums = json.loads((root_dir / SUMS).read_text())
    return {"conf": path.stem, "clock": str(clock), **sums, "machine": machine()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("confs", nargs="*", help="shipped confs by name; none: all")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(arguments)
    paths = {path.stem: path for path in sorted(confs_directory().glob("*.gin")) if read(path).task}
    if unknown := set(options.confs) - set(paths):
        parser.error(f"there is no conf {', '.join(sorted(unknown))}; there are {', '.join(paths)}")
    before = {row["conf"]: row for row in read_rows(TABLE)}
    differing = []
    for name in options.confs or paths:
        began = time.monotonic()
        row = fingerprint(paths[name])
        old = before.get(name)
        if not options.check:
            before[name] = row
            write_rows(TABLE, [before[one] for one in sorted(before) if one in paths], FIELDS)
            answer = "written"
        elif old is None or old["machine"] != row["machine"]:
            answer = f"not compared: the table has {old['machine'] if old else 'no row'}, and this is {row['machine']}"
        elif old == row:
            answer = "equal"
        else:
            differing.append(name)
            answer = "DIFFERS: " + ", ".join(
                f"{key} {old[key]} -> {row[key]}" for key in FIELDS if old[key] != row[key]
            )
        print(f"{name:<28} {time.monotonic() - began:6.1f} s  {answer}", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
