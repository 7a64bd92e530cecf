"""Commands of short runs."""

TINY = ["MLP.layers=(8,)", "EpochBatches.num_epochs=1", "Trainer.num_env_steps=600", "Evaluate.num_episodes=2"]


def train(root_dir, *parameters, conf="ppo_cartpole.gin", flags=()):
    """Arguments of the command that trains PPO on CartPole, or another configuration."""
    files = [f"--gin_file={one}" for one in ([conf] if isinstance(conf, str) else conf)]
    return ["train", *files, f"--root_dir={root_dir}", *(f"--gin_param={one}" for one in parameters), *flags]
