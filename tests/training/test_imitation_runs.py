"""Runs that learn from the policy of another run."""

import functools
import re
import shutil
from pathlib import Path

import gin
import pytest
import torch
from resuming import assert_same, parameters, stop_after, tensors_of

import alfish
from alfish.__main__ import main
from alfish.algorithms.appo import APPO
from alfish.algorithms.composition import GAIL, Composed, GuidedCost, NormalizedObservation
from alfish.algorithms.imitation.dagger import DAgger
from alfish.algorithms.imitation.distillation import Distillation
from alfish.algorithms.imitation.expert import AbsentExpert
from alfish.algorithms.ppo import PPO
from alfish.algorithms.prior_kl import PriorKLPPO
from alfish.algorithms.sac import SAC
from alfish.configuration.experts import saved_policy
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, Torso
from alfish.offline import Arrays, OfflineBuffer, Spaces
from alfish.training.evaluator import make_evaluator
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, PreviousStep, RewardNormalizer
from alfish.unrollers import AsyncUnroller, SyncUnroller

TORSO = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
MEMORY = functools.partial(TORSO, memory=functools.partial(GRU, size=6))
EXPERT = {"num_env_steps": 64, "unroll_length": 16, "MLP.layers": (8,), "EpochBatches.num_epochs": 1}
EXPERT |= {"make_environment.num_envs": 1, "Evaluate.num_episodes": 1}


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    """A run with memory and statistics."""
    directory = tmp_path_factory.mktemp("expert")
    memory = {"Torso.memory": GRU, "GRU.size": 6, "transforms": [ObservationNormalizer]}
    alfish.train("PPO", "Pendulum-v1", root_dir=directory, **EXPERT, **memory)
    return directory


def make(root_dir, expert, algorithm=DAgger, torso=TORSO, **settings):
    """A run on Pendulum, whose episodes of 6 rows all end with row 35, after five unrolls of 7 rows."""
    replay = functools.partial(ReplayBatches, 500, 8, 3, updates_per_env_step=0.25, warmup_env_steps=0, state_period=10)
    make_expert = functools.partial(saved_policy, root_dir=str(expert))
    own = {"beta": 0.5} if algorithm is DAgger else {}
    if algorithm in (DAgger, Distillation):
        algorithm_of = functools.partial(algorithm, expert=make_expert, torso=torso, **own)
    else:
        algorithm_of = algorithm
    return Trainer(
        root_dir,
        **{
            "algorithm": algorithm_of,
            "environment": functools.partial(
                make_environment, "Pendulum-v1", num_envs=2, env_kwargs={"max_episode_steps": 5}
            ),
            "batches": replay if algorithm is DAgger else functools.partial(EpochBatches, num_epochs=1),
            "unroll_length": 7,
            "num_iterations": 8,
            "listeners": [CheckpointSaver(0)],
            "device": "cpu",
            **settings,
        },
    )


def test_an_expert_that_reads_the_previous_reward_is_refused_where_the_run_changes_rewards(tmp_path):
    alfish.train("PPO", "Pendulum-v1", root_dir=tmp_path / "expert", **EXPERT, transforms=[PreviousStep])
    make(tmp_path / "plain", tmp_path / "expert", num_iterations=1).train()
    with pytest.raises(UsageError, match=r"Trainer\.transforms changes the rewards of this run"):
        make(tmp_path / "scaled", tmp_path / "expert", transforms=[RewardNormalizer]).train()


@pytest.mark.parametrize("algorithm", [DAgger, Distillation])
def test_a_resumed_run_is_bit_identical(tmp_path, expert, algorithm):
    settings = {"algorithm": algorithm, "torso": MEMORY}
    whole = make(tmp_path / "whole", expert, **settings)
    whole.train()
    stop_after(make(tmp_path / "cut", expert, **settings), 5)
    torch.manual_seed(99)
    resumed = make(tmp_path / "cut", expert, **settings)
    resumed.train()
    assert_same(tensors_of(resumed), tensors_of(whole))


