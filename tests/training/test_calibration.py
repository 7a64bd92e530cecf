"""Runs with `Trainer.calibration`: transforms observe rows first, then their statistics stand still while it trains."""

import functools

import pytest
import torch
from resuming import assert_same, stop_after, tensors_of

from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.networks import MLP, ActorCritic, CriticEnsemble, Torso
from alfish.training.clock import Calibration
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, RewardScale

SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=SMALL)
SMALL_PPO = functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO))
SMALL_SAC = functools.partial(SAC, actor_mlp=SMALL, critic=functools.partial(CriticEnsemble, layers=(8,)))
REPLAY = functools.partial(ReplayBatches, capacity=400, batch_size=4, warmup_env_steps=8, updates_per_env_step=0.25)
STEPS = 16  # of an iteration


class Watch(Listener):
    """Keeps updates, environment steps and statistics after each iteration."""

    def __init__(self):
        self.seen = []

    def after_iteration(self, run, report):
        statistics = {name: value.clone() for name, value in run.transforms.state_dict().items()}
        self.seen.append((report.env_steps, report.updates, statistics))


def make(root_dir, kind="ppo", calibration=0.25, **options):
    on_policy = kind == "ppo"
    if not {"num_updates", "wall_seconds", "num_iterations"} & options.keys():
        options["num_env_steps"] = 10 * STEPS
    defaults = {
        "algorithm": SMALL_PPO if on_policy else SMALL_SAC,
        "environment": functools.partial(make_environment, TensorPointMass, num_envs=2, env_kwargs={"length": 1000}),
        "batches": functools.partial(EpochBatches, num_epochs=1) if on_policy else REPLAY,
        "transforms": [ObservationNormalizer],
        "calibration": calibration,
        "unroll_length": 8,
        "device": "cpu",
    }
    return Trainer(root_dir, **{**defaults, "listeners": [CheckpointSaver(0)], **options})


def watched(*arguments, **options):
    watch = Watch()
    trainer = make(*arguments, **options, listeners=[watch])
    trainer.train()
    return trainer, watch.seen


def count_of(statistics):
    [count] = [value.item() for name, value in statistics.items() if name.endswith("count")]
    return count


