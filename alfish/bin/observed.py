"""Statistics of random steps in an environment: speed, and scales, bounds and limits that make learning hard."""

import time
from collections.abc import Iterator

import gymnasium
import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.environments import Environment
from alfish.errors import significant
from alfish.nest import Nest
from alfish.networks.images import is_image

LARGE, SMALL = 100.0, 1e-2  # largest and smallest absolute rewards and observations that suit default settings
LARGEST_RATIO = 1e3  # largest ratio between absolute values of an observation's entries
LARGEST_ACTION = 1e4
LONGEST_EPISODE = 10_000
FLOAT32_STEPS = 2.0**24  # in float32, a number x may lose a change that is smaller than x / FLOAT32_STEPS


class ObservedLeaf:
    """Smallest and largest values of the N entries of an observation leaf, over all environments and steps.

    Args:
      name: path of the leaf, such as `observation.speed`.
      space: space of the leaf in the environment's own observation space.
    """

    def __init__(self, name: str, space: spaces.Space):
        self.name, self.space = name, space
        self._low = self._high = self._change = np.empty(0)
        self._last: np.ndarray | None = None

    def add(self, values: np.ndarray) -> None:
        """Includes the values `[B, ...]` of a step in the statistics."""
        values = values.reshape(len(values), -1).astype(np.float64)
        if self._last is None:
            self._low = self._high = values[0]
            self._change = np.zeros(values.shape[1])
        else:
            self._change = np.maximum(self._change, np.abs(values - self._last).max(0))
        self._low = np.minimum(self._low, values.min(0))
        self._high = np.maximum(self._high, values.max(0))
        self._last = values

    def warnings(self) -> Iterator[str]:
        if not isinstance(self.space, spaces.Box) or not len(self._low):
            return
        if not np.isfinite(self._high - self._low).all():  # `examine` reports this as a problem
            return
        sizes = np.maximum(abs(self._low), abs(self._high))
        if is_image(self.space):
            if specs.is_float(self.space) and sizes.max() > 2:
                reached = f"{self.name} is an image of floats up to {sizes.max():.0f}"
                yield f"{reached}, but only uint8 images are divided by 255; make it uint8"
            return
        is_constant = self._high == self._low
        if is_constant.any():
            first = int(is_constant.argmax())
            which = "it" if len(sizes) == 1 else f"{is_constant.sum()} of its {len(sizes)} entries, first [{first}],"
            yield (
                f"{self.name}: {which} never changed, so it carries no information; leave it out if it is always "
                "constant"
            )
        if not specs.is_float(self.space):
            return
        is_lost = (self._change > 0) & (sizes > FLOAT32_STEPS * self._change)
        if self.space.dtype == np.float64 and is_lost.any():
            worst = int(is_lost.argmax())
            change = f"changes by at most {self._change[worst]:.2g} per step"
            yield (
                f"{self.name}[{worst}] is about {sizes[worst]:.3g} and {change}, a change that is lost in float32; "
                "subtract its initial value"
            )
        seen = sizes[(sizes > 0) & ~is_constant]
        remedy = "list @ObservationRescaler in Trainer.transforms, as base configurations do"
        if len(seen) and seen.max() > LARGE:
            yield f"{self.name} reaches {seen.max():.3g}, but networks learn best from numbers near 1; {remedy}"
        elif len(seen) and seen.max() > LARGEST_RATIO * seen.min():
            yield f"{self.name} has entries of sizes from {seen.min():.2g} to {seen.max():.3g}; {remedy}"


