"""Atari's wrappers, on a game written here whose every step is known, and on the real ones."""

import functools
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish.algorithms.dqn import DQN
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.environments.atari import EpisodicLife, FireOnReset, preprocess_atari
from alfish.learner.batches import ReplayBatches
from alfish.networks import MLP, NatureCNN, QNetwork, Torso
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, RewardClip

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


@pytest.fixture
def atari():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")


class Game(gymnasium.Env):
    """A life is lost at each time in `losses`, and each step scores 1; observation: (game, time in it).

    What was pressed is kept. The game ends `delay` steps after the last life.
    """

    def __init__(self, losses=(3, 5, 9), meanings=("NOOP", "FIRE", "LEFT"), truncated_at=1000, delay=0):
        self.observation_space, self.action_space = spaces.Box(0, 99, (2,), np.float32), spaces.Discrete(3)
        self.ale = self
        self.game, self.time, self.pressed = 0, 0, []
        self._losses, self._meanings, self._truncated_at = losses, list(meanings), truncated_at
        self._end = losses[-1] + delay

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
        return self._observation(), 1.0, self.time >= self._end, self.time >= self._truncated_at, {}

    def _observation(self):
        return np.array([self.game, self.time], np.float32)


class Row(NamedTuple):
    game: int
    time: int
    terminated: bool = False
    truncated: bool = False
    reward: float = 0.0
    first: bool = False


def play(env, num_steps, action=2):
    """Rows of a stream that resets when it ends."""
    rows = [Row(*env.reset()[0].tolist(), first=True)]
    for _ in range(num_steps):
        if rows[-1].terminated or rows[-1].truncated:
            rows.append(Row(*env.reset()[0].tolist(), first=True))
        else:
            observation, reward, terminated, truncated, _ = env.step(action)
            rows.append(Row(*observation.tolist(), terminated, truncated, reward))
    return rows


def times(rows):
    """Of game 1: where each episode starts, and what follows."""
    return " ".join(f"{'|' if row.first else ''}{row.time:g}" for row in rows if row.game == 1)


def test_an_episode_ends_with_each_life_and_the_game_continues():
    rows = play(EpisodicLife(Game()), 14)
    assert times(rows) == "|0 1 2 3 |3 4 5 |5 6 7 8 9"
    assert [row.time for row in rows if row.terminated] == [3, 5, 9]
    assert [row[:2] for row in rows if row.game == 2] == [(2, 0), (2, 1), (2, 2)]
    assert not any(row.truncated for row in rows)


def test_no_step_of_the_game_is_hidden_between_two_lives():
    game = Game()
    rows = play(EpisodicLife(game), 11)
    assert sum(row.reward for row in rows) == 9 == game.time
    assert game.pressed == ["reset", *["LEFT"] * 9]


def test_a_seeded_reset_starts_a_new_game_at_once():
    env = EpisodicLife(Game())
    env.reset()
    env.step(2)
    assert env.reset(seed=3)[0].tolist() == [2, 0]
    assert env.step(2)[2] is False  # no life of the game before is missed


def test_a_game_without_a_step_is_not_gone_on_with():
    env = EpisodicLife(Game())
    env.reset()  # as a resumed run does, before it puts the generators back
    assert env.reset()[0].tolist() == [2, 0]


def test_a_life_lost_in_the_first_step_is_seen_in_every_game():
    rows = play(EpisodicLife(Game(losses=(1, 3))), 9)
    assert [(row.game, row.time) for row in rows if row.terminated] == [(1, 1), (1, 3), (2, 1), (2, 3)]


def test_a_truncated_game_is_over():
    env = EpisodicLife(Game(losses=(50,), truncated_at=2))
    assert [row[:2] for row in play(env, 4)] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_won_or_missing_lives_do_not_end_an_episode():
    game = Game()
    lives = iter([3, 3, 4, 4, 0, 0])
    game.lives = lambda: next(lives)
    env = EpisodicLife(game)
    env.reset()  # 3
    for expected in (False, False, False):  # 3, 4, 4
        game.step = lambda action: (np.zeros(2, np.float32), 0.0, False, False, {})
        assert env.step(0)[2] is expected
    assert env.step(0)[2] is False  # 0: the game itself says when it is over


