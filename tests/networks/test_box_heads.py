"""Heads of Box actions: their first policies, their bounds, and training with each."""

import csv

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.functional.beta import Beta
from alfish.functional.distributions import DiagonalNormal, Joint
from alfish.networks import BetaHead, BoundedMeanHead, NormalHead, PolicyHead, StateDependentNormalHead

BOX = spaces.Box(-1, 1, (2,), np.float32)
FEATURES = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("head", [NormalHead, BoundedMeanHead, StateDependentNormalHead, BetaHead])
def test_the_first_policy_is_near_0_whatever_the_features_are(head):
    mode = PolicyHead(5, BOX, box=head)(FEATURES).mode()
    assert mode.shape == (64, 2) and mode.abs().max() < 0.05


def test_each_leaf_of_a_nest_has_the_head_of_its_type():
    policy = PolicyHead(5, {"move": BOX, "jump": spaces.Discrete(2)}, box=BetaHead)(FEATURES)
    assert isinstance(policy, Joint) and isinstance(policy.parts["move"], Beta)
    assert policy.sample()["jump"].dtype == torch.int64 and policy.log_prob(policy.sample()).shape == (64,)
    assert isinstance(PolicyHead(5, BOX)(FEATURES), DiagonalNormal)


def test_a_bounded_mean_is_linear_near_0():
    head = BoundedMeanHead(5, BOX, bound=1.5)
    torch.testing.assert_close(head(1e-3 * FEATURES).mean, head.linear(1e-3 * FEATURES), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        head.linear.weight.mul_(1e4)
        mean = head(FEATURES).mean
    assert mean.abs().max() <= 1.5 and mean.abs().max() > 1.49


def test_state_dependent_deviations_stay_in_bounds():
    head = StateDependentNormalHead(5, BOX, initial_log_std=-0.5, min_log_std=-3.0, max_log_std=1.0)
    torch.testing.assert_close(head(0 * FEATURES).log_std, torch.full((64, 2), -0.5))
    with torch.no_grad():
        head.linear.weight.mul_(1e4)
        log_std = head(FEATURES).log_std
    assert log_std.min() < -2.9 and log_std.max() > 0.9 and log_std.min() >= -3 and log_std.max() <= 1
    with pytest.raises(UsageError, match="initial_log_std is 2.0; it must be between"):
        StateDependentNormalHead(5, BOX, initial_log_std=2.0)


def test_parameters_of_a_beta_are_above_1_for_any_features():
    head = BetaHead(5, BOX)
    with torch.no_grad():
        head.linear.weight.mul_(1e5)
        policy = head(FEATURES)
    assert min(policy.alpha.min(), policy.beta.min()) > 1
    assert policy.mode().isfinite().all() and policy.entropy().isfinite().all()


def test_a_beta_needs_bounds():
    with pytest.raises(UsageError, match="no upper bound.*action_bounds"):
        BetaHead(5, spaces.Box(0, np.inf, (2,), np.float32))


@pytest.mark.parametrize("head", ["BoundedMeanHead", "StateDependentNormalHead", "BetaHead"])
def test_ppo_trains_with_the_head_and_is_evaluated(head, tmp_path):
    settings = [f"PolicyHead.box=@{head}", "Trainer.num_env_steps=1024", "Trainer.unroll_length=64"]
    settings += ["EpochBatches.num_epochs=2", "Evaluate.num_episodes=1", "Learner.compile=False"]
    command = ["train", "--gin_file=ppo_pendulum.gin", f"--root_dir={tmp_path}"]
    assert main([*command, *(f"--gin_param={setting}" for setting in settings)]) == 0
    with open(tmp_path / "metrics.csv") as file:
        assert float(list(csv.DictReader(file))[-1]["train/loss"]) > 0