def test_a_resumed_run_stays_near_its_prior_policy_with_the_bits_of_one_that_never_stopped(tmp_path):
    settings = EXPERT | {"transforms": [RewardNormalizer]}
    alfish.train("PPO", "Pendulum-v1", root_dir=tmp_path / "prior", **settings)
    prior = functools.partial(saved_policy, root_dir=str(tmp_path / "prior"))
    network = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
    algorithm = functools.partial(PriorKLPPO, prior=prior, network=network)
    make_run = functools.partial(make, expert=None, algorithm=algorithm)
    whole = make_run(tmp_path / "whole")
    whole.train()
    stop_after(make_run(tmp_path / "cut"), 5)
    torch.manual_seed(99)
    resumed = make_run(tmp_path / "cut")
    resumed.train()
    assert_same(tensors_of(resumed), tensors_of(whole))
    saved = tensors_of(whole)["algorithm"]
    assert {name for name in saved if name.startswith("prior.")} == {"prior._extra_state"}
    assert saved["prior._extra_state"]["sha256"] == whole.algorithm.prior.checksum
    assert alfish.load(tmp_path / "whole").act([1.0, 0.0, 0.0]).shape == (1,)


@pytest.mark.parametrize("algorithm", [DAgger, Distillation])
def test_student_and_expert_act_through_numpy_as_through_torch(tmp_path, expert, algorithm):
    found = []
    for numpy_policy in (0, None):
        unroller = functools.partial(SyncUnroller, numpy_policy=numpy_policy)
        trainer = make(tmp_path / str(numpy_policy), expert, algorithm, MEMORY, unroller=unroller)
        trainer.train()
        assert not trainer.unroller.state_dict()["gave_up"], "it acts through numpy to the end"
        found.append(parameters(trainer))
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DAgger, Distillation])
def test_workers_label_rows_and_lockstep_repeats_its_bits(tmp_path, expert, algorithm):
    found = []
    for where in ("first", "again"):
        unroller = functools.partial(AsyncUnroller, num_workers=2, mode="lockstep")
        trainer = make(tmp_path / where, expert, algorithm, MEMORY, unroller=unroller)
        trainer.train()
        found.append(parameters(trainer))
    assert torch.equal(*found)
    before = make(tmp_path / "untrained", expert, algorithm, MEMORY)
    assert not torch.equal(parameters(before), found[0])
    before.close()


def test_replay_keeps_all_rounds_with_labels_of_the_saved_policy(tmp_path, expert):
    trainer = make(tmp_path / "run", expert)
    trainer.train()
    buffer = trainer.batches.buffer
    assert buffer.num_rows == buffer.num_pushed == 8 * 7 * 2
    rows = buffer.read(torch.arange(2), torch.arange(56)[:, None].expand(-1, 2))
    policy = alfish.load(expert)
    for t in range(56):
        first = (rows.time_step.step_type[t] == 0).numpy()
        label = policy.act(rows.time_step.observation[t].numpy(), batched=True, first=first) / 2
        if t < 3:  # afterwards the policy's own previous action is not the executed one, which its memory does not see
            torch.testing.assert_close(rows.info["label"][t].clamp(-1, 1), torch.from_numpy(label))
    is_label = (rows.info["label"].clamp(-1, 1) == rows.action.clamp(-1, 1)).all(-1)
    assert 0.3 < is_label.float().mean() < 0.7


def write(path, expert, extra=""):
    path.write_text(
        "include 'dagger_pendulum.gin'\n"
        f"{extra}\n"
        f"saved_policy.root_dir = '{expert}'\n"
        "Trainer.num_env_steps = 80\nTrainer.unroll_length = 10\nmake_environment.num_envs = 2\nMLP.layers = (8,)\n"
        "ReplayBatches.updates_per_env_step = 0.25\nEvaluate.num_episodes = 1\n"
    )
    return [f"--gin_file={path}"]


def test_a_trained_student_is_evaluated_and_loaded_without_its_expert(tmp_path, expert, capsys):
    there, run = shutil.copytree(expert, tmp_path / "expert"), tmp_path / "run"
    assert main(["train", *write(tmp_path / "a.gin", there), f"--root_dir={run}"]) == 0
    shutil.rmtree(there)
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1"]) == 0
    policy = alfish.load(run)
    assert isinstance(policy.algorithm.expert, AbsentExpert)
    assert policy.act([1.0, 0.0, 0.0]).shape == policy.act([1.0, 0.0, 0.0], sample=True).shape == (1,)
    gin.clear_config()
    student = write(tmp_path / "b.gin", run)  # a student is an expert, whose own expert is not read
    assert main(["train", *student, f"--root_dir={tmp_path / 'next'}"]) == 0
    gin.clear_config()
    capsys.readouterr()
    assert main(["train", *write(tmp_path / "a.gin", there), f"--root_dir={tmp_path / 'new'}"]) == 2
    assert "is not a run of `alfish train`" in capsys.readouterr().err


