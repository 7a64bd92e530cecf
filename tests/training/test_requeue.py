"""The jobs of docs/scale.md for SLURM and Kubernetes: a run whose job begins several times ends with the same bits."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import toy_confs
import yaml

import alfish
from alfish.__main__ import main
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.stop_signals import SIGNALS, exit_status

DOCUMENT = Path(alfish.__file__).parents[1] / "docs" / "scale.md"
TOY = f"""
{toy_confs.PPO}
Trainer.num_env_steps = 12_000
Trainer.transforms = [@ObservationNormalizer, @RewardNormalizer]
EpochBatches.num_epochs = 3
Learner.learning_rate = @Linear()
Linear.start = 3e-3
Evaluate.period = 2000
"""
# In the place of SLURM and of the command: what the script starts trains TOY in `run`, and requeueing is written down.
SCONTROL = '#!/bin/bash\necho "$@" >> requeued\n'
ALFISH = "#!/bin/bash\nexec {python} -m alfish train --gin_file=toy.gin --root_dir=run\n"


def block(language):
    """The only block of a language in the document."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return found


def starter(directory):
    """Returns a function that starts a command; its working directory is the given one."""
    (directory / "toy.gin").write_text(TOY)
    (directory / "job.sh").write_text(block("bash"))
    for name, text in (("scontrol", SCONTROL), ("alfish", ALFISH.format(python=sys.executable))):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    environment |= {"PYTHONPATH": str(DOCUMENT.parents[1]), "OMP_NUM_THREADS": "1"}

    def start(command):
        with open(directory / "output.txt", "ab") as output:
            return subprocess.Popen(
                command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    return start


@pytest.fixture
def start(tmp_path):
    """Function that starts a command; its working directory is `tmp_path`."""
    return starter(tmp_path)


@pytest.fixture
def job(start):
    """Function that starts the job of SLURM."""
    return lambda: start(["bash", "job.sh"])


class Kubernetes:
    """The job of Kubernetes, and what its controller makes of the end of a pod. Nothing of Kubernetes runs."""

    def __init__(self):
        job = yaml.safe_load(block("yaml"))
        assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
        self.rules, self.limit = job["spec"]["podFailurePolicy"]["rules"], job["spec"]["backoffLimit"]
        self.pod = job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        assert self.pod["restartPolicy"] == "Never"  # else the API refuses a podFailurePolicy

    def action(self, status, is_disrupted=False):
        """Complete, FailJob (no more pods), Ignore or Count (another pod; `limit` of those that are counted)."""
        if status == 0:
            return "Complete"
        conditions = {"DisruptionTarget"} if is_disrupted else set()
        for rule in self.rules:
            matches = any(pattern["type"] in conditions for pattern in rule.get("onPodConditions", ()))
            if codes := rule.get("onExitCodes"):
                assert codes["operator"] == "In"
                matches = status in codes["values"]
            if matches:
                return rule["action"]
        return "Count"


def newest(directory):
    return max(Checkpoints(directory / "checkpoints").steps(), default=0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Weights of a run that is not interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    (directory / "toy.gin").write_text(TOY)
    assert main(["train", f"--gin_file={directory / 'toy.gin'}", f"--root_dir={directory / 'run'}"]) == 0
    return weights(directory / "run")


def weights(directory):
    _, state = Checkpoints(directory / "checkpoints").load("latest")
    return {name: state[name] for name in ("algorithm", "transforms")}


def requeued(tmp_path, job, num_signals):
    """Weights of a run whose job gets SIGUSR1 so many times: one at once, others at random points of its progress."""
    draw = random.Random(num_signals)
    points = [None, *sorted(draw.uniform(0, 8000) for _ in range(num_signals - 1))]
    statuses = []
    for point in points:
        before, process = newest(tmp_path / "run"), job()
        if point is None:
            time.sleep(0.3)  # Python is starting
        else:
            while newest(tmp_path / "run") < max(point, before + 1):
                assert process.poll() is None, (tmp_path / "output.txt").read_text()
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.2))
        process.send_signal(signal.SIGUSR1)
        statuses.append(process.wait(60))
    assert set(statuses) <= {75, 138} and statuses.count(75) >= num_signals - 1
    assert (tmp_path / "requeued").read_text() == "requeue 17\n" * num_signals
    assert not (tmp_path / "run" / "done").exists()
    assert job().wait(600) == 0 and (tmp_path / "run" / "done").exists()
    assert (tmp_path / "requeued").read_text().count("\n") == num_signals
    return weights(tmp_path / "run")


@pytest.mark.parametrize(
    "num_signals", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)]
)
def test_a_requeued_job_ends_bit_identical(tmp_path, job, expected, num_signals):
    torch.testing.assert_close(requeued(tmp_path, job, num_signals), expected, rtol=0, atol=0)


@pytest.mark.long
def test_an_evicted_pod_saves_and_later_pods_continue_bit_for_bit(tmp_path, start, expected):
    kubernetes = Kubernetes()
    for point in (2000, 6000):
        process = start(kubernetes.container["command"])
        while newest(tmp_path / "run") < point:
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        status = process.wait(kubernetes.pod["terminationGracePeriodSeconds"])
        assert (status, kubernetes.action(status, is_disrupted=True)) == (143, "Ignore")
    assert kubernetes.action(start(kubernetes.container["command"]).wait(600)) == "Complete"
    torch.testing.assert_close(weights(tmp_path / "run"), expected, rtol=0, atol=0)


def test_a_kubernetes_job_continues_after_signals_but_not_after_mistakes():
    kubernetes = Kubernetes()
    for number in SIGNALS:
        assert kubernetes.action(exit_status(number)) == "Count" and kubernetes.limit > 10
    assert kubernetes.action(128 + signal.SIGKILL) == "Count"  # for lack of memory
    assert kubernetes.action(2) == kubernetes.action(1) == "FailJob"
    assert kubernetes.action(1, is_disrupted=True) == "Ignore"


def test_kubernetes_jobs_store_runs_on_a_volume():
    kubernetes = Kubernetes()
    (mount,), (volume,) = kubernetes.container["volumeMounts"], kubernetes.pod["volumes"]
    (root_dir,) = [word for word in kubernetes.container["command"] if word.startswith("--root_dir=")]
    assert root_dir.startswith(f"--root_dir={mount['mountPath']}/") and mount["name"] == volume["name"]


@pytest.mark.parametrize("status, is_requeued", [(0, 0), (1, 0), (2, 0), (143, 0), (75, 1), (138, 1)])
def test_only_exit_status_75_requeues_a_job(tmp_path, job, status, is_requeued):
    (tmp_path / "alfish").write_text(f"#!/bin/bash\nexit {status}\n")
    assert job().wait(60) == status
    assert (tmp_path / "requeued").exists() == is_requeued
