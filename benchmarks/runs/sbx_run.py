"""SBX's side: stable-baselines3's interface, environments and rows, with networks and updates in JAX.

It counts updates as stable-baselines3 does: epochs for PPO, gradient steps for the others.
"""

import functools

import jax
import sbx

from benchmarks.runs import script
from benchmarks.runs.sb3_run import actor_critic, dqn, ppo

PPO, DQN, OTHER = (
    functools.partial(make, versions=f"sbx-rl {sbx.__version__}, jax {jax.__version__}")
    for make in (ppo, dqn, actor_critic)
)
RECIPES = {
    "ppo_cartpole": functools.partial(PPO, sbx.PPO, "CartPole-v1", 100_000),
    "ppo_halfcheetah": functools.partial(PPO, sbx.PPO, "HalfCheetah-v5", 100_000),
    "dqn_cartpole": functools.partial(DQN, sbx.DQN, "CartPole-v1", 30_000),
    "sac_halfcheetah": functools.partial(OTHER, sbx.SAC, "HalfCheetah-v5", 3_000),
    "td3_halfcheetah": functools.partial(OTHER, sbx.TD3, "HalfCheetah-v5", 3_000),
}

if __name__ == "__main__":
    script.main(RECIPES)
