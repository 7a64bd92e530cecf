"""alfish's side of `benchmarks.iteration`: whole iterations of its trainer.

python -m benchmarks.runs.alfish_iteration_run VARIANT DEVICE NUM_ENVS LENGTH LAYERS THREADS
"""

import functools
import sys
import tempfile

import numpy as np

from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, Torso
from alfish.training.trainer import Trainer
from alfish.unrollers import CompiledUnroller, SyncUnroller
from benchmarks.runs.turns import take_turns

VARIANTS = {
    "numpy": ({"env_id": "CartPole-v1"}, SyncUnroller),
    "envpool": ({"env_id": "CartPole-v1", "vectorization": "envpool"}, SyncUnroller),
    "tensors": ({"env_id": "alfish/CartPole-v1"}, SyncUnroller),
    "compiled": ({"env_id": "alfish/CartPole-v1"}, CompiledUnroller),
}
STEPPING = "envpool_stepping"  # EnvPool's environments with random actions, without a policy
WARM_UP = 25  # iterations in which graphs are made and compared


def main(variant: str, device: str, num_envs: int, length: int, layers: int, threads: int) -> None:
    if variant == STEPPING:
        step_envpool(num_envs, threads)
        return
    settings, unroller = VARIANTS[variant]
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(layers, layers)))
    with tempfile.TemporaryDirectory() as root_dir:
        trainer = Trainer(
            root_dir,
            algorithm=functools.partial(
                PPO, network=functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso), gamma=0.98
            ),
            environment=functools.partial(make_environment, num_envs=num_envs, **settings),
            batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=num_envs * length // 4),
            unroller=unroller,
            learner=functools.partial(Learner, compile=True, learning_rate=1e-3, max_grad_norm=0.5),
            listeners=[],
            unroll_length=length,
            num_env_steps=10**12,
            summary_period=10**6,
            num_threads=threads,
            device=device,
        )
        trainer.start()
        iterations = trainer.iterate()

        def work() -> int:
            before = trainer.clock.env_steps
            next(iterations)
            return int(trainer.clock.env_steps - before)

        for _ in range(WARM_UP):
            work()
        take_turns(work, "alfish", "torch")
        trainer.close()


def step_envpool(num_envs: int, threads: int) -> None:
    import envpool

    environments = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=threads, seed=0)
    environments.reset()
    actions = np.random.default_rng(0).integers(0, 2, (16, num_envs), dtype=np.int32)

    def work() -> int:
        for action in actions:
            environments.step(action)
        return int(actions.size)

    take_turns(work, "envpool")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