def test_fire_is_pressed_once_after_each_reset_and_each_lost_life():
    game = Game(losses=(3, 7, 10))
    rows = play(FireOnReset(game), 8)
    # The step that loses a life ends with the press; the one that ends the game has none.
    assert times(rows) == "|1 2 4 5 6 8 9 10"
    assert " ".join(game.pressed) == "reset FIRE LEFT LEFT FIRE LEFT LEFT LEFT FIRE LEFT LEFT reset FIRE"
    assert [row.terminated for row in rows] == 7 * [False] + [True, False]


def test_a_press_scores_for_the_step_that_it_belongs_to():
    rows = play(FireOnReset(Game(losses=(3, 7, 10))), 7)
    assert [row.reward for row in rows] == [0, 2, 2, 1, 1, 2, 1, 1]  # the first step has that of the reset


def test_a_game_without_fire_is_not_changed():
    game = Game(meanings=("NOOP", "UP", "LEFT"))
    rows = play(FireOnReset(game), 9)
    assert times(rows) == "|0 1 2 3 4 5 6 7 8 9" and "FIRE" not in game.pressed
    assert [row.reward for row in rows] == [0, *[1] * 9]


def test_with_episodic_life_fire_is_pressed_once_per_life():
    game = Game(losses=(3, 7, 10))
    rows = play(EpisodicLife(FireOnReset(game)), 10)
    assert times(rows) == "|1 2 4 |4 5 6 8 |8 9 10"
    assert [row.time for row in rows if row.terminated] == [4, 8, 10]
    assert " ".join(game.pressed) == "reset FIRE LEFT LEFT FIRE LEFT LEFT LEFT FIRE LEFT LEFT reset FIRE"
    assert sum(row.reward for row in rows) == 10


def test_a_press_that_loses_a_life_is_followed_by_another():
    game = Game(losses=(1, 4, 5, 9))  # in a reset, and in a step
    rows = play(EpisodicLife(FireOnReset(game)), 7)
    assert times(rows) == "|2 3 6 |6 7 8 9"
    assert " ".join(game.pressed) == "reset FIRE FIRE LEFT LEFT FIRE FIRE LEFT LEFT LEFT reset FIRE FIRE"
    assert sum(row.reward for row in rows) == 9


def test_a_press_may_end_the_game_in_a_step():
    game = Game(losses=(3, 4))
    rows = play(FireOnReset(game), 2)
    assert rows[-1] == Row(1, 4, terminated=True, reward=2)
    rows = play(FireOnReset(Game(truncated_at=4)), 2)
    assert rows[-1] == Row(1, 4, truncated=True, reward=2)
    game = Game(truncated_at=4)
    rows = play(EpisodicLife(FireOnReset(game)), 3)
    assert rows[-2:] == [Row(1, 4, terminated=True, truncated=True, reward=2), Row(2, 1, first=True)]


def test_nothing_is_pressed_once_the_game_is_over():
    game = Game(truncated_at=3)
    assert play(FireOnReset(game), 2)[-1] == Row(1, 3, truncated=True, reward=1)
    assert game.pressed[-1] == "LEFT"
    game = Game(losses=(3, 5), delay=-2)  # over with a life left
    assert play(FireOnReset(game), 2)[-1] == Row(1, 3, terminated=True, reward=1)
    assert game.pressed[-1] == "LEFT"


def test_no_button_is_pressed_without_a_life():
    game = Game(losses=(3, 5), delay=2)
    assert times(play(FireOnReset(game), 5)) == "|1 2 4 5 6 7"


def test_a_press_that_ends_the_game_during_a_reset_resets_again():
    for ending in ({"losses": (1,)}, {"truncated_at": 1}):
        env = FireOnReset(Game(**ending))
        assert env.reset()[0].tolist() == [2, 0]
        assert env.step(2)[1] == 1  # what the game before scored is not this one's


def test_a_reset_drops_what_the_game_before_scored():
    env = FireOnReset(Game())
    env.reset()
    env.reset(seed=3)
    assert env.step(2)[1] == 2