def test_a_run_does_not_continue_with_a_changed_expert_checkpoint(tmp_path, expert):
    there = shutil.copytree(expert, tmp_path / "expert")
    stop_after(make(tmp_path / "run", there), 2)
    alfish.train(root_dir=there, algorithm="PPO", environment="Pendulum-v1", on_config_change="new",
                 **{**EXPERT, "num_env_steps": 128}, **{"Torso.memory": GRU, "GRU.size": 6},
                 transforms=[ObservationNormalizer])  # fmt: skip
    with pytest.raises(UsageError, match=f"{there} has changed since this run was saved: .*restore the content"):
        make(tmp_path / "run", there).train()
    fixed = functools.partial(saved_policy, root_dir=str(there), checkpoint=64)
    make(tmp_path / "run", there, algorithm=functools.partial(DAgger, expert=fixed, beta=0.5, torso=TORSO), batches=(
        functools.partial(ReplayBatches, 500, 8, 3, updates_per_env_step=0.25, warmup_env_steps=0, state_period=10)
    )).close()  # fmt: skip


def test_building_an_expert_leaves_configuration_and_random_numbers_as_they_were(tmp_path, expert):
    gin.parse_config("Linear.start = 0.5")
    torch.manual_seed(1)
    before, text = torch.get_rng_state(), gin.config_str()
    saved_policy(str(expert))
    assert torch.equal(torch.get_rng_state(), before) and gin.config_str() == text


def test_a_data_set_is_not_an_expert(tmp_path):
    (tmp_path / "data_set.json").write_text("{}")
    with pytest.raises(UsageError, match=f"^{tmp_path} is a data set, which cannot label new rows; give a run"):
        saved_policy(str(tmp_path))


def test_another_users_run_cannot_allow_imports_for_its_expert(tmp_path, expert, monkeypatch, capsys):
    """The module that the expert needs is allowed by the student's own configuration, which is not trusted."""
    there = shutil.copytree(expert, tmp_path / "expert")
    config = there / "config.gin"
    config.write_text(f"import lab_of_another\n{config.read_text()}\nPPO.network = @lab_of_another.Net\n")
    (tmp_path / "lab_of_another.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    trusting = write(tmp_path / "a.gin", expert, "saved_policy.allow_import = ['lab_of_another']")
    assert main(["train", *trusting, f"--root_dir={run}", "--gin_param=Trainer.stop_at=40"]) == 0
    gin.clear_config()
    saved = (run / "config.gin").read_text()
    (run / "config.gin").write_text(re.sub(re.escape(str(expert)), str(there), saved))
    assert main(["train", f"--root_dir={run}", "--on_config_change=old"]) == 2
    assert "'lab_of_another', which is not part of alfish" in capsys.readouterr().err
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1"]) == 0  # which does not read the expert
    assert not Path("executed").exists()


# GAIL.


@pytest.fixture(scope="module")
def demonstrations(expert):
    """Episodes of the expert, recorded by its own evaluator."""
    policy = alfish.load(expert)
    environment = functools.partial(make_environment, "Pendulum-v1", env_kwargs={"max_episode_steps": 9})
    evaluator = make_evaluator(environment, policy.algorithm, policy.transforms, num_episodes=4)
    episodes = evaluator.generate_test_episodes(4, seed=0)
    evaluator.close()
    return functools.partial(
        OfflineBuffer, [Arrays(episodes, Spaces(policy.observation_space, policy.action_space))], num_columns=2
    )


def imitate(root_dir, demonstrations, name, part=GAIL, **settings):
    small = functools.partial(MLP, layers=(8,))
    critic = functools.partial(CriticEnsemble, layers=(8,))
    network = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
    inner = {"ppo": functools.partial(PPO, network=network), "appo": functools.partial(APPO, network=network)}
    inner["sac"] = functools.partial(SAC, actor_mlp=small, critic=critic)
    if part is GAIL:
        part = functools.partial(GAIL, gradient_penalty=1.0)
    part = functools.partial(part, demonstrations=demonstrations, layers=(8,))
    algorithm = functools.partial(
        Composed, algorithm=inner[name], rewards=[part], representation=NormalizedObservation, extrinsic_coef=0.0
    )
    on_policy = functools.partial(EpochBatches, num_epochs=2, minibatch_size=7)
    replay = functools.partial(ReplayBatches, 500, 8, warmup_env_steps=20, updates_per_env_step=0.25)
    settings = {"batches": replay if name == "sac" else on_policy, "algorithm": algorithm, **settings}
    return make(root_dir, None, **settings)


PARTS = [("ppo", GAIL), ("sac", GuidedCost)]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_resumed_run_with_demonstrations_is_bit_identical(tmp_path, demonstrations, name, part):
    whole = imitate(tmp_path / "whole", demonstrations, name, part)
    whole.train()
    stop_after(imitate(tmp_path / "cut", demonstrations, name, part), 5)
    torch.manual_seed(99)
    resumed = imitate(tmp_path / "cut", demonstrations, name, part)
    resumed.train()
    assert_same(tensors_of(resumed), tensors_of(whole))
    untrained = imitate(tmp_path / "untrained", demonstrations, name, part)
    pairs = zip(untrained.algorithm.rewards.parameters(), whole.algorithm.rewards.parameters())
    assert not any(torch.equal(a, b) for a, b in pairs)
    untrained.close()


def test_a_run_does_not_continue_with_other_demonstrations(tmp_path, demonstrations):
    stop_after(imitate(tmp_path / "run", demonstrations, "ppo"), 2)
    fewer = functools.partial(demonstrations, top_fraction=0.5)
    with pytest.raises(UsageError, match="has changed since this run was saved: its checksum is .*restore the content"):
        imitate(tmp_path / "run", fewer, "ppo").train()


def test_the_metrics_of_a_run_have_the_environments_rewards(tmp_path, demonstrations):
    report = imitate(tmp_path / "run", demonstrations, "ppo", summary_period=10).train()
    assert report.scalars["metrics/average_return"] < -5, "of Pendulum; a softplus is positive"
    assert report.scalars["train/gail/reward"] > 0 and 0 <= report.scalars["train/gail/accuracy"] <= 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_compiled_updates_with_a_learned_reward_equal_plain_updates(tmp_path, demonstrations, name, part, interpreted):
    found = []
    for is_compiled in (False, True):
        learner = functools.partial(Learner, compile=is_compiled, max_grad_norm=0.5)
        settings = {
            "learner": learner,
            "num_iterations": 3,
            "unroller": functools.partial(SyncUnroller, numpy_policy=None),
        }
        trainer = imitate(tmp_path / str(is_compiled), demonstrations, name, part, **settings)
        trainer.train()
        assert trainer.learner.is_plain != is_compiled and trainer.learner.updates > 0
        found.append(parameters(trainer))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("appo", GAIL), ("sac", GAIL), ("appo", GuidedCost), ("sac", GuidedCost)])
