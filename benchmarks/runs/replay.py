"""Measures one library's replay for `benchmarks.replay`: `python -m benchmarks.runs.replay LIBRARY ROWS`.

Prints one JSON object: the library's versions, and microseconds a call of each kind that it has. Runs in the virtual
environment of the library, so it imports one only where that is measured, and of alfish nothing at its top.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.timing import seconds_a_call

CAPACITY, BATCH_SIZE, EPISODE_LENGTH = 1_000_000, 256, 1000
ALPHA, BETA = 0.6, 0.4
OBSERVATION_SIZE, ACTION_SIZE = 17, 6
FRAME_BATCH_SIZE, FRAMES_SHARE = 32, 5  # a fifth of the rows are frames: 20 k of them are 140 MB


class Buffer(NamedTuple):
    """A library's replay, called as its training loop calls it."""

    push: Callable[[int], Any]  # the rows of vector step t
    sample: Callable[[], Any]


class Library(NamedTuple):
    """Factories of a library's replay."""

    make: Callable[[int], Buffer]  # of so many environments
    versions: str
    make_prioritized: Callable[[int], Buffer] | None = None  # whose `sample` also gives the batch new priorities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("num_rows", type=int)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.library, arguments.num_rows)))


def measure(library: str, num_rows: int) -> dict[str, Any]:
    """Returns microseconds of each kind of call, and versions."""
    made = LIBRARIES[library]()
    result: dict[str, Any] = {"versions": made.versions}
    for num_envs in (1, 8):
        buffer = made.make(num_envs)
        result[f"push_{num_envs}"] = _microseconds(buffer.push, num_rows // num_envs)
    result["sample"] = _microseconds(lambda _: buffer.sample(), 1000)
    if made.make_prioritized is not None:
        del buffer  # two of them need not be in memory
        buffer = made.make_prioritized(8)
        for t in range(CAPACITY // 8):
            buffer.push(t)
        result["prioritized"] = _microseconds(lambda _: buffer.sample(), 1000)
    if library == "alfish":
        result |= alfish_draws()
        frames = alfish_frames()
        for t in range(num_rows // FRAMES_SHARE):
            frames.push(t)
        result["sample_frames"] = _microseconds(lambda _: frames.sample(), 500)
    return result


def transitions(num_envs: int) -> tuple[np.ndarray, ...]:
    """Returns observations, actions and rewards of 1000 vector steps, `[1000, B, ...]`, pushed again and again."""
    generator = np.random.default_rng(0)
    shapes = (OBSERVATION_SIZE,), (ACTION_SIZE,), ()
    return tuple(generator.normal(size=(1000, num_envs, *shape)).astype(np.float32) for shape in shapes)


def priorities() -> np.ndarray:
    """Returns `[1000, N]` priorities of 1000 batches, used again and again, distributed like TD errors."""
    return np.abs(np.random.default_rng(1).normal(size=(1000, BATCH_SIZE))).astype(np.float32)


def is_last(t: int) -> bool:
    return t % EPISODE_LENGTH == EPISODE_LENGTH - 1


def step_type(t: int) -> int:
    """Returns alfish's step types."""
    return 0 if t % EPISODE_LENGTH == 0 else 2 if is_last(t) else 1


def alfish() -> Library:
    import torch

    import alfish
    from alfish.replay import Prioritized, RingBuffer

    def make(num_envs: int) -> Buffer:
        ring = RingBuffer(CAPACITY, num_envs)
        return Buffer(alfish_push(ring), lambda: ring.sample(BATCH_SIZE))

    def make_prioritized(num_envs: int) -> Buffer:
        ring, sampler = RingBuffer(CAPACITY, num_envs), Prioritized(ALPHA, BETA)
        sampler.bind(ring, 2)
        priority = itertools.cycle(torch.from_numpy(priorities()))

        def sample() -> None:
            start = sampler.draw(BATCH_SIZE, 0.0)
            ring.windows(start, 2)
            sampler.update(start, next(priority))

        return Buffer(alfish_push(ring), sample)

    return Library(make, f"alfish {alfish.__version__}", make_prioritized)


def alfish_push(ring: Any) -> Callable[[int], None]:
    """Returns a function that pushes one vector step into a ring."""
    import torch

    from alfish.data import Experience, TimeStep

    observation, action, reward = (torch.from_numpy(rows).unsqueeze(1) for rows in transitions(ring.num_envs))
    env_id = torch.arange(ring.num_envs, dtype=torch.int32).unsqueeze(0)
    kinds = [torch.full((1, ring.num_envs), kind, dtype=torch.int32) for kind in range(3)]
    discount = torch.ones(1, ring.num_envs)

    def push(t: int) -> None:
        at, before = t % 1000, (t - 1) % 1000
        step = TimeStep(kinds[step_type(t)], reward[at], discount, observation[at], action[before], env_id)
        ring.push(Experience(step, action[at], None, None))

    return push


def alfish_draws() -> dict[str, float]:
    """Returns microseconds to draw windows from a full ring without reading rows, and to update priorities."""
    import torch

    from alfish.replay import Prioritized, RingBuffer, Uniform

    ring, prioritized, uniform = RingBuffer(CAPACITY, 8), Prioritized(ALPHA, BETA), Uniform()
    push = alfish_push(ring)
    for t in range(CAPACITY // 8):
        push(t)
    for sampler in (prioritized, uniform):
        sampler.bind(ring, 2)
    priority = torch.from_numpy(priorities())

    def draw_and_update(t: int) -> None:
        prioritized.update(prioritized.draw(BATCH_SIZE, 0.0), priority[t % 1000])

    return {
        "draw_update": _microseconds(draw_and_update, 2000),
        "draw": _microseconds(lambda _: uniform.draw(BATCH_SIZE, 0.0), 2000),
    }


def alfish_frames() -> Buffer:
    """Replay of one environment's grey frames, read as stacks, as in `ReplayBatches`."""
    import torch
    from gymnasium import spaces

    from alfish.data import Experience, TimeStep
    from alfish.replay import RingBuffer
    from alfish.specs import reward_spec
    from alfish.transforms import FrameStack

    stack = FrameStack(spaces.Box(0, 255, (84, 84), np.uint8), reward_spec())
    ring = RingBuffer(CAPACITY // 10, 1, num_ignored=stack.look_back)
    frames = torch.randint(256, (100, 1, 1, 84, 84), dtype=torch.uint8)
    kinds = [torch.full((1, 1), kind, dtype=torch.int32) for kind in range(3)]
    one, action, env_id = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)

    def push(t: int) -> None:
        step = TimeStep(kinds[step_type(t)], one, one, frames[t % 100], action, env_id)
        ring.push(Experience(step, action, None, None))

    def sample() -> TimeStep:
        start = ring.draw(FRAME_BATCH_SIZE)
        batch = ring.windows(start, 2)
        return stack.transform(batch.experience.time_step, stack.window_state(ring, start.column, start.position))

    return Buffer(push, sample)


def sb3() -> Library:
    import stable_baselines3
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    def make(num_envs: int) -> Buffer:
        observation_space, action_space = (spaces.Box(-1, 1, (size,)) for size in (OBSERVATION_SIZE, ACTION_SIZE))
        replay = ReplayBuffer(CAPACITY, observation_space, action_space, device="cpu", n_envs=num_envs)
        observation, action, reward = transitions(num_envs)
        done = [np.full(num_envs, last) for last in (False, True)]
        infos: list[dict] = [{} for _ in range(num_envs)]

        def push(t: int) -> None:
            at, after = t % 1000, (t + 1) % 1000
            replay.add(observation[at], observation[after], action[at], reward[at], done[is_last(t)], infos)

        return Buffer(push, lambda: replay.sample(BATCH_SIZE))

    return Library(make, f"stable-baselines3 {stable_baselines3.__version__}")


def cpprb() -> Library:
    from importlib.metadata import version

    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    shapes = {"obs": OBSERVATION_SIZE, "next_obs": OBSERVATION_SIZE, "act": ACTION_SIZE, "rew": 1, "done": 1}
    layout = {name: {"shape": shape} for name, shape in shapes.items()}

    def push_into(replay: Any, num_envs: int) -> Callable[[int], None]:
        observation, action, reward = transitions(num_envs)
        done = [np.full(num_envs, float(last), np.float32) for last in (False, True)]

        def push(t: int) -> None:
            at, after = t % 1000, (t + 1) % 1000
            rows = {"obs": observation[at], "next_obs": observation[after], "act": action[at], "rew": reward[at]}
            replay.add(**rows, done=done[is_last(t)])

        return push

    def make(num_envs: int) -> Buffer:
        replay = ReplayBuffer(CAPACITY, layout)
        return Buffer(push_into(replay, num_envs), lambda: replay.sample(BATCH_SIZE))

    def make_prioritized(num_envs: int) -> Buffer:
        replay = PrioritizedReplayBuffer(CAPACITY, layout, alpha=ALPHA)
        priority = itertools.cycle(priorities())

        def sample() -> None:
            batch = replay.sample(BATCH_SIZE, beta=BETA)
            replay.update_priorities(batch["indexes"], next(priority))

        return Buffer(push_into(replay, num_envs), sample)

    return Library(make, f"cpprb {version('cpprb')}", make_prioritized)


def torchrl() -> Library:
    import torch
    import torchrl
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    def make(num_envs: int) -> Buffer:
        observation, action, reward = (torch.from_numpy(rows) for rows in transitions(num_envs))
        done = [torch.full((num_envs, 1), last) for last in (False, True)]
        storage = LazyTensorStorage(CAPACITY)
        replay = TensorDictReplayBuffer(storage=storage, batch_size=BATCH_SIZE)

        def push(t: int) -> None:
            at, after, last = t % 1000, (t + 1) % 1000, done[is_last(t)]
            following = {"observation": observation[after], "reward": reward[at].unsqueeze(1), "done": last}
            rows = {"observation": observation[at], "action": action[at], "next": following}
            replay.extend(TensorDict(rows, batch_size=[num_envs]))

        return Buffer(push, replay.sample)

    # Its prioritized sampler needs a part in C++ that it does not find beside this torch.
    return Library(make, f"torchrl {torchrl.__version__}")


def _microseconds(function: Callable[[int], Any], count: int) -> float:
    """Returns the mean of `count` calls, after ten warm-up calls."""
    seconds_a_call(function, 10)
    return 1e6 * seconds_a_call(function, count, first=10)


LIBRARIES = {"alfish": alfish, "stable-baselines3": sb3, "cpprb": cpprb, "torchrl": torchrl}


if __name__ == "__main__":
    main()