def test_a_seed_and_options_reach_the_game():
    class Asked(Game):
        def reset(self, *, seed=None, options=None):
            asked.append((seed, options))
            return super().reset(seed=seed)

    asked = []
    EpisodicLife(FireOnReset(Asked(losses=(1,)))).reset(seed=3, options={"a": 1})
    assert asked == [(3, {"a": 1}), (None, {"a": 1})]


def test_training_wrappers_are_left_out_in_evaluation():
    for evaluation, ends in ((False, [3, 5, 9]), (True, [9])):
        env = make_environment(Game, training_wrappers=[EpisodicLife], evaluation=evaluation)
        step, times = env.reset(), []
        while not times or times[-1] < 9:
            step = env.step(np.zeros(1, np.int64))
            if step.step_type == LAST:
                assert step.discount == 0
                times.append(int(step.observation[0, 1]))
        assert times == ends
        env.close()


# Real games.

BREAKOUT = {"env_id": "ALE/Breakout-v5", "env_kwargs": {"frameskip": 1, "repeat_action_probability": 0.25}}
PLAIN = {"env_id": "ALE/Breakout-v5", "env_kwargs": {"frameskip": 1, "repeat_action_probability": 0.0}}
WRAPPERS = {"wrappers": [preprocess_atari, FireOnReset], "training_wrappers": [EpisodicLife]}
NOOP = np.zeros(1, np.int64)


def ale_of(environment):
    return environment.env.envs[0].unwrapped.ale


def score_of(ale):
    """Breakout's, as it is on the screen: two bytes of its memory, in decimal digits."""
    ram = ale.getRAM()
    return 100 * int(ram[76]) + 10 * int(ram[77] >> 4) + int(ram[77] & 15)


def ball_is_in_play(ale):
    return ale.getRAM()[101] > 0  # its height on the screen


def test_frames_are_84_by_84_grey_bytes(atari):
    env = make_environment(**BREAKOUT, **WRAPPERS, num_envs=2)
    assert env.observation_spec.shape == (84, 84) and env.observation_spec.dtype == np.uint8
    observation = env.reset().observation
    assert observation.shape == (2, 84, 84) and observation.dtype == np.uint8
    assert observation.std() > 10
    frame = ale_of(env).getEpisodeFrameNumber()
    env.step(np.zeros(2, np.int64))
    assert ale_of(env).getEpisodeFrameNumber() == frame + 4
    env.close()


def test_a_real_game_continues_through_all_lives(atari):
    env = make_environment(**BREAKOUT, **WRAPPERS, seed=3)
    torch.manual_seed(0)
    step, ale, totals = env.reset(), ale_of(env), []
    while not any(totals):  # a game at random scores nothing now and then
        assert step.step_type == FIRST and ale.lives() == 5 and score_of(ale) == 0
        total, num_ends, frame = 0.0, 0, ale.getEpisodeFrameNumber()
        while num_ends < 5:
            starts = step.step_type == LAST
            step = env.step(torch.randint(4, (1,)).numpy())
            # A new game would count from 0; a start within a game takes no frame.
            passed = ale.getEpisodeFrameNumber() - frame
            assert passed == 0 if starts else passed > 0
            frame, total = ale.getEpisodeFrameNumber(), total + step.reward.item()
            num_ends += (step.step_type == LAST).item()
            assert ale.lives() == 5 - num_ends and score_of(ale) == total
            assert step.discount == (step.step_type != LAST)
        totals.append(total)
        step = env.step(np.zeros(1, np.int64))
        assert ale.getEpisodeFrameNumber() < frame
    env.close()


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_ball_is_in_play_at_the_start_and_after_each_lost_life(atari, evaluation):
    env = make_environment(**PLAIN, **WRAPPERS, evaluation=evaluation)
    step, ale, lives = env.reset(), ale_of(env), 5
    assert ball_is_in_play(ale)
    num_served = 1
    while ale.lives() > 0:
        frame = ale.getEpisodeFrameNumber()
        step = env.step(NOOP)  # who never presses FIRE still gets to the end of the game
        lost, lives = ale.lives() < lives, ale.lives()
        passed = ale.getEpisodeFrameNumber() - frame
        if lost and lives > 0:
            num_served += 1
            assert ball_is_in_play(ale) and passed == 8
            assert (step.step_type == LAST) is not evaluation
        else:
            assert lives == 0 or passed == (0 if step.step_type == FIRST else 4)
    assert num_served == 5 and step.step_type == LAST
    env.close()


