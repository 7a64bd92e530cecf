"""Episodes of Stamped, whose observation is (env, episode, step), and a judge of what became of them."""

import numpy as np
import torch
from gymnasium import spaces
from toys import Stamped

from alfish.data import StepType
from alfish.offline import Arrays, Episode, Spaces

LENGTHS = (3, 5, 1, 8, 2)
SPACES = Spaces(Stamped().observation_space, Stamped().action_space)
BOX_SPACES = Spaces(SPACES.observation, spaces.Box(-2, np.array([2, 6], np.float32), (2,), np.float32))


def record(num_episodes=11, continuous=False):
    """Every second episode terminates, the others are truncated. Actions are drawn, of 0..2 or of `BOX_SPACES`."""
    generator = np.random.default_rng(3)
    envs = [Stamped(LENGTHS, truncates=k % 2 == 1) for k in range(2)]
    for env in envs:
        env.reset(seed=5)
    episodes = []
    for k in range(num_episodes):
        env = envs[k % 2]
        env._episode = k - 1  # both count the same episodes
        observations, steps = [env.reset()[0]], []
        while not (steps and (steps[-1][2] or steps[-1][3])):
            action = generator.uniform([-2, -2], [2, 6]).astype(np.float32) if continuous else generator.integers(3)
            observation, reward, terminated, truncated, _ = env.step(0)
            observations.append(observation)
            steps.append((action, reward, terminated, truncated))
        actions, rewards, terminated, truncated = (np.array(part) for part in zip(*steps))
        episodes.append(
            Episode(str(k), np.array(observations), actions, rewards.astype(np.float32), terminated, truncated)
        )
    return episodes


def source(episodes, of=SPACES):
    return Arrays(episodes, of)


def rows_of(buffer, stored):
    """The rows of an episode in an OfflineBuffer, without the dimension of environments."""
    position = torch.arange(stored.position, stored.position + stored.length + 1)[:, None]
    experience = buffer.read(torch.tensor([stored.column]), position)
    step = experience.time_step
    return [leaf[:, 0].numpy() for leaf in (step.step_type, step.reward, step.discount, step.observation)], (
        step.prev_action[:, 0].numpy(),
        experience.action[:, 0].numpy(),
    )


def assert_rows(buffer, episodes, canonical=lambda actions: actions, limit=1 - 1e-5):
    """The buffer holds these episodes and nothing else, and every row is what the grammar says."""
    buffer.check_valid()
    assert len(buffer.episodes) == len(episodes)
    assert buffer.num_rows == sum(episode.length + 1 for episode in episodes)
    assert buffer.num_starts() == sum(episode.length for episode in episodes)
    taken = set()
    for stored, episode in zip(buffer.episodes, episodes, strict=True):
        (step_type, reward, discount, observation), (prev_action, action) = rows_of(buffer, stored)
        length = episode.length
        assert stored.length == length and stored.return_ == episode.rewards.sum()
        here = {(stored.column, position) for position in range(stored.position, stored.position + length + 1)}
        assert not here & taken
        taken |= here
        assert step_type.tolist() == [StepType.FIRST, *[StepType.MID] * (length - 1), StepType.LAST]
        assert discount.tolist() == [1.0] * length + [0.0 if episode.terminated[-1] else 1.0]
        assert reward.tolist() == [0.0, *episode.rewards.tolist()]
        assert observation.tolist() == np.asarray(episode.observations, np.float32).tolist()
        units = canonical(episode.actions)
        trained = np.clip(units, -limit, limit) if units.dtype.kind == "f" else units
        np.testing.assert_allclose(prev_action, np.concatenate([np.zeros_like(units[:1]), units]), atol=1e-6)
        np.testing.assert_allclose(action[:-1], trained, atol=1e-6)
        assert prev_action.dtype == action.dtype == (np.float32 if units.dtype.kind == "f" else np.int64)
    assert_windows(buffer, episodes)


def assert_windows(buffer, episodes):
    """No window trains a step that is not in an episode, and every one that is can be drawn."""
    steps = {
        pair
        for e in episodes
        for pair in zip(map(tuple, e.observations.tolist()), map(tuple, e.observations[1:].tolist()))
    }
    batch = buffer.sample(2000, 3)
    stamps, mask = batch.experience.time_step.observation.tolist(), batch.mask.tolist()
    drawn = [
        {(tuple(a), tuple(b)) for a, b, trains in zip(stamps[t], stamps[t + 1], mask[t]) if trains} for t in range(2)
    ]
    assert all(mask[0]) and drawn[0] == steps and drawn[1] <= steps


def unstretched(actions):
    """Returns actions of `BOX_SPACES` in [-1, 1]."""
    low, high = BOX_SPACES.action.low, BOX_SPACES.action.high
    return ((actions - low) / (high - low) * 2 - 1).astype(np.float32)


def without_final(episodes):
    """Returns the episodes as read without final observations: terminated ones repeat the last, others lose a step."""
    left = []
    for id, observations, actions, rewards, terminated, truncated in episodes:
        if terminated[-1]:
            observations = np.concatenate([observations[:-1], observations[-2:-1]])
        elif len(rewards) > 1:
            observations, actions, rewards = observations[:-1], actions[:-1], rewards[:-1]
            terminated, truncated = terminated[:-1], np.append(truncated[:-2], True)
        else:
            continue
        left.append(Episode(id, observations, actions, rewards, terminated, truncated))
    return left


def table_of(episodes, next_observations=True):
    """All transitions in one table."""
    table = {
        "observations": np.concatenate([e.observations[:-1] for e in episodes]),
        "actions": np.concatenate([e.actions for e in episodes]),
        "rewards": np.concatenate([e.rewards for e in episodes]),
        "terminated": np.concatenate([e.terminated for e in episodes]),
        "truncated": np.concatenate([e.truncated for e in episodes]),
    }
    if next_observations:
        table["next_observations"] = np.concatenate([e.observations[1:] for e in episodes])
    return table
