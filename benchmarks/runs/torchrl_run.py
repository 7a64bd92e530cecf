"""TorchRL's side: the loop of its own PPO example (`sota-implementations/ppo`), not compiled, as that is by default."""

import collections
import functools

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.runs import script

NUM_ENVS, ROLLOUT, NUM_EPOCHS, BATCH_SIZE = 8, 256, 10, 256


def ppo(env_id: str, num_env_steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    env = TransformedEnv(SerialEnv(NUM_ENVS, functools.partial(GymEnv, env_id)), RewardSum())
    env.set_seed(seed)
    observation_size = env.observation_spec["observation"].shape[-1]
    num_actions = env.action_spec.shape[-1]
    mlp = functools.partial(MLP, in_features=observation_size, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    actor: ProbabilisticTensorDictSequential = ProbabilisticActor(
        TensorDictModule(mlp(out_features=num_actions), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(out_features=1), in_keys=["observation"])
    rows = NUM_ENVS * ROLLOUT
    collector = Collector(env, actor, frames_per_batch=rows, total_frames=-(-num_env_steps // rows) * rows)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rows), sampler=SamplerWithoutReplacement(), batch_size=BATCH_SIZE
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_bonus=False,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4, eps=1e-5)
    returns: collections.deque[float] = collections.deque(maxlen=100)
    env_steps, updates, readings = 0, 0, []
    for data in collector:
        with torch.no_grad():
            data = advantage(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(NUM_EPOCHS):
            for batch in buffer:
                losses = loss(batch)
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
        returns.extend(data["next", "episode_reward"][data["next", "done"]].tolist())
        collector.update_policy_weights_()
        env_steps += data.numel()
        readings.append(script.read(env_steps, updates))
    collector.shutdown()
    script.report(readings[0], readings[-1], sum(returns) / len(returns), script.versions("torchrl", "torch"))


RECIPES = {"ppo_cartpole": functools.partial(ppo, "CartPole-v1", 100_000)}

if __name__ == "__main__":
    script.main(RECIPES)
