"""JAX's side of `benchmarks.iteration`: PPO as one compiled function, in the manner of PureJaxRL.

    python jax_iteration_run.py ENVIRONMENT NUM_ENVS LENGTH LAYERS

`own` is CartPole's equations for one environment, vectorized by `jax.vmap`; `gymnax` is the CartPole of gymnax. The
networks, the loss, the optimizer and the numbers of rows are those of alfish's side. Time limits are bootstrapped from
the final observations, as in alfish.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import gymnax
import jax
import jax.numpy as jnp

from benchmarks.runs.turns import take_turns

GAMMA, LAMBDA, CLIP, VALUE_COEF, ENTROPY_COEF = 0.98, 0.95, 0.2, 0.5, 0.0
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 0.5
MINIBATCHES = 4
ITERATIONS = 8  # iterations in a call; a call from Python then takes a negligible time

Key = Any
Nest = Any


def own_reset(key: Key) -> tuple[jax.Array, Nest]:
    """Returns the first observation and the state, an observation and the number of steps."""
    observation = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    return observation, (observation, jnp.int32(0))


def own_step(key: Key, state: Nest, action: jax.Array) -> tuple[jax.Array, Nest, jax.Array, jax.Array, jax.Array]:
    """Returns the next observation, the next state, the observation before a reset, and whether and how it ended."""
    (x, x_dot, theta, theta_dot), count = state
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acceleration = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    x_acceleration = push - 0.05 * theta_acceleration * cos / 1.1
    last = jnp.stack(
        [
            x + 0.02 * x_dot,
            x_dot + 0.02 * x_acceleration,
            theta + 0.02 * theta_dot,
            theta_dot + 0.02 * theta_acceleration,
        ]
    )
    terminated = (jnp.abs(last[0]) > 2.4) | (jnp.abs(last[2]) > 12 * jnp.pi / 180)
    truncated = ~terminated & (count + 1 >= 500)
    first, fresh = own_reset(key)
    done = terminated | truncated
    following = jax.tree.map(functools.partial(jnp.where, done), fresh, (last, count + 1))
    return jnp.where(done, first, last), following, last, terminated, truncated


def of_gymnax() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns `reset` and `step` of gymnax's CartPole, with the results of `own_reset` and `own_step`."""
    environment, parameters = gymnax.make("CartPole-v1")

    def step(key: Key, state: Nest, action: jax.Array) -> tuple[Any, ...]:
        last, next_state, _, done, _ = environment.step_env(key, state, action, parameters)
        truncated = done & (next_state.time >= parameters.max_steps_in_episode)
        first, fresh = environment.reset_env(key, parameters)
        following = jax.tree.map(functools.partial(jnp.where, done), fresh, next_state)
        return jnp.where(done, first, last), following, last, done & ~truncated, truncated

    return lambda key: environment.reset_env(key, parameters), step


def network(key: Key, sizes: list[int], gain: float) -> list[Nest]:
    """Returns weights and biases of layers; `gain` is the last layer's."""
    keys = jax.random.split(key, len(sizes) - 1)
    gains = [2**0.5] * (len(sizes) - 2) + [gain]
    make = [jax.nn.initializers.orthogonal(each) for each in gains]
    return [
        (one(key, (inputs, outputs)), jnp.zeros(outputs))
        for one, key, inputs, outputs in zip(make, keys, sizes, sizes[1:])
    ]


def apply(layers: list[Nest], x: jax.Array) -> jax.Array:
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def loss(parameters: Nest, rows: Nest) -> jax.Array:
    """Returns PPO's loss; advantages are normalized over the minibatch."""
    actor, critic = parameters
    observation, action, log_prob, advantage, returns = rows
    log_probs = jax.nn.log_softmax(apply(actor, observation))
    ratio = jnp.exp(jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0] - log_prob)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = jnp.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(1)
    error = apply(critic, observation)[:, 0] - returns
    return (0.5 * VALUE_COEF * error**2 - surrogate - ENTROPY_COEF * entropy).mean()


