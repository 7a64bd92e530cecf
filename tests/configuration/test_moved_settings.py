"""Configurations of earlier versions: those that runs saved open, and a user's are told where a setting is now."""

import importlib

import pytest

import alfish
from alfish.__main__ import main
from alfish.algorithms.crossq import XQC, CrossQ
from alfish.algorithms.dqn import DQN
from alfish.algorithms.flashsac import FlashSAC
from alfish.algorithms.munchausen import MunchausenDQN, SoftDQN
from alfish.algorithms.redq import REDQ
from alfish.algorithms.retrace import RecurrentRetraceSAC, RetraceDQN, RetraceSAC
from alfish.algorithms.sac import SAC
from alfish.configuration import moved_settings, reading
from alfish.errors import UsageError
from alfish.functional import losses
from alfish.functional.values import LowerBounded
from alfish.parameters import description, differences, imports
from alfish.runs.checkpoint_file import read_file, write_file

START = "import alfish.algorithms.{module}\n\nTrainer.algorithm = @{name}\n"


def of_run(name, *bindings):
    """A configuration as an earlier version saved it."""
    module = "recurrent_sac" if name == "RecurrentSAC" else name.lower()
    return START.format(module=module, name=name) + "".join(f"{binding}\n" for binding in bindings)


@pytest.mark.parametrize(
    ("base", "bindings", "expected", "settings"),
    [
        ("SAC", ["SAC.joint_pass = False", "SAC.gamma = 0.9"], SAC, {"SAC.gamma": 0.9}),
        ("SAC", ["SAC.joint_pass = True", "SAC.target_rate = None"], CrossQ, {"SAC.target_rate": None}),
        ("SAC", ["SAC.joint_pass = True", "SAC.actor_statistics_always = True"], XQC, {}),
        ("SAC", ["SAC.joint_pass = 'with_actor'", "SAC.noise = @HeldNoise"], FlashSAC, {}),
        ("SAC", ["SAC.joint_pass = 'with_actor'"], FlashSAC, {"FlashSAC.noise": None}),
        ("SAC", ["SAC.actor_uses_mean = True", "SAC.target_subset = 3"], REDQ, {"REDQ.target_subset": 3}),
        ("SAC", ["SAC.actor_uses_mean = True"], REDQ, {"REDQ.target_subset": None}),
        ("SAC", ["SAC.retrace = True"], RetraceSAC, {}),
        ("RecurrentSAC", ["SAC.retrace = True"], RecurrentRetraceSAC, {}),
        ("SAC", ["SAC.lower_bound = True"], SAC, {"SAC.values": LowerBounded}),
        ("DQN", ["DQN.munchausen = 0.0", "DQN.double = False"], DQN, {"DQN.double": False}),
        ("DQN", ["DQN.retrace = True"], RetraceDQN, {}),
        ("DQN", ["DQN.entropy_temperature = 0.5"], SoftDQN, {"SoftDQN.entropy_temperature": 0.5}),
        (
            "DQN",
            ["DQN.entropy_temperature = 0.5", "DQN.munchausen = 0.8", "DQN.log_policy_floor = -2.0"],
            MunchausenDQN,
            {
                "SoftDQN.entropy_temperature": 0.5,
                "MunchausenDQN.munchausen": 0.8,
                "MunchausenDQN.log_policy_floor": -2.0,
            },
        ),
    ],
)
def test_a_saved_configuration_is_read_with_the_classes_of_today(tmp_path, base, bindings, expected, settings):
    path = tmp_path / "config.gin"
    path.write_text(of_run(base, *bindings))
    with reading.preserved(), reading.saved(path):
        text = reading.text()
        for name, value in settings.items():
            owner, parameter = name.split(".")
            found = reading.bound(owner, parameter)[parameter]
            assert found == value or isinstance(value, type)
    assert f"@{expected.__name__}" in text
    lines = text.splitlines()
    assert not any(line.startswith(f"{name} = ") for name in moved_settings.MOVED for line in lines)


