"""Atari's wrappers, on a game written here whose every step is known, and on the real ones."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish.algorithms.dqn import DQN
from alfish.batches import ReplayBatches
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.environments.atari import EpisodicLife, FireOnReset, preprocess_atari
from alfish.networks import MLP, NatureCNN, QNetwork, Torso
from alfish.trainer import Trainer
from alfish.transforms import FrameStack, RewardClip

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


@pytest.fixture
def atari():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")


class Game(gymnasium.Env):
    """A life is lost at each time in `losses`; observation: (game, time in it). What was pressed is kept."""

    def __init__(self, losses=(3, 5, 9), meanings=("NOOP", "FIRE", "LEFT"), truncated_at=1000):
        self.observation_space, self.action_space = spaces.Box(0, 99, (2,), np.float32), spaces.Discrete(3)
        self.ale = self
        self.game, self.time, self.pressed = 0, 0, []
        self._losses, self._meanings, self._truncated_at = losses, list(meanings), truncated_at

    def lives(self):
        return len(self._losses) - sum(self.time >= loss for loss in self._losses)

    def get_action_meanings(self):
        return self._meanings

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game, self.time = self.game + 1, 0
        self.pressed.append("reset")
        return self._observation(), {}

    def step(self, action):
        self.time += 1
        self.pressed.append(self._meanings[action])
        return self._observation(), 1.0, self.lives() == 0, self.time >= self._truncated_at, {}

    def _observation(self):
        return np.array([self.game, self.time], np.float32)


def play(env, num_steps, action=2):
    """Rows (game, time, terminated, truncated) of a stream that resets when it ends."""
    observation, _ = env.reset()
    rows = [(*observation.tolist(), False, False)]
    for _ in range(num_steps):
        if rows[-1][2] or rows[-1][3]:
            observation, _ = env.reset()
            rows.append((*observation.tolist(), False, False))
        else:
            observation, _, terminated, truncated, _ = env.step(action)
            rows.append((*observation.tolist(), terminated, truncated))
    return rows


def test_an_episode_ends_with_each_life_and_the_game_goes_on():
    rows = play(EpisodicLife(Game()), 12)
    assert [row[:2] for row in rows] == [(1, t) for t in range(10)] + [(2, 0), (2, 1), (2, 2)]
    assert [row[1] for row in rows if row[2]] == [3, 5, 9]
    assert not any(row[3] for row in rows)


def test_a_seeded_reset_starts_a_new_game_at_once():
    env = EpisodicLife(Game())
    env.reset()
    env.step(2)
    assert env.reset(seed=3)[0].tolist() == [2, 0]
    assert env.step(2)[2] is False  # no life of the game before is missed


def test_a_truncated_game_is_over():
    env = EpisodicLife(Game(losses=(50,), truncated_at=2))
    assert [row[:2] for row in play(env, 4)] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_lives_that_are_won_or_show_as_none_before_the_end_end_no_episode():
    game = Game()
    lives = iter([3, 3, 4, 4, 0, 0])
    game.lives = lambda: next(lives)
    env = EpisodicLife(game)
    env.reset()  # 3
    for expected in (False, False, False):  # 3, 4, 4
        game.step = lambda action: (np.zeros(2, np.float32), 0.0, False, False, {})
        assert env.step(0)[2] is expected
    assert env.step(0)[2] is False  # 0: the game itself says when it is over


def test_fire_is_pressed_once_after_each_reset_where_the_game_has_it():
    game = Game()
    env = FireOnReset(game)
    observation, _ = env.reset()
    assert game.pressed == ["reset", "FIRE"] and observation.tolist() == [1, 1]
    env.step(2)
    assert game.pressed[2:] == ["LEFT"]
    game = Game(meanings=("NOOP", "UP", "LEFT"))
    assert FireOnReset(game).reset()[0].tolist() == [1, 0] and game.pressed == ["reset"]


def test_outside_of_episodic_life_fire_is_pressed_after_each_life():
    game = Game(losses=(3, 7, 10))
    play(FireOnReset(EpisodicLife(game)), 9)
    assert " ".join(game.pressed) == "reset FIRE LEFT LEFT NOOP FIRE LEFT LEFT NOOP FIRE LEFT reset FIRE LEFT"


def test_a_fire_that_ends_the_game_starts_another():
    game = Game(losses=(1,))
    game_over_at_once = FireOnReset(game)
    assert game_over_at_once.reset()[0].tolist() == [2, 0]


def test_training_wrappers_are_left_out_in_evaluation():
    for evaluation, ends in ((False, [3, 5, 9]), (True, [9])):
        env = make_environment(Game, training_wrappers=[EpisodicLife], evaluation=evaluation)
        step, times = env.reset(), []
        while not times or times[-1] < 9:
            step = env.step(torch.zeros(1, dtype=torch.int64))
            if step.step_type == LAST:
                assert step.discount == 0
                times.append(int(step.observation[0, 1]))
        assert times == ends
        env.close()


# Real games.

BREAKOUT = {"env_id": "ALE/Breakout-v5", "env_kwargs": {"frameskip": 1, "repeat_action_probability": 0.25}}
WRAPPERS = {"wrappers": [preprocess_atari], "training_wrappers": [EpisodicLife, FireOnReset]}


def ale_of(environment):
    return environment.env.envs[0].unwrapped.ale


def score_of(ale):
    """Breakout's, as it is on the screen: two bytes of its memory, in decimal digits."""
    ram = ale.getRAM()
    return 100 * int(ram[76]) + 10 * int(ram[77] >> 4) + int(ram[77] & 15)


