"""The rounds of apprenticeship learning: measures the policy, updates the reward, and chooses the resulting policy."""

from collections.abc import Iterator
from typing import Any

import gin
import torch

from alfish import nest
from alfish.algorithms.composition import ApprenticeshipLearning, Composed
from alfish.algorithms.composition.learned_reward import recorded_steps
from alfish.errors import UsageError
from alfish.offline import Arrays, OfflineBuffer, Spaces
from alfish.parameters import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from alfish.training.clock import next_due
from alfish.training.evaluator import Evaluator
from alfish.training.listener import Listener, Report, Run


@gin.configurable(module="alfish")
@checked
class ApprenticeshipRounds(Listener):
    """Ends the rounds of `ApprenticeshipLearning`: measures the policy, and updates the reward.

    A policy is measured as in an evaluation: by whole episodes in separate environments, with `predict_step`. The steps
    of these episodes do not count as environment steps of the run, and their rewards are not read. The first policy is
    measured before training.

    When the run finishes, the policy whose expected features are nearest to the expert's replaces the trained policy,
    before the last evaluation and the last checkpoint. If the budget is raised later, the run continues from the
    trained policy. The paper also allows a mixture of the policies of all rounds, which this listener does not build.

    Scalars: `appl/distance`, the distance of the policy's features from the expert's; `appl/mixture_distance`, the
    distance of the mixture's features; and `appl/round`, the number of the round, which is 0
    for the measurement before training.

    Args:
      period: number of clock steps of a round.
      num_episodes: number of episodes that measure a policy; each policy has the same initial states.
      num_envs: number of environments that step together; the result does not depend on it.
      seed: seed of the first episode; episode k has seed + k.
      epsilon: distance of the mixture from the expert below which the run stops early; 0 means never.
    """

    changes_algorithm = True

    def __init__(
        self,
        period: PositiveInt = 10_000,
        num_episodes: PositiveInt = 20,
        num_envs: PositiveInt = 8,
        seed: NonNegativeInt = 1_000_000,
        epsilon: NonNegativeFloat = 0.0,
    ):
        self._period = self._next = period
        self._num_episodes = num_episodes
        self._num_envs = num_envs
        self._seed = seed
        self._epsilon = epsilon
        self._evaluator: Evaluator | None = None
        self._last: int | None = None  # clock steps at the end of the newest round
        self._nearest: dict[str, Any] | None = None  # distance, round, and tensors of the nearest policy so far
        self._trained: dict[str, torch.Tensor] | None = None  # tensors of the trained policy, if it was replaced

    def start(self, run: Run) -> None:
        part = _part(run)
        self._evaluator = run.evaluator(self._num_episodes, self._num_envs)
        self._next = next_due(run.clock.value, self._period, self._next)
        if self._trained is not None and not run.clock.finished:  # the budget was raised
            _write(run.algorithm, self._trained)
            self._trained = None
        if int(part.num_rounds) == 0:
            self._close_round(run, part)

    def is_behind(self, run: Run) -> bool:
        if run.clock.finished:
            return self._trained is None
        return run.clock.value >= self._next

    def after_iteration(self, run: Run, report: Report) -> None:
        # A round that is due during an interruption is made after the resume.
        if not self.is_behind(run) or (run.signals.number is not None and not run.clock.finished):
            return
        part = _part(run)
        if self._last != report.clock:
            with run.signals.breaking():
                report.scalars |= self._close_round(run, part)
            self._next = next_due(report.clock, self._period)
        if run.clock.finished:
            assert self._nearest is not None
            self._trained = _copies(run.algorithm)
            _write(run.algorithm, self._nearest["policy"])
            run.log(
                f"Returned the policy of round {self._nearest['round']}, at {self._nearest['clock']:,} steps, whose "
                f"features are {self._nearest['distance']:.4g} from the expert's"
            )

    def _close_round(self, run: Run, part: ApprenticeshipLearning) -> dict[str, float]:
        """Measures the policy and updates the reward; returns scalars for the report."""
        assert self._evaluator is not None
        episodes = self._evaluator.generate_test_episodes(self._num_episodes, self._seed)
        environment = self._evaluator.environment
        known = Spaces(environment.observation_space, environment.action_space)
        data = OfflineBuffer([Arrays(episodes, known)], num_columns=1)
        arrived = recorded_steps(data).next_observation
        found = part.expectation(nest.to(arrived, part.weights.device), [episode.length for episode in data.episodes])
        distance, mixture_distance = part.close_round(found)
        number, self._last = int(part.num_rounds) - 1, run.clock.value
        if self._nearest is None or distance < self._nearest["distance"]:
            policy = _copies(run.algorithm)
            self._nearest = {"distance": distance, "round": number, "clock": self._last, "policy": policy}
        run.log(
            f"Round {number}: features of the policy are {distance:.4g} from the expert's, features of the mixture "
            f"{mixture_distance:.4g}"
        )
        if number > 0 and mixture_distance < self._epsilon:
            run.stop(f"the mixture is {mixture_distance:.4g} from the expert (ApprenticeshipRounds.epsilon)")
        return {"appl/distance": distance, "appl/mixture_distance": mixture_distance, "appl/round": float(number)}

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "last": self._last, "nearest": self._nearest, "trained": self._trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._last = state["next"], state["last"]
        self._nearest, self._trained = state["nearest"], state["trained"]


def _part(run: Run) -> ApprenticeshipLearning:
    """Returns the first `ApprenticeshipLearning` of a run; raises UsageError if there is none."""
    rewards = run.algorithm.rewards.values() if isinstance(run.algorithm, Composed) else ()
    found = [part for part in rewards if isinstance(part, ApprenticeshipLearning)]
    if not found:
        raise UsageError(
            "ApprenticeshipRounds closes the rounds of ApprenticeshipLearning, which this run does not have; bind "
            "Trainer.algorithm = @Composed and Composed.rewards = [@ApprenticeshipLearning], or leave the listener out"
        )
    return found[0]


def _tensors(algorithm: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers of the wrapped algorithm and of the representation."""
    for name, tensor in (*algorithm.named_parameters(), *algorithm.named_buffers()):
        if not name.startswith("rewards.") and not name.endswith("progress"):
            yield name, tensor.detach()


def _copies(algorithm: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _tensors(algorithm)}


def _write(algorithm: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(algorithm):
            tensor.copy_(tensors[name])
