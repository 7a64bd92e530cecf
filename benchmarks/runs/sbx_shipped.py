"""SBX's side of `benchmarks.shipped`: stable-baselines3's environments and evaluations, with networks in JAX."""

import functools

import flax.linen
import sbx

from benchmarks.runs import sb3_shipped

RECIPES = {
    "ppo_cartpole": functools.partial(sb3_shipped.ppo_cartpole, algorithm=sbx.PPO),
    "dqn_cartpole": functools.partial(sb3_shipped.dqn_cartpole, algorithm=sbx.DQN),
    "sac_halfcheetah": functools.partial(sb3_shipped.sac_halfcheetah, algorithm=sbx.SAC, qf_learning_rate=1e-3),
    "td3_halfcheetah": functools.partial(sb3_shipped.td3_halfcheetah, algorithm=sbx.TD3, qf_learning_rate=1e-3),
    "ppo_halfcheetah": functools.partial(sb3_shipped.ppo_halfcheetah, algorithm=sbx.PPO, activation=flax.linen.relu),
}

if __name__ == "__main__":
    sb3_shipped.main(RECIPES)