@pytest.mark.parametrize(
    ("kind", "calibration", "unrolls"),
    [*(("ppo", *each) for each in [(0.0, 1), (0.2, 2), (0.25, 3), (1.0, 10)]), ("sac", 0.0, 1), ("sac", 0.25, 3)],
)
def test_updates_begin_when_warm_up_ends_and_statistics_stay(tmp_path, kind, calibration, unrolls):
    trainer, seen = watched(tmp_path, kind, calibration)
    assert [env_steps for env_steps, _, _ in seen] == [STEPS * (k + 1) for k in range(10)]
    assert [updates > 0 for _, updates, _ in seen] == [k + 1 >= unrolls for k in range(10)]
    counts = [count_of(statistics) for _, _, statistics in seen]
    assert counts[:unrolls] == sorted(set(counts[:unrolls])) and counts[unrolls - 1] >= STEPS * unrolls
    for _, _, statistics in seen[unrolls:]:
        assert_same(statistics, seen[unrolls - 1][2])
    if kind == "sac":  # the updates that fell due meanwhile are made at its end
        assert [updates for _, updates, _ in seen[unrolls - 1 :]] == [(STEPS * k - 8) // 4 for k in range(unrolls, 11)]


def test_the_first_update_sees_normalized_rows(tmp_path):
    seen = []

    class Watching(PPO):
        def calc_loss(self, experience, info):
            seen.append(experience.time_step.observation.detach().clone())
            return super().calc_loss(experience, info)

    for calibration in (0.0, None):
        seen.clear()
        algorithm = functools.partial(Watching, network=SMALL_PPO.keywords["network"])
        environment = functools.partial(make_environment, "MountainCarContinuous-v0", num_envs=2)
        make(tmp_path / str(calibration), "ppo", calibration, algorithm=algorithm, environment=environment).train()
        mean, std = seen[0].mean((0, 1)), seen[0].std((0, 1))
        is_normal = bool((mean.abs() < 0.2).all() and ((std - 1).abs() < 0.2).all())
        assert is_normal == (calibration == 0.0)


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_without_warm_up_updates_begin_at_once(tmp_path, kind):
    _, seen = watched(tmp_path, kind, None)
    assert seen[0][1] > 0
    counts = [count_of(statistics) for _, _, statistics in seen]
    assert counts == sorted(set(counts))


def test_a_budget_of_seconds_ends_it_after_1000_environment_steps(tmp_path):
    trainer = make(tmp_path, "ppo", 0.1, wall_seconds=1e9)
    trainer.start()
    for report in trainer.iterate():
        assert (report.updates > 0) == (report.env_steps >= 1000)
        if report.updates:
            break
    assert 1000 <= report.env_steps < 1000 + STEPS
    trainer.close()


def test_an_iteration_budget_is_converted_to_steps(tmp_path):
    _, seen = watched(tmp_path, calibration=0.3, num_iterations=10)
    assert [updates > 0 for _, updates, _ in seen] == [k + 1 >= 3 for k in range(10)]


def test_a_budget_of_updates_is_converted_to_steps(tmp_path):
    """Otherwise, updates that wait for the calibration could exceed the budget in one iteration."""
    trainer, seen = watched(tmp_path, "sac", calibration=0.3, num_updates=40)
    assert seen[0][1] == 0 and [updates for _, updates, _ in seen if updates][0] < 20
    assert 40 <= trainer.clock.updates < 40 + 2 * STEPS


def test_transforms_without_statistics_do_not_delay_updates(tmp_path):
    _, seen = watched(tmp_path, calibration=0.5, transforms=[functools.partial(RewardScale, scale=0.5)])
    assert seen[0][1] > 0


def test_it_ends_where_acting_ends(tmp_path):
    options = {"num_iterations": 10, "interaction_env_steps": 2 * STEPS}
    _, seen = watched(tmp_path, "sac", 1.0, **options)
    assert [updates > 0 for _, updates, _ in seen] == [False] + [True] * 9
    assert_same(seen[1][2], seen[-1][2])


def test_fractions_of_unrolls_wait_too(tmp_path):
    """Every second iteration steps no environment."""
    _, seen = watched(tmp_path, "sac", 0.5, unroll_length=0.5)
    assert len(seen) == 160 and all((updates > 0) == (env_steps >= 80) for env_steps, updates, _ in seen)


@pytest.mark.parametrize(("kind", "stop"), [("ppo", 2), ("ppo", 6), ("sac", 2)])
def test_a_run_resumed_during_or_after_warm_up_is_bit_identical(tmp_path, kind, stop):
    whole = make(tmp_path / "whole", kind)
    whole.train()
    cut = stop_after(make(tmp_path / "cut", kind), stop)
    assert (cut.clock.updates > 0) == (stop == 6)
    torch.manual_seed(99)
    resumed = make(tmp_path / "cut", kind)
    resumed.train()
    assert_same(tensors_of(resumed), tensors_of(whole))


def test_a_larger_budget_does_not_let_it_begin_again(tmp_path):
    trainer, seen = watched(tmp_path, "ppo", 0.5)
    trainer = make(tmp_path, "ppo", 0.5)
    trainer.train()
    longer = make(tmp_path, "ppo", 0.5, num_iterations=40)
    longer.train()
    assert longer.clock.iterations == 40 and longer.clock.updates > 2 * trainer.clock.updates
    assert_same(longer.transforms.state_dict(), trainer.transforms.state_dict())


def test_a_checkpoint_of_an_older_version_has_none_of_it():
    calibration = Calibration(0.5, 100)
    calibration.load_state_dict({"is_set": False})
    assert calibration.lasts(49) and not calibration.lasts(50)
    assert not Calibration(None, 100).lasts(0)
