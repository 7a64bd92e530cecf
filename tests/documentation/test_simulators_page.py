"""docs/simulators.md: its configurations train, on stand-ins for the simulators."""

import functools
import re
import textwrap

import gin
import pytest
from fake_libraries import (
    TASK,
    FakeRslRl,
    install_isaac_lab,
    install_mani_skill,
    install_mjlab,
    install_uni_lab,
    module,
)
from test_examples import PROJECT

from alfish.__main__ import main

PAGE = (PROJECT / "docs" / "simulators.md").read_text()
BLOCKS = [
    textwrap.dedent(block) for block in re.findall(r"^(?:    .+\n|\n)+", PAGE, re.MULTILINE) if "include" in block
]
INSTALL = {
    "isaac_lab": install_isaac_lab,
    "mani_skill": install_mani_skill,
    "mjlab": install_mjlab,
    "uni_lab": functools.partial(install_uni_lab, asked=("mujoco", None)),
}
FEW = (
    *("Trainer.device='cpu'", "Trainer.num_iterations=2", "Trainer.num_env_steps=None", "make_environment.num_envs=3"),
    *("EpochBatches.num_epochs=1", "EpochBatches.minibatch_size=12", "MLP.layers=(8,)", "Trainer.calibration=None"),
    *("Learner.compile=False", "Trainer.listeners=[@CheckpointSaver()]"),
)


def test_the_page_has_a_configuration_of_each_adapter():
    assert [re.search(r"env_id = @(\w+)", block)[1] for block in BLOCKS] == [
        *("IsaacLab", "Mjlab", "Mjlab", "ManiSkill", "UniLab", "RslRl"),
    ]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.search(r"env_id = @(\w+)", block)[1])
def test_a_configuration_of_the_page_trains(monkeypatch, tmp_path, block):
    library = re.search(r"alfish.simulators.(\w+)", block)[1]
    if library in INSTALL:
        INSTALL[library](monkeypatch)
    made = gin.external_configurable(
        FakeRslRl, "my_vec_env", module="fake_libraries"
    )  # which workers of other tests can import
    module(monkeypatch, "my_lab", my_vec_env=made)
    conf = tmp_path / "robot.gin"
    conf.write_text(re.sub(r"(\w+\.task = )'[^']*'", rf"\1'{TASK}'", block))
    few = [f"--gin_param={setting}" for setting in FEW]
    assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}", *few]) == 0
