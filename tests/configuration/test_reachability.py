"""Bindings that nothing reads are refused; those that another file replaces are not."""

import contextlib

import gin
import pytest
import torch
from commands import TINY, train

from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.configuration import reachability, reading
from alfish.errors import UsageError
from alfish.networks import ActorCritic, CriticEnsemble, Torso
from alfish.parameters import differences
from alfish.training.trainer import Trainer


def test_an_unread_binding_is_named_with_its_file(refused, tmp_path):
    conf = tmp_path / "mine.gin"
    conf.write_text("include 'ppo_cartpole.gin'\nRewardClip.low = -2.0\ntypo/MLP.layers = (3,)\n")
    words = refused(*train(tmp_path / "run", *TINY, conf=str(conf)))
    assert "RewardClip.low" in words and "typo/MLP.layers" in words and str(conf) in words
    assert "MLP.layers," not in words.replace("typo/MLP.layers,", "")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_bindings_that_are_read_later_are_not_refused(tmp_path):
    parameters = ["Evaluate.period=300", "make_environment.training_wrappers=()", "some_number=0.5"]
    conf = tmp_path / "mine.gin"
    conf.write_text(
        "include 'ppo_cartpole.gin'\nLAYERS = (8,)\nMLP.layers = %LAYERS\n"
        "Trainer.transforms = [@ObservationNormalizer]\nObservationNormalizer.clip = 5.0\n"
        "PPO.entropy_coef = @entropy/Linear()\nentropy/Linear.start = 0.1\n"
    )
    assert main(train(tmp_path / "run", *TINY[1:], *parameters[:2], conf=str(conf))) == 0
    assert "entropy/Linear.start = 0.1" in (tmp_path / "run" / "config.gin").read_text()


def test_an_unread_setting_is_refused_with_its_possible_places(refused, tmp_path):
    words = refused(*train(tmp_path / "run", *TINY, "make_environment.seed=7"))
    assert (
        "seed, bound in --gin_param, has no effect, because the code that calls it passes its own value; bind "
        "Trainer.seed" in words
    )
    assert "nothing reads RMSprop.decay, bound in --gin_param: no part" in refused(
        *train(tmp_path / "run", *TINY, "RMSprop.decay=0.9")
    )
    conf = tmp_path / "mine.gin"
    conf.write_text("include 'ppo_cartpole.gin'\nRMSprop.decay = 0.9\n")
    assert f"bound in {conf}: no part" in refused(*train(tmp_path / "run", conf=str(conf)))
    assert not (tmp_path / "run").exists()


@gin.configurable(module="tests.reachability")
class MyCritics(CriticEnsemble):
    pass


@gin.configurable(module="tests.reachability")
class MyPPO(PPO):
    def __init__(self, *specs, **keywords):
        super().__init__(*specs, **keywords)


OFFLINE = ["Trainer.num_env_steps=None", "Trainer.num_updates=10", "OfflineBuffer.sources=['alfish:nowhere']"]


def settings_of(*files, parameters=()):
    """Builds what they say, and returns the names that they bind, or raises what the command would say."""
    found = reading.read([str(one) for one in files], list(parameters))
    with contextlib.closing(Trainer("nowhere")):
        reachability.refuse_unread(found)
    return {one.name for one in found.last()}


def test_settings_of_a_replaced_part_are_accepted():
    for conf, parameter in (
        ("ppo_cartpole.gin", "Learner.learning_rate=1e-3"),
        ("ppo_cartpole.gin", "PPO.clip_range=0.1"),
        ("ppo_cartpole.gin", "Learner.optimizer=@RMSprop"),
        ("ppo_pendulum.gin", "Trainer.transforms=[]"),
        ("sac_pendulum.gin", "Trainer.listeners=[]"),
        ("sac_pendulum.gin", "SAC.critic=@MyCritics"),
    ):
        assert parameter.partition("=")[0] in settings_of(conf, parameters=[parameter])