def test_options_that_no_class_joins_are_named(tmp_path):
    path = tmp_path / "config.gin"
    path.write_text(of_run("SAC", "SAC.joint_pass = True", "SAC.retrace = True"))
    words = "combines the options of SAC and CrossQ and RetraceSAC"
    with pytest.raises(UsageError, match=words), reading.preserved(), reading.saved(path):
        pass


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("SAC.retrace = True", "SAC has no parameter named 'retrace'; it is now the class @RetraceSAC in alfish"),
        (
            "DQN.munchausen = 0.9",
            "it is now MunchausenDQN.munchausen, of @MunchausenDQN in alfish.algorithms.munchausen",
        ),
        ("DQN.lower_bound = True", "it is now DQN.values = @LowerBounded"),
    ],
)
def test_a_moved_setting_is_refused_with_its_new_class(binding, words):
    with reading.preserved(), pytest.raises(UsageError) as caught:
        reading.read([f"{binding.partition('.')[0].lower()}.gin"], [binding])
    assert words in str(caught.value)


def test_a_run_of_an_earlier_version_is_evaluated_and_continued(tmp_path):
    run, bindings = tmp_path / "run", ["MLP.layers = (8,)", "CriticEnsemble.layers = (8,)"]
    bindings += ["ReplayBatches.updates_per_env_step = 0.1", "Trainer.num_env_steps = 600", "Evaluate.num_episodes = 1"]
    flags = [f"--gin_param={binding}" for binding in bindings]
    assert main(["train", "--gin_file=redq_pendulum.gin", f"--root_dir={run}", *flags]) == 0
    config = run / "config.gin"
    text = config.read_text()
    assert "@REDQ" in text
    old = text.replace("import alfish.algorithms.redq\n", "").replace("@REDQ", "@SAC")
    config.write_text(old.replace("REDQ.target_subset", "SAC.target_subset") + "SAC.actor_uses_mean = True\n")
    for path in run.glob("checkpoints/checkpoint-*.pt"):  # algorithms counted updates themselves
        header, state = read_file(path, int(path.stem.rpartition("-")[2]), mmap=False)
        state["algorithm"]["_extra_state"] = {"num_updates": state["learner"]["updates"]}
        write_file(path, header._replace(config=differences.digest(config.read_text())), state)
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1"]) == 0
    policy = alfish.load(run)
    assert isinstance(policy.algorithm, REDQ) and policy.algorithm._target_subset == 2
    assert main(["train", f"--root_dir={run}", "--gin_param=Trainer.num_env_steps = 700"]) == 0


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("alfish.losses", "huber"),
        ("alfish.returns", "gae"),
        ("alfish.composition.rnd", "RND"),
        ("alfish.writers", "Writer"),
        ("alfish.batches", "ReplayBatches"),
        ("alfish.weighting", "ScheduledWeights"),
    ],
)
def test_a_module_is_found_by_its_old_name(old, name):
    module = importlib.import_module(old)
    assert hasattr(module, name)
    assert importlib.import_module(module.__name__) is module and module.__spec__.name == module.__name__ != old


@pytest.mark.parametrize("part", ["losses:huber", "functional.losses:huber"])
def test_a_saved_configuration_names_a_function_of_a_module_that_has_moved(part, monkeypatch):
    registered = []
    monkeypatch.setattr("gin.external_configurable", lambda part, **names: registered.append(part))
    monkeypatch.setattr(description, "_REGISTERED", {})
    module, _, name = part.partition(":")
    with imports.restricted([]):
        imports.import_part(f"alfish.{module}", name, "config.gin")
        description.register(f"alfish.{module}", name)
        with pytest.raises(UsageError, match="config.gin names 'write_atomically' of 'alfish.runs.files'"):
            imports.import_part("alfish.runs.files", "write_atomically", "config.gin")
    assert registered == [losses.huber]


def test_moved_modules_are_where_the_table_says():
    for old, new in alfish._MOVED.items():
        assert importlib.import_module(old) is importlib.import_module(new)
