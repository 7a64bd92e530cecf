"""Tasks of `benchmarks.shipped`, and the line that reports an evaluation. Peers import it, so it imports no library."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A shipped conf.

    Attributes:
      name: of the conf, and of the peers' recipes.
      env_id: of its environment.
      env_steps: of a run.
      is_budget: whether that is the conf's own budget.
      period: environment steps between the conf's evaluations.
      threshold: mean return of an evaluation, to which seconds are counted.
    """

    name: str
    env_id: str
    env_steps: int
    is_budget: bool
    period: int
    threshold: float


TASKS = {
    task.name: task
    for task in (
        Task("ppo_cartpole", "CartPole-v1", 50_000, True, 10_000, 475.0),
        Task("dqn_cartpole", "CartPole-v1", 50_000, True, 10_000, 475.0),
        Task("sac_halfcheetah", "HalfCheetah-v5", 30_000, False, 20_000, 1000.0),
        Task("td3_halfcheetah", "HalfCheetah-v5", 30_000, False, 20_000, 1000.0),
        Task("ppo_halfcheetah", "HalfCheetah-v5", 300_000, False, 100_000, 1000.0),
    )
}


def evaluation_line(env_steps: int, mean: float) -> str:
    """Returns an evaluation as alfish prints it."""
    return f"Evaluation at {env_steps:,} steps: return {mean:.2f}"
