"""Joint steps: one loop steps environments of the same class, with the same results as separate steps.

A vector class draws all random numbers from one generator, so its episodes differ from those of single environments.
With joint steps, each environment keeps its generator, its state and its time limit, and may be reset, rendered or
stepped individually at any time.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from alfish.nest import Array

NUM_CHECKED = 16  # number of environments in the comparison with single steps


class JointCartPoles:
    """Steps gymnasium's CartPole environments in 1 us instead of 5 us per step and environment.

    gymnasium computes with numpy's scalars. Python's floats give the same bits in a fifth of the time. Only sine and
    cosine are computed by numpy, because Python rounds them differently.

    Args:
      envs: environments that `gymnasium.make` built; see `joint_steps`.
    """

    def __init__(self, envs: Sequence[Any]):
        self._envs = list(envs)
        self._cores = [env.unwrapped for env in envs]

    def step(self, actions: Array, begins: Sequence[bool]) -> Iterator[tuple[Any, ...]]:
        """Steps or resets each environment.

        Args:
          actions: actions `[B]`, 0 or 1.
          begins: flags `[B]` of the environments to reset, whose episodes ended in the last step.

        Returns:
          Observations, rewards, terminations and truncations, `[B]` each.
        """
        if True in begins:
            for env, begin in zip(self._envs, begins):
                if begin:
                    env.reset()
        # After a reset or a change by other code, a state is an array. The array is converted to floats, because
        # computing with numpy scalars is slow.
        states = [core.state if type(core.state) is tuple else core.state.tolist() for core in self._cores]
        angles = np.array([state[2] for state in states])
        trigonometry = zip(np.cos(angles).tolist(), np.sin(angles).tolist())
        rows = []
        for env, core, state, (cos, sin), action, begin in zip(
            self._envs, self._cores, states, trigonometry, actions.tolist(), begins
        ):
            x, speed, angle, angular_speed = state
            reward, terminated, truncated = 0.0, False, False
            if not begin:
                # The operations of CartPoleEnv.step, in the same order.
                force = core.force_mag if action == 1 else -core.force_mag
                total_mass, tau = core.total_mass, core.tau
                push = (force + core.polemass_length * (angular_speed * angular_speed) * sin) / total_mass
                angular_acceleration = (core.gravity * sin - cos * push) / (
                    core.length * (4.0 / 3.0 - core.masspole * (cos * cos) / total_mass)
                )
                acceleration = push - core.polemass_length * angular_acceleration * cos / total_mass
                x, speed = x + tau * speed, speed + tau * acceleration
                angle, angular_speed = angle + tau * angular_speed, angular_speed + tau * angular_acceleration
                edge, limit = core.x_threshold, core.theta_threshold_radians
                terminated = x < -edge or x > edge or angle < -limit or angle > limit
                reward = 1.0
                core.state = x, speed, angle, angular_speed
                if terminated:
                    core.steps_beyond_terminated = 0
                env._elapsed_steps += 1
                truncated = env._elapsed_steps >= env._max_episode_steps
            rows.append(((x, speed, angle, angular_speed), reward, terminated, truncated))
        return zip(*rows)


def joint_steps(envs: Sequence[gymnasium.Env]) -> JointCartPoles | None:
    """Returns joint steps for environments; None if the environments must be stepped one by one.

    The class and all wrappers must be gymnasium's own. A comparison with single environments on this machine must also
    give equal bits, because rounding depends on the versions of gymnasium and numpy.
    """
    return JointCartPoles(envs) if all(map(_is_plain_cart_pole, envs)) and _gives_equal_bits() else None


def _is_plain_cart_pole(env: gymnasium.Env) -> bool:
    """Returns whether joint steps support an environment: gymnasium's CartPole with default rewards and integrator."""
    if type(env) is not TimeLimit or type(env.env) is not OrderEnforcing or type(env.env.env) is not CartPoleEnv:
        return False
    core: Any = env.unwrapped
    if core.spec is None or core.render_mode is not None:
        return False
    return not core.spec.kwargs.get("sutton_barto_reward") and core.kinematics_integrator == "euler"


@functools.cache
def _gives_equal_bits() -> bool:
    """Returns whether joint and single steps give equal bits, for random states, ends and time limits."""
    generator = np.random.default_rng(0)
    joint, single = _limited_cart_poles(), _limited_cart_poles()
    cores = [(ours.unwrapped, theirs.unwrapped) for ours, theirs in zip(joint, single)]
    steps, nobody_begins = JointCartPoles(joint), [False] * NUM_CHECKED
    for _ in range(3):
        actions = generator.integers(2, size=NUM_CHECKED)
        for pair, state in zip(cores, generator.normal(size=(NUM_CHECKED, 4)) * (1.2, 2.0, 0.1, 2.0)):
            for core in pair:
                core.state, core.steps_beyond_terminated = state, None
        try:
            found = [np.asarray(column) for column in steps.step(actions, nobody_begins)]
        except AttributeError:  # the attributes of gymnasium's classes may change in a release
            return False
        expected = list(zip(*(env.step(action) for env, action in zip(single, actions))))
        found[0] = found[0].astype(np.float32)
        if not all(np.array_equal(column, np.asarray(own)) for column, own in zip(found, expected)):
            return False
        if not all(np.array_equal(ours.state, theirs.state) for ours, theirs in cores):
            return False
    return True


def _limited_cart_poles() -> list[Any]:
    """Returns environments after a reset, with time limits of three steps."""
    envs = [TimeLimit(OrderEnforcing(CartPoleEnv()), 3) for _ in range(NUM_CHECKED)]
    for env in envs:
        env.reset()
    return envs
