"""Diagnostics that compare value estimates with their targets and with observed returns."""

from typing import Any

import gin
import numpy as np
import torch

from alfish import nest
from alfish.data import Experience
from alfish.errors import UsageError
from alfish.functional.values import Scalar, Vector
from alfish.offline import Episode
from alfish.offline.episode import EpisodeEncoder
from alfish.offline.recorded_spaces import Spaces
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.runs.writers import Shown
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, info_of, reading, value_estimates
from alfish.training.evaluator import Evaluator
from alfish.training.listener import Run


@gin.configurable(module="alfish.training.diagnostics")
@checked
class ExplainedVariance(Diagnostic):
    """Explained variance of the value in the last minibatch, after its update: 1 - Var(target - value) / Var(target).

    1 is a perfect prediction, 0 is as good as a constant, and negative values are worse than a constant. The diagnostic
    applies only to algorithms that store value targets (PPO, A2C, APPO). For other algorithms, use `MonteCarlo`.
    """

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        batch, algorithm = update.batch, run.algorithm
        experience = batch.experience
        target = getattr(getattr(experience.info, "algorithm", experience.info), "target", None)
        if not isinstance(target, torch.Tensor):
            return {}
        with reading(algorithm):
            info = info_of(algorithm, experience)
        value = value_estimates(algorithm, info).get("value")
        if value is None:
            return {}
        mask = batch.mask[: len(value)]
        value, target = value[mask].double(), target[: len(value)][mask].double()
        variance = target.var(0, correction=0)
        explained = 1 - (target - value).var(0, correction=0) / variance.clamp(min=1e-12)
        return {"values/explained_variance": float(explained.mean())}


@gin.configurable(module="alfish.training.diagnostics")
@checked
class MonteCarlo(Diagnostic):
    """Compares V and Q with the discounted returns of complete episodes in separate environments.

    Each measurement takes additional environment steps, so this diagnostic is not a default. Returns are computed from
    transformed rewards, so they have the same units as the values. Returns do not include bonuses, such as the entropy
    in SAC's values. The return of a truncated episode bootstraps from the estimate at its last action.

    Args:
      num_episodes: number of complete episodes; each measurement uses the same seeds.
      seed: seed of the first episode; episode k has seed + k.
      sample: whether to act with `rollout_step`, as in training, instead of `predict_step`.
    """

    def __init__(self, num_episodes: PositiveInt = 5, seed: NonNegativeInt = 1_000_000, sample: bool = False):
        self._num_episodes, self._seed, self._sample = num_episodes, seed, sample
        self._evaluator: Evaluator | None = None

    def start(self, run: Run) -> None:
        algorithm = run.algorithm
        if not isinstance(getattr(algorithm, "values", None), Scalar) or algorithm.replay_needs.info:
            raise UsageError(
                f"MonteCarlo cannot measure {type(algorithm).__name__}; it requires an algorithm that has `values`, "
                "from which it reads the discount, and that trains only on data in the rows (Retrace does not); leave "
                "MonteCarlo out of Summaries.diagnostics"
            )
        self._evaluator = run.evaluator(self._num_episodes)
        environment = run.environment
        self._encoder = EpisodeEncoder(Spaces(environment.observation_space, environment.action_space), 1.0)

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        assert self._evaluator is not None
        pairs: dict[str, list[np.ndarray]] = {}  # `[2, K]` each: estimates and returns
        for episode in self._evaluator.test_episodes(self._num_episodes, self._seed, self._sample):
            for name, pair in self._compared(run, episode).items():
                pairs.setdefault(name, []).append(pair)
        shown: dict[str, Shown] = {}
        for name, parts in pairs.items():
            estimate, return_ = np.concatenate(parts, 1)
            shown[f"monte_carlo/{name}"] = float(estimate.mean())
            shown[f"monte_carlo/{name}_bias"] = float((estimate - return_).mean())
            shown[f"monte_carlo/{name}_error"] = float(np.sqrt(((estimate - return_) ** 2).mean()))
            shown["monte_carlo/return"] = float(return_.mean())
        return shown

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def _compared(self, run: Run, episode: Episode) -> dict[str, np.ndarray]:
        """Returns estimates and returns at the rows of an episode, `[2, K]` by the name of the estimate."""
        algorithm, device = run.algorithm, run.device
        values: Any = algorithm.values
        with reading(algorithm):
            rows = nest.tensors(nest.map(lambda leaf: leaf[:, None], self._encoder.rows(episode)), device)
            state = nest.to(run.transforms.initial_state(1), device)
            encoded = rows.time_step._replace(observation=_encoded(run.transforms, rows.time_step.observation))
            step = run.transforms.transform(encoded, state)
            experience = rows._replace(time_step=step, state=nest.to(algorithm.initial_state(1), device))
            if not (algorithm.on_policy or algorithm.replay_needs.recurrent_state):
                experience = _pairs(experience)
            found = value_estimates(algorithm, info_of(algorithm, experience))
            reward, discount = values.reward_and_discount(step)
        length, is_vector, compared = episode.length, isinstance(values, Vector), {}
        for name, estimate in found.items():
            if is_vector and estimate.ndim == 2:  # already summed over entries, so it cannot bootstrap them
                continue
            estimate = estimate.flatten(0, 1)[:length]  # estimates of rows 0 to T-1
            returns = _returns(reward[:, 0], discount[:, 0], None if episode.terminated[-1] else estimate[-1])
            both = [estimate[: len(returns)], returns.to(estimate.dtype)]
            both = [values.scalarized(each) for each in both] if is_vector else both
            compared[name] = torch.stack(both).double().cpu().numpy()
        return compared


def _encoded(transforms: Any, observation: Any) -> Any:
    """Returns observations `[T, 1, ...]` as rows store them."""
    flat = transforms.encode(nest.map(lambda leaf: leaf[:, 0], observation))
    return nest.map(lambda leaf: leaf[:, None], flat)


def _pairs(experience: Experience) -> Experience:
    """Returns rows `[T+1, 1, ...]` of an episode as T windows of two rows, `[2, T, ...]`."""

    def windows(leaf: torch.Tensor) -> torch.Tensor:
        return torch.stack([leaf[:-1, 0], leaf[1:, 0]])

    time_step, action = nest.map(windows, (experience.time_step, experience.action))
    return experience._replace(time_step=time_step, action=action)


def _returns(reward: torch.Tensor, discount: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Returns the discounted returns `[K, ...]` after rows 0 to K-1 of an episode.

    Args:
      reward, discount: rewards and discounts at the rows, `[T+1, ...]`; entry t belongs to the action before row t.
      last: estimate at row T-1, from which the returns of a truncated episode bootstrap, so that K is T - 1. None means
        that the episode terminated, so that K is T.
    """
    end = len(reward) - 1 if last is None else len(reward) - 2
    return_ = torch.zeros_like(reward[0]) if last is None else last
    returns = []
    for t in range(end, 0, -1):
        return_ = reward[t] + discount[t] * return_
        returns.append(return_)
    return torch.stack(returns[::-1]) if returns else reward[:0]