def test_frames_are_84_by_84_grey_bytes(atari):
    env = make_environment(**BREAKOUT, **WRAPPERS, num_envs=2)
    assert env.observation_spec.shape == (84, 84) and env.observation_spec.dtype == np.uint8
    observation = env.reset().observation
    assert observation.shape == (2, 84, 84) and observation.dtype == torch.uint8
    assert observation.float().std() > 10
    frame = ale_of(env).getEpisodeFrameNumber()
    env.step(torch.zeros(2, dtype=torch.int64))
    assert ale_of(env).getEpisodeFrameNumber() == frame + 4
    env.close()


def test_a_real_game_goes_on_through_all_of_its_lives(atari):
    env = make_environment(**BREAKOUT, **WRAPPERS, seed=3)
    torch.manual_seed(0)
    step, ale, totals = env.reset(), ale_of(env), []
    while not any(totals):  # a game at random scores nothing now and then
        assert step.step_type == FIRST and ale.lives() == 5 and score_of(ale) == 0
        total, num_ends, frame = 0.0, 0, ale.getEpisodeFrameNumber()
        while num_ends < 5:
            step = env.step(torch.randint(4, (1,)))
            assert ale.getEpisodeFrameNumber() > frame  # a new game would count from 0
            frame, total = ale.getEpisodeFrameNumber(), total + float(step.reward)
            num_ends += int(step.step_type == LAST)
            assert ale.lives() == 5 - num_ends and score_of(ale) == total
            assert step.discount == (step.step_type != LAST)
        totals.append(total)
        step = env.step(torch.zeros(1, dtype=torch.int64))
        assert ale.getEpisodeFrameNumber() < frame
    env.close()


def test_in_evaluation_an_episode_is_a_full_game(atari):
    env = make_environment(**BREAKOUT, **WRAPPERS, evaluation=True)
    torch.manual_seed(0)
    step, ale, lives = env.reset([7]), ale_of(env), set()
    while step.step_type != LAST:
        lives.add(ale.lives())
        step = env.step(torch.randint(4, (1,)))
    assert lives >= {5, 4, 3, 2, 1} and ale.lives() == 0
    env.close()


def test_dqn_trains_on_stacks_of_frames_that_are_stored_once(atari, tmp_path):
    game = {**BREAKOUT, "env_kwargs": {**BREAKOUT["env_kwargs"], "max_num_frames_per_episode": 240}}
    encoder_sizes = functools.partial(NatureCNN, output_size=32)
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=()))
    trainer = Trainer(
        tmp_path, algorithm=functools.partial(DQN, q_network=functools.partial(QNetwork, torso=torso), gamma=0.99),
        environment=functools.partial(make_environment, **game, **WRAPPERS, num_envs=2),
        batches=functools.partial(ReplayBatches, capacity=200, batch_size=4, warmup_env_steps=40, window_length=3,
                                  updates_per_env_step=0.25),
        transforms=[FrameStack, RewardClip], unroll_length=4, num_updates=2, listeners=[], device="cpu",
    )  # fmt: skip
    assert encoder_sizes(trainer.algorithm.observation_spec).image_shape == (4, 84, 84)
    before = [parameter.detach().clone() for parameter in trainer.algorithm.q_network.parameters()]
    evaluator = trainer.evaluator(1)
    report = trainer.train()
    assert report.updates == 2 and report.env_steps == 48
    after = list(trainer.algorithm.q_network.parameters())
    assert len(after) == 10 and isinstance(trainer.algorithm.q_network.torso.encoder.encoders[0], NatureCNN)
    assert not any(torch.equal(a, b) for a, b in zip(before, after))
    frames = trainer.batches.buffer._rows[3]
    assert frames.shape == (200, 84, 84) and frames.dtype == torch.uint8
    evaluation = evaluator.evaluate(1)
    evaluator.close()
    assert 40 <= evaluation.lengths[0] <= 60  # 240 frames, truncated