def test_workers_with_demonstrations_in_lockstep_repeat_their_bits(tmp_path, demonstrations, name, part):
    found = []
    for where in ("first", "again"):
        unroller = functools.partial(AsyncUnroller, num_workers=2, mode="lockstep")
        trainer = imitate(tmp_path / where, demonstrations, name, part, unroller=unroller)
        trainer.train()
        found.append(parameters(trainer))
    assert torch.equal(*found)


# The page.

PAGE = (Path(alfish.__file__).parent.parent / "docs" / "compose.md").read_text().partition("## Imitation\n")[2]


@pytest.mark.parametrize("name", ["dagger_pendulum", "gail_pendulum"])
def test_the_examples_of_the_page_train(tmp_path, expert, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(expert, "runs/sac_pendulum")
    assert main(["record", "--root_dir=runs/sac_pendulum", "--num_episodes=2", "--output=data/pendulum/expert-10"]) == 0
    gin.clear_config()
    (text,) = (text for text in re.findall(r"((?:^    .*\n|\n)+)", PAGE, re.M) if f"include '{name}.gin'" in text)
    text = re.sub("^    ", "", text, flags=re.M).partition("include")
    Path("example.gin").write_text(text[1] + text[2].replace("'best'", "'latest'"))
    few = [
        "Trainer.num_iterations=1",
        "Trainer.num_env_steps=None",
        "Trainer.unroll_length=8",
        "Evaluate.num_episodes=1",
        "ReplayBatches.updates_per_env_step=0.5",
        "ReplayBatches.warmup_env_steps=4",
        "ReplayBatches.batch_size=8",
    ]
    assert main(["train", "--gin_file=example.gin", "--root_dir=run", *(f"--gin_param={one}" for one in few)]) == 0


def test_the_controller_of_the_page_is_an_expert(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names = {}
    exec(program, names)
    trainer = make(tmp_path, None, functools.partial(DAgger, expert=names["Brake"], torso=TORSO, beta=1.0), batches=(
        functools.partial(ReplayBatches, 500, 8, updates_per_env_step=0.25, warmup_env_steps=0)
    ))  # fmt: skip
    trainer.train()
    rows = trainer.batches.buffer.read(torch.arange(2), torch.arange(20)[:, None].expand(-1, 2))
    assert torch.equal(rows.info["label"], -rows.time_step.observation[..., 2:].sign())
    assert torch.equal(rows.action, rows.info["label"])
