"""rlox's side of `benchmarks.iteration`: its PPO on its own CartPole, which is written in Rust.

python rlox_iteration_run.py NUM_ENVS LENGTH LAYERS THREADS
"""

import sys

import torch
from rlox.algorithms.ppo import PPO
from rlox.policies import DiscretePolicy

from benchmarks.runs.turns import take_turns


def main(num_envs: int, length: int, layers: int, threads: int) -> None:
    torch.set_num_threads(threads)
    rows = num_envs * length
    learner = PPO(
        "CartPole-v1",
        n_envs=num_envs,
        policy=DiscretePolicy(obs_dim=4, n_actions=2, hidden=layers),
        n_steps=length,
        n_epochs=1,
        batch_size=rows // 4,
        learning_rate=1e-3,
        gamma=0.98,
        ent_coef=0.0,
        anneal_lr=False,
    )

    def work() -> int:
        learner.train(rows)
        return rows

    work()
    take_turns(work, "rlox", "torch")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
