"""One of several policies: its settings, and the parts of a run that belong to it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import gin
import numpy as np
import torch

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience
from alfish.environments.games import Games, Group
from alfish.errors import UsageError
from alfish.learner.batches import Batches, EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import Metrics
from alfish.offline.recorded_spaces import TrainedSpaces
from alfish.parameters import Range, checked
from alfish.parameters.parts import build
from alfish.policies.lineup import Lineup
from alfish.policies.networks import after_iteration, make_networks, observe
from alfish.policies.seat import Seat
from alfish.runs.random_state import RandomStream
from alfish.specs import reward_names
from alfish.transforms import Transforms

_PURPOSE = 11  # entry of the seeds of streams, so that they differ from other seeds of the run


@gin.configurable(module="alfish.policies")
@checked
class PolicySettings:
    """Settings of one of several policies.

    A policy's settings and parts are built in the gin scope of its name: `runner/Learner.learning_rate = 1e-3` is of
    the policy `runner`, and `Learner.learning_rate` of all policies without a value of their own.

    Args:
      algorithm, transforms, batches, learner: arguments as of `Trainer`; None means Trainer's.
      trains: whether the policy learns; if not, it only acts.
      seed: seed of its parameters and its random numbers; None means a seed that follows from the run's seed and from
        the place of the policy among all.
    """

    def __init__(
        self,
        algorithm: Callable[..., RLAlgorithm] | None = None,
        transforms: Sequence[Callable[..., Any]] | None = None,
        batches: Callable[[], Batches] | None = None,
        learner: Callable[[RLAlgorithm], Learner] | None = None,
        trains: bool = True,
        seed: Annotated[int, Range(0, 2**63 - 1)] | None = None,
    ):
        self.algorithm, self.transforms, self.batches, self.learner = algorithm, transforms, batches, learner
        self.trains, self.seed = trains, seed


class Member:
    """One of several policies, with the parts of a run that belong to it.

    Args:
      name: name of the policy.
      number: place of the policy among all, from 0.
      lineup: lineup of all policies.
      games: games to play.
      defaults: Trainer's values of the settings that a policy may have of its own.
      metrics: factories of metrics; None means `DEFAULT_METRICS`.
      seed: seed of the run.
      device: device of the networks.
      progress: progress of the run, which all policies share, float64 0-d.

    Attributes:
      group: group of the policy's agents.
      trains: whether the policy learns.
      algorithm, transforms, batches, seat, learner, metrics: parts of the policy.
      stream: random numbers of the policy, in which it is built, acts and trains.
      num_steps: number of environment steps of the policy so far.
      steps_per_step: expected number of environment steps of the policy in a step of all games.

    Raises:
      UsageError: parts do not fit one another.
    """

    def __init__(
        self,
        name: str,
        number: int,
        lineup: Lineup,
        games: Games,
        defaults: Mapping[str, Any],
        metrics: Sequence[Callable[[], Any]],
        seed: int,
        device: torch.device,
        progress: torch.Tensor,
    ):
        self.name, self.num_steps = name, 0
        self.group: Group = games.groups[lineup.group[name]]
        self.steps_per_step = lineup.share(name) / games.turns
        has_gaps = games.has_gaps or not lineup.is_fixed
        with gin.config_scope(name):
            settings = build(PolicySettings, PolicySettings, f"{name}/PolicySettings")
            self.trains = settings.trains
            own = {key: _chosen(getattr(settings, key), default) for key, default in defaults.items()}
            drawn = int(np.random.SeedSequence([seed, number, _PURPOSE]).generate_state(1)[0])
            self.stream = RandomStream(_chosen(settings.seed, drawn), device)
            with self.stream:
                specs = self.group.observation_spec, self.group.action_spec, self.group.reward_spec
                self.algorithm, self.transforms = make_networks(own["algorithm"], own["transforms"], *specs, device)
                for module in self.algorithm.modules():
                    if isinstance(module, RLAlgorithm):
                        module.progress = progress  # before a learner is built, which reads it
                self.batches = self._make_batches(own["batches"])
                networks: tuple[RLAlgorithm, Transforms] = self.algorithm, self.transforms
                self.seat = Seat(games, self.group, lineup.columns[name], *networks, self.stream, has_gaps)
                self.learner = build(own["learner"], Learner, f"{name}/Trainer.learner", self.algorithm)
                self.metrics = self._make_metrics(metrics)

    def plan(self, unroll_length: float, num_unrolls: float) -> None:
        """Plans the parts for a number of unrolls.

        Args:
          unroll_length: number of steps of all games in an unroll.
          num_unrolls: expected number of unrolls of the run; inf if unknown.
        """
        with gin.config_scope(self.name), self.stream:
            if isinstance(self.batches, EpochBatches):
                self.batches.expected_rows = unroll_length * self.steps_per_step if self.seat.has_gaps else None
            self.batches.plan(num_unrolls * unroll_length * self.steps_per_step)
            self.batches.bind(self.algorithm, self.transforms, unroll_length, self.seat.num_columns)
            self.seat.stores_states = self.batches.stores_states
            self.learner.plan(num_unrolls * self.batches.updates_per_iteration, self.batches.rows_per_update)

    def observe(self, experience: Experience) -> None:
        """Lets the transforms observe the rows of an unroll."""
        with self.stream:
            observe(self.algorithm, self.transforms, experience)

    def after_iteration(self, experience: Experience, observes: bool) -> None:
        """Shows the rows of an unroll to the algorithm, and to the transforms if these observe all unrolls."""
        with self.stream:
            after_iteration(self.algorithm, self.transforms, experience, observes)

    def spaces(self) -> TrainedSpaces:
        """Returns the spaces of the policy's agents."""
        return TrainedSpaces(self.group.observation_space, self.group.action_space, self.group.reward_spec)

    def _make_metrics(self, metrics: Sequence[Callable[[], Any]]) -> Metrics:
        """Returns the metrics of the policy, and tells its seat what they read."""
        names, weights = reward_names(self.group.reward_spec), self.algorithm.reward_weights
        made = Metrics([metric() for metric in metrics], self.seat.num_envs, objectives=names, reward_weights=weights)
        self.seat.shown = made.reads
        if not made.reads_infos:
            self.seat.ignore_infos()
        return made

    def _make_batches(self, batches: Callable[[], Batches] | None) -> Batches:
        on_policy = self.algorithm.on_policy
        made = build(batches or (EpochBatches if on_policy else ReplayBatches), Batches, f"{self.name}/Trainer.batches")
        if made.on_policy != on_policy:
            kind, fitting = ("on-policy", "EpochBatches") if on_policy else ("off-policy", "ReplayBatches")
            raise UsageError(
                f"{type(self.algorithm).__name__} of the policy {self.name} is {kind}, and its batches are "
                f"{type(made).__name__}; bind {self.name}/PolicySettings.batches = @{fitting}"
            )
        if not made.acts:
            raise UsageError(
                f"{type(made).__name__} of the policy {self.name} takes recorded data and never acts; with several "
                "policies each one acts: bind another source of batches"
            )
        return made


def _chosen(given: Any, default: Any) -> Any:
    return default if given is None else given