def update(state: Nest, rows: Nest) -> tuple[Nest, jax.Array]:
    """Makes a step of Adam with a clipped gradient; returns the new state and the loss."""
    parameters, first, second, count = state
    value, gradient = jax.value_and_grad(loss)(parameters, rows)
    norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, MAX_GRAD_NORM / (norm + 1e-6)), gradient)
    count += 1
    first = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, first, gradient)
    second = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new**2, second, gradient)
    rate, scale = LEARNING_RATE / (1 - 0.9**count), 1 - 0.999**count
    parameters = jax.tree.map(
        lambda leaf, m, v: leaf - rate * m / (jnp.sqrt(v / scale) + 1e-5), parameters, first, second
    )
    return (parameters, first, second, count), value


def main(environment: str, num_envs: int, length: int, layers: int) -> None:
    reset, step = of_gymnax() if environment == "gymnax" else (own_reset, own_step)
    vector_step = jax.vmap(step)

    def vector_steps(parameters: Nest, carry: Nest, key: Key) -> tuple[Nest, Nest]:
        observation, state, episode_return = carry
        of_action, of_steps = jax.random.split(key)
        log_probs = jax.nn.log_softmax(apply(parameters[0], observation))
        action = jax.random.categorical(of_action, log_probs)
        log_prob = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
        keys = jax.random.split(of_steps, num_envs)
        following, state, last, terminated, truncated = vector_step(keys, state, action)
        episode_return += 1.0
        done = terminated | truncated
        finished = jnp.where(done, episode_return, 0)
        row = observation, action, log_prob, last, terminated, truncated, finished
        return (following, state, jnp.where(done, 0, episode_return)), row

    def iteration(carry: Nest, key: Key) -> tuple[Nest, Nest]:
        training, acting = carry
        parameters = training[0]
        of_unroll, of_order = jax.random.split(key)
        acting, rows = jax.lax.scan(
            functools.partial(vector_steps, parameters), acting, jax.random.split(of_unroll, length)
        )
        observation, action, log_prob, last, terminated, truncated, finished = rows
        value = apply(parameters[1], jnp.concatenate([observation, acting[0][None]]))[..., 0]
        value_of_last = apply(parameters[1], last)[..., 0]
        following = jnp.where(terminated, 0, jnp.where(truncated, value_of_last, value[1:]))
        error = 1.0 + GAMMA * following - value[:-1]
        decay = jnp.where(terminated | truncated, 0, GAMMA * LAMBDA)

        def earlier(later: jax.Array, here: Nest) -> tuple[jax.Array, jax.Array]:
            advantage = here[0] + here[1] * later
            return advantage, advantage

        _, advantage = jax.lax.scan(earlier, jnp.zeros(num_envs), (error, decay), reverse=True, unroll=16)
        given = observation, action, log_prob, advantage, advantage + value[:-1]
        flat = jax.tree.map(lambda leaf: leaf.reshape(length * num_envs, *leaf.shape[2:]), given)
        order = jax.random.permutation(of_order, length * num_envs).reshape(MINIBATCHES, -1)
        training, losses = jax.lax.scan(
            lambda state, index: update(state, jax.tree.map(lambda leaf: leaf[index], flat)), training, order
        )
        num_ends = (terminated | truncated).sum()
        return (training, acting), (num_ends, finished.sum(), losses.mean())

    iterations = jax.jit(lambda carry, keys: jax.lax.scan(iteration, carry, keys))
    key, of_actor, of_critic, of_reset = jax.random.split(jax.random.key(0), 4)
    parameters = network(of_actor, [4, layers, layers, 2], 0.01), network(of_critic, [4, layers, layers, 1], 1.0)
    first, second = jax.tree.map(jnp.zeros_like, parameters), jax.tree.map(jnp.zeros_like, parameters)
    observation, state = jax.vmap(reset)(jax.random.split(of_reset, num_envs))
    carry = (parameters, first, second, jnp.float32(0)), (observation, state, jnp.zeros(num_envs))

    def work() -> int:
        nonlocal carry, key
        key, own = jax.random.split(key)
        carry, (num_ends, returns, _) = iterations(carry, jax.random.split(own, ITERATIONS))
        work.mean_return = float(returns[-1] / jnp.maximum(num_ends[-1], 1))  # type: ignore[attr-defined]
        return ITERATIONS * num_envs * length

    for _ in range(2):
        work()
    take_turns(work, *(["jax", "gymnax"] if environment == "gymnax" else ["jax"]))
    print(f"mean return of the last unroll's episodes: {work.mean_return:.0f}", file=sys.stderr)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
