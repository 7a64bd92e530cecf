"""What Python builds is opened again: as Trainers, through `alfish.train`, and by the command line."""

import functools
import json
import math
import os
import re
import signal
import sys
import threading
from pathlib import Path

import gin
import gymnasium
import numpy as np
import pytest
import torch
from described_parts import Checked, CheckedByItsBase, Doubled, Mine, OfOtherArguments, Plain, torso
from gymnasium import spaces

import alfish
from alfish import specs
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.configuration import reading
from alfish.environments import make_environment
from alfish.environments.toy import Catch
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.networks import MLP, ActorCritic, Torso
from alfish.parameters import checking, description, imports
from alfish.parameters.description import CONFIG_FILE
from alfish.parameters.schedules import Cyclical, Linear
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, CodeSnapshot, StopAt
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer

SMALL = {"MLP.layers": (4,), "EpochBatches.num_epochs": 1, "num_env_steps": 64, "unroll_length": 32}
LIMITED = functools.partial(gymnasium.wrappers.TimeLimit, max_episode_steps=5)


def trainer_of(root_dir, **arguments):
    body = functools.partial(Torso, mlp=functools.partial(MLP, layers=(4,)))
    network = functools.partial(ActorCritic, actor_torso=body, critic_torso=body)
    environment = functools.partial(make_environment, Plain, env_kwargs={"n": 3}, wrappers=[LIMITED, Doubled])
    given = {
        "algorithm": functools.partial(Mine, gamma=np.float32(0.5), network=network),
        "environment": environment,
        "batches": functools.partial(EpochBatches, num_epochs=1),
        "transforms": [functools.partial(ObservationNormalizer, clip=3.0)],
        "num_iterations": 2,
        "unroll_length": 16,
        "listeners": [CheckpointSaver()],
    }
    return Trainer(root_dir, **given | arguments)


def test_a_trainer_of_importable_parts_is_opened_again(tmp_path, capsys):
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    policy, observation = alfish.load(tmp_path / "run"), np.full(2, 0.3)
    assert type(policy.algorithm) is not PPO and isinstance(policy.algorithm, Mine)
    assert policy.algorithm.values.gamma == 0.5 and gin.config_str() == ""
    assert policy.act(observation) == trainer.policy().act(observation)
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={tmp_path}/run", "--num_episodes=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lengths"] == [5, 5] and told["returns"][0] % 2 == 0  # its wrappers are there
    assert main(["record", f"--root_dir={tmp_path}/run", "--num_episodes=1", f"--output={tmp_path}/set"]) == 0
    assert main(["play", f"--root_dir={tmp_path}/run"]) == 0