def test_a_file_may_override_other_files_but_not_itself(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("Trainer.batches = @EpochBatches\n")
    settings_of("appo_cartpole.gin", mine)
    settings_of("sac_pendulum.gin", "offline.gin", parameters=OFFLINE)
    mine.write_text(
        "include 'ppo_cartpole.gin'\nPPO.entropy_coef = %LR\nLR = @mine/Linear()\nmine/Linear.start = 1.0\nLR = 0.1\n"
    )
    with pytest.raises(UsageError, match=f"nothing reads mine/Linear.start, bound in {mine}: no part"):
        settings_of(mine)
    mine.write_text(
        "include 'ppo_pendulum.gin'\nTrainer.transforms = [@RewardClip]\nRewardClip.low = -1.0\n"
        "Trainer.transforms = [@FrameStack]\nFrameStack.num_frames = 2\n"
    )
    with pytest.raises(UsageError, match=f"nothing reads RewardClip.low, bound in {mine}: no part"):
        settings_of(mine)


@pytest.mark.parametrize("conf, parameter, words", [
    ("dqn_cartpole.gin", "Linear.start=77", "epsilon/Linear.start and learning_rate/Linear.start override it"),
    ("dqn_cartpole.gin", "Linear.finish=0.5", None),  # one of the two is bound in the conf
    ("dqn_cartpole.gin", "epsilon/Linear.start=0.5", None),
    ("sac_halfcheetah.gin", "MLP.layers=[8]", None),
])  # fmt: skip
def test_a_setting_that_the_conf_overrides_wherever_it_is_read_is_refused(conf, parameter, words):
    if words is None:
        settings_of(conf, parameters=[parameter])
        return
    name = parameter.partition("=")[0]
    with pytest.raises(
        UsageError, match=f"{name}, bound in this call, has no effect, because {words}; bind .* instead$"
    ):
        settings_of(conf, parameters=[parameter])


def test_a_setting_that_a_later_file_overrides_in_each_scope_is_accepted(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("include 'dqn_cartpole.gin'\nLinear.finish = 0.5\n")
    bound = settings_of(mine, parameters=["epsilon/Linear.finish=0.6", "learning_rate/Linear.finish=0.7"])
    assert {"Linear.finish", "epsilon/Linear.finish", "learning_rate/Linear.finish"} <= bound


@gin.configurable(module="tests.reachability")
class InheritsInit(PPO):
    def calc_loss(self, experience, info):
        return super().calc_loss(experience, info)


@pytest.mark.parametrize("algorithm", ["InheritsInit", "KLPenaltyPPO"])
def test_a_setting_of_a_base_class_that_a_file_overrides_for_the_subclass_is_refused(algorithm, tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text(
        "include 'ppo_cartpole.gin'\nimport alfish.algorithms.kl_penalty\n"
        f"Trainer.algorithm = @{algorithm}\n{algorithm}.gamma = 0.9\n"
    )
    words = f"PPO.gamma, bound in this call, has no effect, because {algorithm}.gamma overrides it; bind {algorithm}"
    with pytest.raises(UsageError, match=words):
        settings_of(mine, parameters=["PPO.gamma=0.5"])
    settings_of(mine, parameters=["PPO.lambda_=0.5", f"{algorithm}.gamma=0.8"])


def test_operative_config_has_inherited_init_values():
    parameters = ["Trainer.algorithm=@InheritsInit", "PPO.gamma=0.7", "InheritsInit.lambda_=0.5"]
    settings_of("ppo_cartpole.gin", parameters=parameters)
    for _ in range(2):
        found = differences.values(reading.operative_text())
        assert found["PPO.gamma"] == "0.7"
        assert {name: value for name, value in found.items() if name.startswith("InheritsInit")} == {
            "InheritsInit.lambda_": "0.5"
        }


@gin.configurable(module="tests.command_line")
class MyNetwork(ActorCritic):
    def __init__(self, *specs):
        super().__init__(*specs, actor_torso=my_torso, critic_torso=my_torso)


def my_torso(spec):
    return Torso(spec, mlp=my_layer)


def my_layer(size):
    layer = torch.nn.Linear(size, 4)
    layer.output_size = 4
    return layer


def test_a_custom_network_leaves_default_settings_unread(tmp_path):
    mine = tmp_path / "mine.gin"
    text = "include 'ppo_cartpole.gin'\nPPO.network = @MyNetwork\n"
    mine.write_text(text)
    settings_of(mine)
    mine.write_text(text + "MLP.layers = (3,)\n")  # said beside the network that does not read it
    with pytest.raises(UsageError, match=f"nothing reads MLP.layers, bound in {mine}: no part"):
        settings_of(mine)


def test_an_online_conf_trains_offline_with_offline_gin():
    settings_of("sac_pendulum.gin", "offline.gin", parameters=OFFLINE[1:])
    parameters = [*OFFLINE[1:2], "import alfish.offline", "Trainer.batches=@OfflineBatches", "Trainer.num_updates=None"]
    with pytest.raises(UsageError, match="bind Trainer.num_env_steps = None, and Trainer.num_updates instead"):
        settings_of("sac_pendulum.gin", parameters=[*parameters, OFFLINE[2]])


def test_a_setting_of_what_is_gone_already_is_refused(tmp_path):
    parameters = ["Learner.learning_rate=1e-3", "learning_rate/Linear.start=0.1"]
    with pytest.raises(UsageError, match="nothing reads learning_rate/Linear.start, bound in this call: no part"):
        settings_of("ppo_cartpole.gin", parameters=parameters)
    mine = tmp_path / "mine.gin"
    mine.write_text("RewardClip.low = -2.0\ninclude 'ppo_cartpole.gin'\n")
    with pytest.raises(UsageError, match=f"nothing reads RewardClip.low, bound in {mine}: no part"):
        settings_of(mine, parameters=["Learner.learning_rate=1e-3"])  # replaces what has nothing to do with it
    other = tmp_path / "other.gin"
    other.write_text(f"include '{mine}'\nTrainer.seed = 3\nRMSprop.decay = 0.1\n")
    with pytest.raises(UsageError, match=rf"RMSprop.decay, RewardClip.low, bound in {mine} and {other}: no part"):
        settings_of(other)


def test_a_run_continues_with_a_setting_of_a_replaced_part(tmp_path):
    assert main(train(tmp_path / "run", *TINY, "Learner.learning_rate=1e-3")) == 0
    assert "learning_rate/Linear.start" in (tmp_path / "run" / "config.gin").read_text()
    assert main(["train", f"--root_dir={tmp_path / 'run'}", "--gin_param=Trainer.num_env_steps=900"]) == 0
    assert main(train(tmp_path / "new", *TINY, conf=str(tmp_path / "run" / "config.gin"))) == 0


def test_a_typo_passed_to_a_base_class_is_reported_in_one_sentence(refused, tmp_path):
    mine = tmp_path / "mine.gin"
    text = "include 'ppo_cartpole.gin'\nTrainer.algorithm = @MyPPO\n"
    mine.write_text(text + "MyPPO.gama = 0.9\n")
    said = refused(*train(tmp_path / "run", conf=str(mine)))
    assert said == (
        f"alfish train: MyPPO.gama, bound in {mine}, is a parameter neither of that class nor of its base "
        "classes; did you mean gamma?\n"
    )
    mine.write_text(text + "MyPPO.gamma = 0.9\n")
    settings_of(mine)
