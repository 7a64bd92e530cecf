"""The adapters of mjlab, rsl_rl and Playground with these packages themselves, where they are installed.

pip install mjlab==1.6.0 torch==2.13.0; pip install 'alfish[playground]'. A test compiles for one or two minutes.
"""

import pytest
import torch

from alfish import nest
from alfish.data import StepType
from alfish.environments import SimulatorEnvironment

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # warnings of other packages

B, LENGTH = 8, 5
ACTIONS = torch.rand(3 * LENGTH, B, 1, generator=torch.Generator().manual_seed(0)) - 0.5


def steps_of(simulator, **options):
    """Yields the steps of three episodes, and checks that later steps do not change their tensors."""
    environment = SimulatorEnvironment(simulator, seed=3, **options)
    environment.reset()
    kept = []
    for action in ACTIONS:
        step = environment.step(action)
        resets, first = environment.take_resets()
        tensors = nest.leaves((step.observation, step.reward, step.step_type, step.discount))
        kept.extend((tensor, tensor.clone()) for tensor in tensors)
        yield step, resets, first
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    environment.close()


def assert_episodes_of_length(make):
    """Checks episodes that end after `LENGTH` steps beside those of the same environments with a longer limit.

    Args:
      make: function that makes a simulator from the number of steps of an episode.
    """
    unlimited = [step for step, _, _ in steps_of(make(100 * LENGTH))]
    for number, (step, resets, first) in enumerate(steps_of(make(LENGTH)), 1):
        is_last = number % LENGTH == 0
        assert (step.step_type == (StepType.LAST if is_last else StepType.MID)).all()
        assert (step.discount == 1).all() and step.reward.isfinite().all()
        assert resets.tolist() == [is_last] * B
        if number <= LENGTH:
            expected = unlimited[number - 1]
            torch.testing.assert_close(step.observation, expected.observation)
            torch.testing.assert_close(step.reward, expected.reward)
        if is_last:
            final, begun = nest.leaves(step.observation)[0], nest.leaves(first.observation)[0]
            assert (final != begun).any(-1).all()


@pytest.fixture
def mjlab():
    """Makes a cart with a pole from the number of steps of an episode, which take 0.05 s each."""
    pytest.importorskip("mjlab", reason="mjlab is not installed: pip install 'mjlab>=1.6'")
    from alfish.simulators.mjlab import Mjlab

    return lambda length: Mjlab(
        "Mjlab-Cartpole-Balance", B, seed=3, device="cpu", cfg={"episode_length_s": (length - 0.5) * 0.05}
    )


def test_mjlab_returns_final_observations_of_truncated_episodes(mjlab):
    assert_episodes_of_length(mjlab)


def test_the_rsl_rl_interface_of_mjlab_gives_the_same_steps_without_final_observations(mjlab):
    from mjlab.rl import RslRlVecEnvWrapper

    from alfish.simulators.rsl_rl import RslRl

    def wrapped(num_envs):
        simulator = mjlab(LENGTH)
        simulator.env.cfg.auto_reset = True
        return RslRlVecEnvWrapper(simulator.env)

    # One after the other, because mjlab draws from torch's global generator.
    steps, expected = list(steps_of(RslRl(wrapped, B), final_observation="drop")), list(steps_of(mjlab(LENGTH)))
    for (step, resets, first), (same, same_resets, same_first) in zip(steps, expected, strict=True):
        assert torch.equal(step.reward, same.reward) and torch.equal(step.step_type, same.step_type)
        assert torch.equal(resets, same_resets)
        for key, leaf in (first if resets.all() else step).observation.items():
            assert torch.equal(leaf, (same_first if resets.all() else same).observation[key])


def test_playground_returns_final_observations_of_truncated_episodes():
    pytest.importorskip("mujoco_playground", reason="Playground is not installed: pip install 'alfish[playground]'")
    from alfish.simulators.brax_environment import PlaygroundEnvironment

    assert_episodes_of_length(
        lambda length: PlaygroundEnvironment(
            "CartpoleBalance", B, seed=3, config={"impl": "jax", "episode_length": length}
        )
    )