def test_without_fire_breakout_waits(atari):
    env = make_environment(**PLAIN, wrappers=[preprocess_atari], evaluation=True)
    env.reset()
    for _ in range(100):
        env.step(NOOP)
        assert not ball_is_in_play(ale_of(env)) and ale_of(env).lives() == 5
    env.close()


def test_in_evaluation_an_episode_is_a_full_game(atari):
    env = make_environment(**BREAKOUT, **WRAPPERS, evaluation=True)
    torch.manual_seed(0)
    step, ale, lives = env.reset([7]), ale_of(env), set()
    while step.step_type != LAST:
        lives.add(ale.lives())
        step = env.step(torch.randint(4, (1,)).numpy())
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
    frames = trainer.batches.buffer._store.rows[3]
    assert frames.shape == (200, 84, 84) and frames.dtype == torch.uint8
    evaluation = evaluator.evaluate(1)
    evaluator.close()
    assert 40 <= evaluation.lengths[0] <= 60  # 240 frames, truncated


# EnvPool's games.

POOL = {"vectorization": "envpool", "env_id": "Breakout-v5", "num_envs": 2}


@pytest.fixture
def envpool(atari):
    pytest.importorskip("envpool")


def test_envpools_frames_are_like_those_of_evaluation(envpool):
    pool = make_environment(**POOL, env_kwargs={"stack_num": 1, "noop_max": 1})
    one_noop = functools.partial(preprocess_atari, noop_max=1, keep_channel=True)
    games = make_environment(**PLAIN, wrappers=[one_noop, FireOnReset], num_envs=2, evaluation=True)
    assert pool.observation_spec == games.observation_spec == spaces.Box(0, 255, (1, 84, 84), np.uint8)
    assert pool.action_spec == games.action_spec
    torch.manual_seed(0)
    rows = pool.reset(), games.reset()
    for _ in range(20):
        frames, expected = (row.observation.astype(np.float32) for row in rows)
        assert frames.shape == (2, 1, 84, 84) and np.abs(frames - expected).mean() < 1
        action = torch.randint(4, (2,)).numpy()
        rows = pool.step(action), games.step(action)
    pool.close()
    games.close()


def test_envpool_lives_are_episodes_that_start_with_the_ball_in_play(envpool):
    env = make_environment(**POOL | {"num_envs": 1}, env_kwargs={"stack_num": 1, "episodic_life": True})
    row, lives = env.reset(), []
    while len(lives) < 6:
        row = env.step(NOOP)
        if row.step_type == LAST:
            assert row.discount == 0
            lives.append(int(env.infos["lives"][0]))
        assert row.step_type != FIRST or env.infos["ram"][0, 101] > 0
    assert lives == [4, 3, 2, 1, 0, 4]
    env.close()


def test_envpools_single_frames_are_stacked_for_the_cnn(envpool, tmp_path):
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=()))
    trainer = Trainer(
        tmp_path, algorithm=functools.partial(DQN, q_network=functools.partial(QNetwork, torso=torso)),
        environment=functools.partial(make_environment, **POOL, env_kwargs={"stack_num": 1, "episodic_life": True}),
        batches=functools.partial(ReplayBatches, capacity=200, batch_size=4, warmup_env_steps=24,
                                  updates_per_env_step=0.25),
        transforms=[FrameStack, RewardClip], unroll_length=4, num_updates=2, listeners=[], device="cpu",
    )  # fmt: skip
    assert trainer.algorithm.q_network.torso.encoder.encoders[0].image_shape == (4, 84, 84)
    assert trainer.train().updates == 2
    assert trainer.batches.buffer._store.rows[3].shape == (200, 1, 84, 84)
