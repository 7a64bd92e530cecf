"""Evaluation in the training environments, for simulators of which a process can hold only one."""

from collections.abc import Generator

import numpy as np

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import TimeStep
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.training.evaluator import Evaluator
from alfish.training.padded_policy import PaddedPolicy
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller


class BorrowingEvaluator(Evaluator):
    """Evaluates in the training environment, whose episodes it truncates; training then begins new episodes.

    All environments step together, and one call of the policy serves all of them. The result covers the episodes that
    start first: one episode in each environment, then further episodes in the environments whose episodes end first.
    The seed of the evaluation seeds the simulator as a whole, so an episode depends on the number of environments.

    Counters that the simulator saves, such as those of a curriculum, are restored after the evaluation. Random
    generators are not restored, so training differs from a run without evaluations.

    Args:
      unroller: unroller that steps `environment` in training.
      environment, algorithm, transforms, max_length: see `Evaluator`.
    """

    def __init__(
        self,
        unroller: SyncUnroller,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        max_length: int,
    ):
        super().__init__(environment, algorithm, transforms, max_length)
        self._unroller = unroller

    _refills = True

    def _check_number(self, num_episodes: int) -> None:
        if num_episodes < 1:
            raise UsageError(f"the evaluator was asked for {num_episodes} episodes; it must be at least 1")

    def _new_policy(self, sample: bool) -> PaddedPolicy:
        return _WholePolicy(self._algorithm, self._transforms, self.environment.num_envs, sample)

    def _report_cut(self, count: int, num_episodes: int) -> None:
        if num_episodes > self.environment.num_envs:
            raise UsageError(
                f"an episode was cut at {self.max_length:,} steps, after which {self.environment.name} "
                "cannot begin another one in a single environment; raise Trainer.max_evaluation_length, or evaluate at "
                f"most {self.environment.num_envs} episodes"
            )
        super()._report_cut(count, num_episodes)

    def _rows(self, num_episodes: int, seed: int, sample: bool) -> Generator[tuple[np.ndarray, TimeStep, bool]]:
        saved = self.environment.state_dict()
        try:
            yield from super()._rows(num_episodes, seed, sample)
        finally:
            if not self.environment.load_state_dict(saved):
                self._unroller.truncate_episodes()

    def close(self) -> None:
        """Leaves the environment open, because it belongs to the training."""


class _WholePolicy(PaddedPolicy):
    """Acts with one call for all environments; actions are sampled with the generators of the process."""

    def __init__(self, algorithm: RLAlgorithm, transforms: Transforms, num_envs: int, sample: bool):
        super().__init__(algorithm, transforms, num_envs, sample, batch_size=num_envs)

    def begin(self, episode: int, seed: int) -> None: ...

    def _act_block(self, time_step: TimeStep, before: Nest, episodes: list[int]) -> tuple[Nest, Nest]:
        if not self._actor.samples:
            return super()._act_block(time_step, before, episodes)
        seen, transform_state, state = self._see(time_step, before)
        step = self._actor.step(seen, state)
        return step.output, (transform_state, step.state)