class Observed:
    """Statistics of random steps.

    Args:
      environment: environments that are stepped.

    Attributes:
      lengths: lengths of the finished episodes.
      remarks: further sentences for `warnings`.
      num_steps: number of vector steps; each one steps all environments.
    """

    def __init__(self, environment: Environment):
        self.lengths: list[int] = []
        self.remarks: list[str] = []
        self._truncates = False  # whether an episode was truncated, by the environment's time limit or otherwise
        self._environment = environment
        spaces_of_leaves = specs.map_space(lambda leaf: leaf, environment.observation_space)
        self._leaves = [ObservedLeaf(name, leaf) for name, leaf in nest.named_leaves(spaces_of_leaves, "observation")]
        self._rewards: list[np.ndarray] = []
        self._length = np.zeros(environment.num_envs, np.int64)
        self._seconds, self.num_steps = 0.0, 0

    def begin(self) -> None:
        """Starts the clock, before a step."""
        self._seconds -= time.perf_counter()

    def end(self) -> None:
        """Stops the clock, after a step."""
        self._seconds += time.perf_counter()
        self.num_steps += 1

    def add(self, observation: Nest, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> None:
        """Includes the results of a step, with leaves `[B, ...]`, in the statistics."""
        done = terminated | truncated
        self._truncates = self._truncates or bool(truncated.any())
        for leaf, values in zip(self._leaves, nest.leaves(observation)):
            leaf.add(np.asarray(values))
        self._rewards.append(np.asarray(reward, np.float64).reshape(len(done), -1))
        self._length += 1
        self.lengths += self._length[done].tolist()
        self._length[done] = 0

    @property
    def seconds(self) -> float:
        """Total seconds of all steps."""
        return self._seconds

    @property
    def steps_per_second(self) -> float:
        """Steps per second of one environment, without other computation."""
        return self.num_steps * self._environment.num_envs / max(self._seconds, 1e-9)

    def warnings(self) -> Iterator[str]:
        """Yields a sentence for each property of the environment that makes learning hard."""
        yield from self.remarks
        for leaf in self._leaves:
            yield from leaf.warnings()
        yield from self._of_rewards()
        yield from _of_actions(self._environment.action_space)
        if self.lengths and max(self.lengths) == 1:
            yield "every episode ended after one step; if that is not intended, check when `step` returns terminated"
        if self._environment.lacks_limit and not self._truncates:
            yield (
                "the environment is registered without a time limit, and no episode was truncated: if an episode may "
                "never end, set a limit, for example make_environment.env_kwargs = {'max_episode_steps': 1000}"
            )
        limit = getattr(self._environment.env_spec, "max_episode_steps", None) or 0
        if limit > LONGEST_EPISODE:
            yield (
                f"the time limit is {limit:,} steps: the first returns come late, and an evaluation of 20 episodes "
                "takes long"
            )

    def _of_rewards(self) -> Iterator[str]:
        if not self._rewards:
            return
        rewards = np.concatenate(self._rewards)
        if not np.isfinite(rewards).all():
            return
        for index, entry in enumerate(rewards.T):
            name = "every reward" if rewards.shape[1] == 1 else f"every value of reward {index}"
            size = max(abs(entry.mean()), entry.std())
            if not entry.any():
                yield (
                    f"{name} was 0 in {len(entry):,} random steps, and a reward that is never found is not learned; "
                    "reward progress, or add an exploration bonus (rnd_mountaincar.gin)"
                )
            elif not SMALL <= size <= LARGE:
                yield (
                    f"rewards have mean {significant(entry.mean(), 3)} and standard deviation "
                    f"{significant(entry.std(), 3)}, but networks learn values near 1 best; list @RewardRescaler in "
                    "Trainer.transforms, as base configurations do"
                )


def _of_actions(space: gymnasium.Space) -> Iterator[str]:
    for leaf in nest.leaves(specs.map_space(lambda one: one, space)):
        if not isinstance(leaf, spaces.Box):
            continue
        if not specs.is_bounded(leaf):
            yield (
                f"an action has {specs.missing_bounds(leaf)} (bounds of 1e30 or more count as none), so the policy "
                "acts in the environment's units, at first between about -3 and 3, and SAC and TD3 cannot train; give "
                "the space meaningful bounds"
            )
        elif (largest := max(abs(leaf.low).max(), abs(leaf.high).max())) > LARGEST_ACTION:
            yield (
                f"actions reach {largest:.3g}, and a new policy uses the whole range; give the space meaningful bounds"
            )