class Redefined(gymnasium.Env):
    """One state; a notebook may define it again."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    reward = 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._step += 1
        return np.zeros(2, np.float32), self.reward, False, self._step == 5, {}


def test_a_class_that_is_defined_again_is_trained(tmp_path, monkeypatch):
    again = type("Redefined", (Redefined,), {"reward": 10.0, "__module__": __name__})
    settings = {"num_env_steps": 400, "unroll_length": 50}
    alfish.train("PPO", Redefined, root_dir=tmp_path / "one", **settings)
    monkeypatch.setattr(sys.modules[__name__], "Redefined", again)
    alfish.train("PPO", again, root_dir=tmp_path / "two", **settings)
    files = [next((tmp_path / name / "eval").iterdir()) for name in ("one", "two")]
    returns = [file.read_text().splitlines()[1].split(",")[2] for file in files]
    assert list(map(float, returns)) == [5, 50]


def test_what_no_command_can_open_is_reported_before_training(tmp_path, caplog):
    settings = {"num_env_steps": 100, "unroll_length": 50}
    alfish.train("PPO", lambda: gymnasium.make("CartPole-v1"), root_dir=tmp_path / "run", **settings)
    assert "make_environment.env_id is an object, or is defined in the main program, so no other" in caplog.text


def test_a_class_without_arguments_reads_the_bindings_of_the_scope_that_builds_it():
    gin.parse_config(parsed(description.as_bindings({"Torso.mlp": MLP})[0][0] + "\npolicy/MLP.layers = (3,)"))
    with gin.config_scope("policy"):
        assert Torso(spaces.Box(-1, 1, (2,))).output_size == 3


def test_a_class_from_python_leaves_its_short_name_to_a_class_that_gin_knows():
    known = gin.external_configurable(list, name="SharedName", module="known")
    description.register("described_parts", "SharedName")
    gin.parse_config("one = @SharedName\nother = @described_parts.SharedName")
    assert gin.query_parameter("one/macro.value").configurable.selector == "known.SharedName"
    assert gin.query_parameter("other/macro.value").configurable.selector == "described_parts.SharedName"
    gin.external_configurable(known, name="SharedName", module="second")
    with pytest.raises(KeyError, match="Ambiguous"):
        gin.parse_config("one = @SharedName")


def test_a_run_whose_parts_have_empty_scopes_continues(tmp_path):
    """Versions before this one gave each class a scope of its own, with or without arguments."""
    one = functools.partial(alfish.train, PPO, "CartPole-v1", conf="ppo", root_dir=tmp_path / "run")
    one(**SMALL)
    path = tmp_path / "run" / CONFIG_FILE
    text = path.read_text()
    assert "Trainer.algorithm = @PPO" in text or "Trainer.algorithm = @alfish.algorithms.PPO" in text
    path.write_text(re.sub(r"(Trainer.algorithm = @)", r"\1algorithm/", text))
    policy = one(**SMALL | {"num_env_steps": 512})
    assert policy.env_steps >= 512
    with pytest.raises(UsageError, match="is a run with another configuration"):
        one(**SMALL | {"num_env_steps": 600, "PPO.gamma": 0.5})


def test_objects_of_shipped_classes_are_saved_in_the_configuration(tmp_path, caplog, capsys):
    schedule = Cyclical(Linear(3e-4, 1e-4), num_cycles=2)
    settings = {"Learner.learning_rate": schedule, "extra_listeners": [StopAt(1e9), CodeSnapshot()]}
    alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", **settings, **SMALL)
    assert "no other program" not in caplog.text
    text = (tmp_path / "run" / CONFIG_FILE).read_text()
    assert "Linear.end = 0.0001" in text and "Cyclical.num_cycles = 2" in text and "StopAt.return_ = 1000000000" in text
    assert main(["train", f"--root_dir={tmp_path}/run", "--gin_param=Trainer.num_env_steps=128"]) == 0
    assert json.loads((tmp_path / "run" / "done").read_text())["env_steps"] >= 128


class Counting(Listener):
    """Cannot be copied, because it has a lock."""

    def __init__(self):
        self.count, self.lock = 0, threading.Lock()

    def after_iteration(self, run, report):
        self.count += 1


def test_a_given_object_is_used_and_not_a_copy(tmp_path, caplog):
    counting = Counting()
    for name in ("one", "two"):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / name, extra_listeners=[counting], **SMALL)
        assert ("The Counting of this run was also used by the run in" in caplog.text) == (name == "two")
    assert counting.count > 1


@pytest.mark.parametrize(
    "made, form",
    [
        (Checked(3), "@part/described_parts.Checked()"),
        (Checked(2, inner=[Checked(1)]), "@part/described_parts.Checked()"),
        (CheckedByItsBase(3), "@part/described_parts.CheckedByItsBase()"),
        (OfOtherArguments(), None),
        (Checked(3, inner=torch.zeros(3)), None),
    ],
)
def test_objects_are_described_by_the_arguments_of_their_constructors(made, form):
    written = description.GinWriter()
    written.bind("", "MLP", "layers", made, "part")
    if form is None:
        assert not written.is_whole and checking.construction(made) is None
    else:
        assert f"MLP.layers = {form}\n" in written.text() and written.is_whole
        assert f"part/described_parts.{type(made).__name__}.width = {made.width}\n" in written.text()


def test_an_environment_instead_of_what_makes_it_is_named(tmp_path):
    with pytest.raises(UsageError, match="it must be an id, a class, or a function such as lambda"):
        alfish.train("PPO", gymnasium.make("CartPole-v1"), root_dir=tmp_path / "run")


def test_the_command_continues_a_trainer_of_importable_parts(tmp_path, capsys):
    trainer_of(tmp_path / "run", listeners=None, num_iterations=1).train()
    assert main(["train", f"--root_dir={tmp_path}/run", "--gin_param=Trainer.num_iterations=2"]) == 0
    assert json.loads((tmp_path / "run" / "done").read_text())["iterations"] == 2


@pytest.mark.parametrize("value", [np.str_("relu"), np.array(["relu"])[0], "relu"])
def test_numpy_values_are_written_like_python_values(value):
    written = description.GinWriter()
    written.bind("", "MLP", "activation", value, "MLP.activation")
    written.bind("", "MLP", "layers", np.array([64, 32]), "MLP.layers")
    written.bind("", "MLP", "bias", np.True_, "MLP.bias")
    assert written.text() == "MLP.activation = 'relu'\nMLP.layers = [64, 32]\nMLP.bias = True\n" and written.is_whole


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"environment": lambda **_: make_environment("CartPole-v1")}, "Trainer.environment is a lambda"),
        ({"transforms": [lambda *_: 0]}, r"Trainer.transforms\[0\] is a lambda"),
        ({"algorithm": functools.partial(PPO, network=lambda *_: 0)}, "Trainer.algorithm.network is a lambda"),
        ({"algorithm": type("Local", (PPO,), {})}, "Trainer.algorithm is an object of ABCMeta"),
        ({"metrics": [object()]}, r"Trainer.metrics\[0\] is an object of object"),
        ({"device": {1, 2}}, "Trainer.device is an object of set"),
        ({"unroll_length": math.inf}, "Trainer.unroll_length is an object of float"),
    ],
)
def test_an_unnamed_part_is_reported_when_its_name_is_needed(arguments, words):
    text = description.as_gin(arguments)
    reading._register()
    gin.parse_config(text)
    [name] = arguments
    with pytest.raises(UsageError, match=words + ".*, which no configuration can refer to: construct the Trainer"):
        call_all(reading.bound("alfish.Trainer", name)[name])


def call_all(part):
    for one in part if isinstance(part, list) else [part]:
        one(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), specs.reward_spec())


def test_a_policy_loads_though_its_environment_has_no_name(tmp_path, capsys):
    def local(**arguments):
        return make_environment("CartPole-v1", **arguments)

    trainer = trainer_of(tmp_path / "run", environment=local)
    trainer.train()
    assert alfish.load(tmp_path / "run").act(np.zeros(4)) in (0, 1)
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Trainer.environment is the local" in error and "construct the Trainer" in error


def test_parts_of_one_kind_keep_their_own_arguments():
    inner = functools.partial(torso, width=1, inner=None)
    middle = functools.partial(torso, width=2, inner=inner)
    gin.parse_config(parsed(description.as_gin({"learner": functools.partial(torso, width=3, inner=middle)})))
    outer = reading.bound("alfish.Trainer", "learner")["learner"](None)
    assert outer.output_size == 3  # each one overwrites that of its inner one, last
    binding = gin.query_parameter("learner_inner_inner/described_parts.torso.width")
    assert binding == 1 and gin.query_parameter("learner_inner/described_parts.torso.width") == 2


def test_parts_with_similar_names_keep_their_arguments():
    parts = {"a b": functools.partial(torso, width=1), "a_b": functools.partial(torso, width=2)}
    text = description.as_gin({"environment": functools.partial(make_environment, env_kwargs=parts)})
    gin.parse_config(parsed(text))
    scopes = ["environment_env_kwargs_a_b", "environment_env_kwargs_a_b_2"]
    assert [gin.query_parameter(f"{scope}/described_parts.torso.width") for scope in scopes] == [1, 2]


def parsed(text):
    for module, name in description.PART.findall(text):
        description.register(module, name)
    return text


def test_two_torsos_of_one_partial_are_built_alike_when_the_run_is_opened(tmp_path):
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(4,)))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    environment = functools.partial(make_environment, Catch)  # whose observation is an image
    trainer = trainer_of(
        tmp_path, algorithm=functools.partial(PPO, network=network), environment=environment, transforms=[]
    )
    trainer.train()
    names = [name for name, _ in trainer.algorithm.named_parameters()]
    assert [name for name, _ in alfish.load(tmp_path).algorithm.named_parameters()] == names


def test_plain_values_and_nested_names_round_trip():
    values = {
        "a": [1, (2.5, "it's"), (), (None,)],
        "b": {"x": True, 3: [Path("p")]},
        "c": np.float64(0.1),
        "d": np.int8(4),
    }
    environment = functools.partial(make_environment, Mine.Inner, env_kwargs=values)
    gin.parse_config(parsed(description.as_gin({"environment": environment})))
    found = gin.query_parameter("environment/make_environment.env_kwargs")
    assert found == {"a": [1, (2.5, "it's"), (), (None,)], "b": {"x": True, 3: ["p"]}, "c": 0.1, "d": 4}
    assert gin.query_parameter("environment/make_environment.env_id").configurable.wrapped is Mine.Inner


def test_bindings_of_gin_are_described_as_they_were_written():
    gin.parse_config("Trainer.seed = 3\nmine/PPO.gamma = 0.25\nTrainer.algorithm = @mine/PPO")
    text = description.as_gin({"seed": 3, "algorithm": PPO, "num_threads": 2})
    gin.clear_config()
    gin.parse_config(text)
    assert gin.query_parameter("mine/PPO.gamma") == 0.25 and gin.query_parameter("Trainer.num_threads") == 2
    assert "import alfish.algorithms.ppo" in text and text.count("seed") == 1


# A description of a stranger.


def read_saved(root_dir):
    with reading.preserved(), reading.saved(root_dir / "config.gin"):
        pass


@pytest.mark.parametrize("part", ["subprocess:Popen", "torch.utils.data.dataloader:DataLoader", "os:system"])
def test_a_stranger_may_not_name_parts_of_libraries(tmp_path, part):
    (tmp_path / "config.gin").write_text(f"# part: {part}\n")
    with pytest.raises(
        UsageError, match="config.gin names .* which is not part of alfish; if you trust that module, add"
    ):
        read_saved(tmp_path)


@pytest.mark.parametrize(
    "part, words",
    [
        # Modules of alfish and of the user through which others, or their functions, could be reached.
        (
            "alfish.runs.provenance:subprocess.run",
            "names 'subprocess.run' of 'alfish.runs.provenance', which has no configurable",
        ),
        (
            "alfish.runs.files:write_atomically",
            "names 'write_atomically' of 'alfish.runs.files', which has no configurable",
        ),
        ("alfish.bin.check_env:main", "names 'main' of 'alfish.bin.check_env', which has no configurable"),
        ("alfish.environments.wrapping:functools.partial", "no class or function 'functools.partial' in alf"),
        ("described_parts:gymnasium.make", "no class or function 'gymnasium.make' in described_parts"),
        ("described_parts:gymnasium.Env", "no class or function 'gymnasium.Env' in described_parts"),
        ("described_parts:PPO", "no class or function 'PPO' in described_parts"),
        ("described_parts:Plain.reset", "no class or function 'Plain.reset' in described_parts"),
        ("torch.nn.modules.module:torch.save", "no class or function 'torch.save' in torch.nn.modules.module"),
    ],
)
def test_a_stranger_reaches_no_other_module_through_one_of_parts(tmp_path, part, words):
    (tmp_path / "config.gin").write_text(f"# part: {part}\n")
    with pytest.raises(UsageError, match=words) as error:
        read_saved(tmp_path)
    assert "\n" not in str(error.value)


def test_a_part_that_is_gone_is_named(tmp_path):
    (tmp_path / "config.gin").write_text("# part: described_parts:Gone\n")
    with pytest.raises(UsageError, match="no class or function 'Gone' in described_parts"):
        read_saved(tmp_path)
    (tmp_path / "config.gin").write_text("# part: no_such_module:Gone\n")
    with pytest.raises(UsageError, match="'no_such_module', which is not installed"):
        read_saved(tmp_path)


def test_own_modules_may_be_named():
    with imports.restricted([]):
        imports.import_part("described_parts", "Mine", "a test")
        imports.import_part("torch.nn.modules.flatten", "Flatten", "a test")
    with imports.restricted(["torch"]):
        imports.import_part("torch.utils.data.dataloader", "DataLoader", "a test")
    assert {"described_parts", "torch.nn.modules.flatten", "torch.utils.data.dataloader"} <= set(sys.modules)


# alfish.train


def test_train_takes_names_classes_and_settings(tmp_path):
    gin.parse_config("make_environment.num_envs = 7")
    settings = SMALL | {"PPO.gamma": 0.75, "make_environment.num_envs": 2}
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    policy = alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", **settings)
    assert torch.equal(torch.rand(1), drawn)
    assert gin.config_str().count(" = ") == 1 and gin.query_parameter("make_environment.num_envs") == 7
    assert policy.env_steps >= 64 and policy.algorithm.values.gamma == 0.75
    text = (tmp_path / "run" / "config.gin").read_text()
    assert "EpochBatches.num_epochs = 1\n" in text and "include" not in text and "MLP.layers = (4,)" in text
    loaded = alfish.load(tmp_path / "run")
    assert loaded.act(np.zeros(4)) == policy.act(np.zeros(4))
    # Once more: the run is done, and the same policy comes back.
    again = alfish.train("ppo", "CartPole-v1", root_dir=tmp_path / "run", **settings)
    assert again.env_steps == policy.env_steps
    with pytest.raises(UsageError, match="another configuration(.|\n)*PPO.gamma = 0.5"):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", **settings | {"PPO.gamma": 0.5})
    changed = settings | {"PPO.gamma": 0.5, "num_env_steps": 192}
    policy = alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", on_config_change="old", **changed)
    assert policy.algorithm.values.gamma == 0.75 and policy.env_steps == again.env_steps  # the old budget too
    policy = alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", on_config_change="new", **changed)
    assert policy.algorithm.values.gamma == 0.5 and policy.env_steps >= 192


def test_train_accepts_a_conf_with_custom_parts(tmp_path, capsys):
    alfish.train(conf="ppo_cartpole", root_dir=tmp_path / "conf", **SMALL | {"Trainer.seed": 1})
    assert "Trainer.seed = 1" in (tmp_path / "conf" / "config.gin").read_text()
    environment = functools.partial(Plain, n=3)
    wrappers = {"make_environment.wrappers": [LIMITED, Doubled]}
    alfish.train(Mine, environment, root_dir=tmp_path / "own", **SMALL | wrappers)
    assert isinstance(alfish.load(tmp_path / "own").algorithm, Mine)
    assert main(["evaluate", f"--root_dir={tmp_path}/own", "--num_episodes=1"]) == 0
    capsys.readouterr()
    alfish.train(conf="ppo", environment=lambda: LIMITED(Plain(3)), root_dir=tmp_path / "lambda", **SMALL)
    assert alfish.load(tmp_path / "lambda").act(np.zeros(2)) in (0, 1, 2)
    assert main(["evaluate", f"--root_dir={tmp_path}/lambda"]) == 2
    assert "make_environment.env_id is a lambda, which no configuration can refer to" in capsys.readouterr().err


def test_train_reports_an_already_finished_run(tmp_path, capsys):
    for is_again in (False, True):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", **SMALL)
        said = (
            f"{tmp_path}/run is finished: Trainer.num_env_steps = 64 is spent; raise it to continue, or choose "
            "another root_dir"
        )
        assert (said in capsys.readouterr().err) == is_again


class Interrupting(Listener):
    """Sends a signal after the first iteration, or after the last one."""

    def __init__(self, number, at_end=False):
        self.number, self.at_end = number, at_end

    def after_iteration(self, trainer, report):
        if self.number is not None and report.finished >= self.at_end:  # once: a second Ctrl-C stops at once
            number, self.number = self.number, None
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, SystemExit)])
def test_train_does_not_return_half_a_training(tmp_path, number, raised):
    listeners = [Interrupting(int(number)), CheckpointSaver()]
    with pytest.raises(raised, match="75" if raised is SystemExit else None):
        one = SMALL | {"make_environment.num_envs": 1}
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", listeners=listeners, **one)
    assert 0 < alfish.load(tmp_path / "run").env_steps < SMALL["num_env_steps"]


def test_train_does_not_swallow_a_signal_that_comes_at_the_end(tmp_path):
    listeners = [Interrupting(int(signal.SIGTERM), at_end=True), CheckpointSaver()]
    with pytest.raises(SystemExit, match="143"):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", listeners=listeners, **SMALL)
    assert (tmp_path / "run" / "done").exists()


class OwnPPO(PPO):
    pass


def test_a_class_replaces_the_algorithm_of_a_conf(tmp_path):
    alfish.train(OwnPPO, conf="ppo_cartpole", root_dir=tmp_path, **SMALL)
    assert "Trainer.num_env_steps" in (tmp_path / "config.gin").read_text()
    assert type(alfish.load(tmp_path).algorithm) is OwnPPO


@pytest.mark.parametrize(
    "arguments, settings, words",
    [
        ((), {}, "takes an algorithm, as in alfish.train"),
        (("PPO",), {"conf": "ppo"}, "takes an algorithm, as in alfish.train"),
        (("PPX", "CartPole-v1"), {}, "there is no algorithm or conf 'PPX'; close ones are ppo"),
        (
            ("PPO", "CartPole-v1"),
            {"sede": 1},
            "^sede = 1: Trainer has no parameter named 'sede'; did you mean seed.$",
        ),
        (
            ("PPO", "CartPole-v1"),
            {"lr": 0.1},
            r'^lr = 0.1: Trainer has no .* did you mean \*\*{"Learner.learning_rate": ...}\?$',
        ),
        (
            ("PPO", "CartPole-v1"),
            {"PPO.batch_size": 4},
            r'^PPO.batch_size = 4: PPO .* mean \*\*{"EpochBatches.minibatch_size": ...}\?$',
        ),
        (("PPO", "CartPole-v1"), {"PPO.gamma": 2}, "^PPO.gamma is 2, bound in this call; it must be a number in"),
        (
            ("PPO", "CartPole-v1"),
            {"ReplayBatches.batch_size": 9},
            "^nothing reads .* in this call: .*; leave it out",
        ),
        (("PPO", "CartPole-v1"), {"unroller": "AsyncUnroller"}, "function: give AsyncUnroller without quotes"),
        (
            ("PPO", "CartPole-v1"),
            {"extra_listeners": [print]},
            r"^Trainer.extra_listeners is \[the function print\], .*; it must be a list of objects$",
        ),
        (
            ("PPO", "CartPole-v1"),
            {"extra_listeners": [lambda report: None]},
            r"^Trainer.extra_listeners is \[a lambda\], .*; it must be a list of objects$",
        ),
        (
            ("PPO", "CartPole-v1"),
            {"extra_listeners": [type("Own", (Listener,), {"__qualname__": "main.<locals>.Own"})]},
            r"^Trainer.extra_listeners is \[Own\], .*: write \[Own\(\)\]$",
        ),
        (("PPO", "CartPole-v1"), {"extra_listeners": ["Evaluate"]}, "it must be a list of objects$"),
        (
            ("PPO", "CartPole-v1"),
            {"make_environment.wrappers": gymnasium.wrappers.FlattenObservation},
            r"^make_environment.wrappers is FlattenObservation, .* write \[FlattenObservation\]$",
        ),
        (("PPO", "CartPole-v1"), {"unroller": 3}, "it must be a class or function$"),
        (("PPO",), {}, r"env_id; give it, as in alfish.train\(environment=...\)"),
        (("PPO", "CartPol-v1"), {}, "close ones are CartPole"),
        (("PPO", "CartPole-v1"), {"on_config_change": "maybe"}, "on_config_change is 'maybe'"),
    ],
)
def test_trains_mistakes_are_reported_in_one_sentence(tmp_path, arguments, settings, words):
    """It is in the language of the call, and no other exception stands before it."""
    with pytest.raises(UsageError, match=words) as error:
        alfish.train(*arguments, root_dir=tmp_path / "run", **SMALL | settings)
    assert "\n" not in str(error.value) and "--" not in str(error.value) and "@" not in str(error.value)
    assert error.value.__cause__ is None and (error.value.__context__ is None or error.value.__suppress_context__)


def test_errors_of_train_name_python_arguments(tmp_path):
    few = SMALL | {"num_env_steps": 300}
    alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", **few)
    with pytest.raises(UsageError, match="another root_dir, or continue with on_config_change='old' or 'new'$"):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", **few | {"PPO.gamma": 0.5})
    with pytest.raises(UsageError, match="^root_dir is empty; give a directory for the run$"):
        alfish.train("PPO", "CartPole-v1", root_dir=" ", **few)
    with pytest.raises(UsageError, match=f"^root_dir='{tmp_path}/run/config.gin' cannot be created: it is a file"):
        alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run" / "config.gin", **few)


def test_sentences_pass_through_gin_as_they_are():
    """Other exceptions get its chain of calls."""
    with pytest.raises(UsageError, match="^PPO.reward_spec is None; it must be an object") as error:
        PPO(None, None, None, gamma=2)
    assert type(error.value) is UsageError

    @gin.configurable(module="tests")
    def breaks():
        raise ValueError("of another")

    with pytest.raises(ValueError, match="In call to configurable 'breaks'"):
        breaks()


def test_the_package_lists_its_names():
    assert {"train", "load", "Policy", "__version__"} <= set(dir(alfish))
