"""Commands start fast, because they import nothing slow before their first step. Imports are counted, not timed."""

import json
import os
import subprocess
import sys

import pytest

# Each takes more than 30 ms to import, and most of them a second.
SLOW = {
    "IPython", "PIL", "ale_py", "envpool", "h5py", "imageio_ffmpeg", "matplotlib", "minari", "mlflow", "onnx", "optuna",
    "pandas", "pygame", "ray", "scipy", "sklearn", "sympy", "tensorflow", "torch._dynamo", "torch._inductor",
    "torch.onnx", "trackio", "wandb",
}  # fmt: skip

# alfish's modules until the first step: 266. All modules: 1725 with mujoco when last counted.
MOST_OF_ALFISH, MOST_MODULES = 273, 1733

# Prints at the first step what has been imported, and ends the process.
UNTIL_FIRST_STEP = """
import json, os, sys
from alfish.__main__ import main
from alfish.environments.sequential import SequentialVectorEnv

def step(self, actions):
    print(json.dumps(sorted(sys.modules)), flush=True)
    os._exit(0)

SequentialVectorEnv.step = step
main(sys.argv[1:])
"""


def modules(code, *arguments):
    """Names of the modules that a program printed."""
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.stdout, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize("conf", ["ppo_cartpole", pytest.param("sac_halfcheetah", marks=pytest.mark.slow)])
def test_training_imports_no_slow_module_before_the_first_step(tmp_path, conf):
    if conf == "sac_halfcheetah":
        pytest.importorskip("mujoco")
    found = modules(UNTIL_FIRST_STEP, "train", f"--gin_file={conf}.gin", f"--root_dir={tmp_path / conf}")
    assert not found & SLOW
    assert ("mujoco" in found) == (conf == "sac_halfcheetah")
    ours = {name for name in found if name.startswith("alfish.")}
    assert not {name for name in ours if name.split(".")[1] in ("analysis", "sweeps", "exporting", "sharing")}
    assert len(ours) <= MOST_OF_ALFISH and len(found) <= MOST_MODULES


def test_help_imports_the_standard_library_only():
    code = (
        "import json, sys; from alfish.__main__ import main; main(['--help']); print(json.dumps(sorted(sys.modules)))"
    )
    found = modules(code)
    assert {name.split(".")[0] for name in found} <= {*sys.stdlib_module_names, "alfish", "__main__"} | site_modules()
    assert len(found) <= 110


def site_modules():
    """Modules that Python imports by itself, before any program."""
    return {name.split(".")[0] for name in modules("import json, sys; print(json.dumps(sorted(sys.modules)))")}
