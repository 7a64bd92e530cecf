"""Self-play: the opponent in a game is the policy of a checkpoint, drawn for each episode.

alfish train --gin_file=examples/ppo_connect_four.gin --root_dir=runs/connect_four
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gin
import gymnasium
import numpy as np
import torch

import alfish
from alfish import nest, specs
from alfish.algorithms.acting import Actor
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.parameters import checked
from alfish.runs.checkpoints import Checkpoints
from alfish.specs import ActionUnits, ObservationUnits
from alfish.training.policy import Policy
from alfish.unrollers.policy_runner import PolicyRunner


@gin.configurable
@checked
class SelfPlay(gymnasium.Wrapper):
    """Moves for the opponent in a game of two sides that take turns, such as `ConnectFour`.

    Each `step` of the game is a move. Its observation is for the side that moves next, and its reward for the side that
    has moved and against the other one. Seat, opponent and the opponent's moves, which are sampled as in training, are
    drawn from the environment's generator: they depend on its seed and on the checkpoints that exist.

    Training draws from the complete checkpoints that were saved at a smaller progress of training than its own. These
    checkpoints are the same in a resumed run and in workers in lockstep. An evaluation draws from all checkpoints.
    Without a checkpoint the opponent moves at random, among those that a leaf `action_mask` of the observation allows.
    A process loads each checkpoint once.

    Args:
      env: the game.
      directories: of runs: this run's `--root_dir` for past selves, other ones for a league. By default runs remove old
        checkpoints; `CheckpointSaver.keep_period` keeps them.

    Raises:
      UsageError: there is no such directory.
    """

    def __init__(self, env: gymnasium.Env, directories: Sequence[str] = gin.REQUIRED):
        super().__init__(env)
        for directory in directories:
            if not Path(directory).is_dir():
                raise UsageError(
                    f"SelfPlay.directories names {directory!r}, which does not exist; name this run's --root_dir or "
                    "the directories of other runs"
                )
        self._directories, self._progress = directories, float("inf")  # an evaluation has no progress

    def set_progress(self, progress: float) -> None:
        """Sets the progress of training, in [0, 1]; the trainer calls it."""
        self._progress = progress

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._opponent = self._draw()
        if self.np_random.integers(2):
            observation, *_ = self.env.step(self._answer(observation))
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            observation, loss, terminated, truncated, info = self.env.step(self._answer(observation))
            reward = float(reward) - float(loss)
        return observation, float(reward), terminated, truncated, info

    def _draw(self) -> "Opponent | None":
        """Returns the opponent of an episode; None: it moves at random."""
        saved = [(directory, _checkpoints(directory)) for directory in self._directories]
        try:
            found = [(directory, step) for directory, steps in saved for step in self._earlier(directory, steps)]
            return Opponent(*_loaded(*found[self.np_random.integers(len(found))])) if found else None
        except UsageError:
            if saved == [(directory, _checkpoints(directory)) for directory in self._directories]:
                raise
            return self._draw()  # a run has removed checkpoints in the meantime

    def _earlier(self, directory: str, steps: list[int]) -> list[int]:
        """Returns the checkpoints of a run, ascending, that were saved at less than the present progress."""
        if steps and _loaded(directory, steps[-1])[0].algorithm.progress >= self._progress:
            return self._earlier(directory, steps[:-1])
        return steps

    def _answer(self, observation: Any) -> Any:
        seed = int(self.np_random.integers(2**31))
        if self._opponent is None:
            self.action_space.seed(seed)
            mask = observation.get("action_mask") if isinstance(observation, dict) else None
            return self.action_space.sample(mask)
        return self._opponent.act(observation, seed)


class Opponent:
    """The policy of a checkpoint in one episode. A small network acts through numpy."""

    def __init__(self, policy: Policy, runner: PolicyRunner):
        self._runner, self._space, self._units = runner, policy.observation_space, ActionUnits(policy.action_space)
        self._read = ObservationUnits(self._space).from_environment
        self._state, self._transform_state = policy.algorithm.initial_state(1), policy.transforms.initial_state(1)
        reward, action = specs.zeros((policy.transforms.raw_reward_spec, specs.action_spec(policy.action_space)), (1,))
        first, one = np.full(1, StepType.FIRST, np.int32), np.ones(1, np.float32)
        self._row = nest.arrays(TimeStep(first, reward, one, None, action, np.zeros(1, np.int32)))

    def act(self, observation: Any, seed: int) -> Any:
        """Returns an action, sampled as in training. Torch's generator stays as it is."""
        row = self._row._replace(observation=self._read(specs.batch_of_one(observation, self._space)))
        outside = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        step, self._transform_state = self._runner(row, self._transform_state, self._state)
        torch.set_rng_state(outside)
        self._state, executed = step.state, self._units.executed(nest.arrays(step.output))
        self._row = row._replace(step_type=np.full(1, StepType.MID, np.int32), prev_action=executed)
        return nest.map(lambda leaf: leaf[0], self._units.stretch(executed))


def _checkpoints(directory: str) -> list[int]:
    return Checkpoints(Path(directory) / "checkpoints").steps()


@functools.lru_cache(maxsize=256)
def _loaded(directory: str, step: int) -> tuple[Policy, PolicyRunner]:
    policy = alfish.load(directory, step)
    policy.algorithm.train(False)
    return policy, PolicyRunner(Actor(policy.algorithm, policy.transforms), policy.algorithm.initial_state(1), 0)
