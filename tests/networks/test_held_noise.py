"""Exploration noise that is kept for several steps."""

import pytest
import torch

from alfish.functional.distributions import SquashedNormal
from alfish.networks.hybrid import HeldNoise, HybridPolicy


def policy(mean, std=0.5):
    return HybridPolicy(SquashedNormal(mean, torch.full_like(mean, std).log()), None)


def unrolled(noise, num_steps, batch_size, state=None):
    """Noise of each step, read back from the actions, and the last state."""
    state, found = state or noise.initial_state(batch_size), []
    for k in range(num_steps):
        mean = torch.full((batch_size, 2), 0.01 * k)
        action, state = noise.sample(policy(mean), state)
        found.append((torch.atanh(action.box.double()) - mean) / 0.5)
    return torch.stack(found), state


def test_lengths_have_the_distribution_of_the_setting():
    torch.manual_seed(0)
    noise = HeldNoise(2, longest=3, exponent=1.0)
    _, state = noise.sample(policy(torch.zeros(60_000, 2)), noise.initial_state(60_000))
    shares = torch.bincount(state["left"], minlength=3) / 60_000  # 1, 1/2, 1/3 over their sum
    torch.testing.assert_close(shares, torch.tensor([6.0, 3.0, 2.0]) / 11, atol=0.01, rtol=0)


def test_published_setting_has_63_percent_single_steps_and_mean_2_1():
    torch.manual_seed(0)
    noise = HeldNoise(1)
    _, state = noise.sample(policy(torch.zeros(200_000, 1)), noise.initial_state(200_000))
    length = state["left"] + 1
    assert length.min() == 1 and length.max() == 16
    assert abs((length == 1).float().mean() - 0.631) < 0.005 and abs(length.float().mean() - 2.134) < 0.03


def test_noise_is_kept_for_some_steps_in_each_environment():
    torch.manual_seed(0)
    noise = HeldNoise(2, longest=4, exponent=0.0)
    state, last = noise.initial_state(50), None
    for _ in range(20):
        left = state["left"]
        action, state = noise.sample(policy(torch.zeros(50, 2)), state)
        if last is not None:
            same = (state["noise"] == last).all(-1)
            assert torch.equal(same, left > 0)
            torch.testing.assert_close(state["left"][same], left[same] - 1)
        last = state["noise"]
        torch.testing.assert_close(action.box, torch.tanh(0.5 * state["noise"]))
    assert len(last.unique(dim=0)) == 50


def test_the_action_follows_the_policy_while_noise_is_kept():
    noise = HeldNoise(2)
    state = {"noise": torch.ones(1, 2), "left": torch.tensor([3])}
    action, _ = noise.sample(policy(torch.full((1, 2), 0.3), std=0.2), state)
    torch.testing.assert_close(action.box, torch.full((1, 2), 0.5).tanh())


@pytest.mark.parametrize("num_kept", [1, 4, 7])
def test_a_resume_continues_the_same_noise(num_kept):
    noise = HeldNoise(2)
    torch.manual_seed(1)
    whole, _ = unrolled(noise, 10, 5)
    torch.manual_seed(1)
    _, state = unrolled(noise, num_kept, 5)
    kept, generator = {name: leaf.clone() for name, leaf in state.items()}, torch.get_rng_state()
    torch.manual_seed(7)
    torch.set_rng_state(generator)
    rest = []
    for k in range(num_kept, 10):
        mean = torch.full((5, 2), 0.01 * k)
        action, kept = noise.sample(policy(mean), kept)
        rest.append((torch.atanh(action.box.double()) - mean) / 0.5)
    assert torch.equal(torch.stack(rest), whole[num_kept:])


def test_length_one_is_noise_of_each_step():
    torch.manual_seed(0)
    found, state = unrolled(HeldNoise(2, longest=1), 6, 4)
    assert len(found.reshape(-1, 2).unique(dim=0)) == 24 and not state["left"].any()
