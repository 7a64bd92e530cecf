"""`alfish check-env` for games of several agents."""

import numpy as np
import pytest
from gymnasium import spaces
from toy_games import Masked, Meeting

from alfish.__main__ import main

TICTACTOE = "pettingzoo.classic.tictactoe.tictactoe"


def test_a_good_game_is_described(capsys):
    assert main(["check-env", f"--game={TICTACTOE}", "--num_steps=60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["game         tictactoe_v3: 2 agents, in turns", "agents       player_1, player_2"]
    assert any("random games of" in line for line in lines) and any(line.startswith("speed ") for line in lines)
    assert any(line.startswith("algorithms   A2C, ") and ", PPO, " in line for line in lines)
    assert not any(line.startswith(("problem", "warning")) for line in lines)


class Apart(Meeting):
    """Agents with different actions; observations do not count the games."""

    def observed(self, agents):
        return {agent: row * [1, 0, 1, 1] for agent, row in super().observed(agents).items()}

    def action_space(self, agent):
        return spaces.Box(-1, 1, (2,), np.float32) if agent == "b" else super().action_space(agent)

    def step(self, actions):
        return super().step({agent: 0 if agent == "b" else action for agent, action in actions.items()})


def test_groups_returns_and_algorithms_are_named(capsys):
    assert main(["check-env", "--game=test_check_games:Apart", "--num_steps=40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("agents")] == ["agents       a, c", "agents       b"]
    # Steps 1 to 8; 1 to 7; and for b steps 3 and 4, or 7 and 8.
    returns = [line for line in lines if line.startswith("return")]
    assert returns[:2] == ["return       a: 36 on average", "return       c: 28 on average"]
    assert "games        8 random games of 8 to 8 steps" in lines
    able = [line for line in lines if line.startswith("algorithms")]
    assert [line.split()[1:3] for line in able] == [["for", "a:"], ["for", "b:"]]
    assert [", DQN, " in line for line in able] == [True, False] and all(", PPO, " in line for line in able)
    assert any(line.startswith("refused by   for b: DQN, ") for line in lines)


class Legal(Masked):
    """Some actions are forbidden; observations do not count the games."""

    def observed(self, agents):
        found = super().observed(agents)
        return {agent: {**parts, "observation": parts["observation"] * [1, 0, 1, 1]} for agent, parts in found.items()}


def test_a_gin_file_describes_a_game_with_its_settings(tmp_path, capsys):
    (tmp_path / "game.gin").write_text(
        "import alfish.environments.games\nmake_games.game = 'test_check_games:Legal'\nmake_games.leaves = ['agent']\n"
    )
    assert main(["check-env", f"--gin_file={tmp_path / 'game.gin'}", "--num_steps=40"]) == 0
    shown = capsys.readouterr().out
    assert "agent: Box(0.0, 1.0, (3,), float32)" in shown and "action_mask: ActionMask(3)" in shown


class Wrong(Masked):
    """Leaves the bounds, ignores seeds, has an agent that never comes, and never ends."""

    timetable = {"a": [(0, 10**6)], "b": []}

    def observation_space(self, agent):
        return spaces.Box(0, 1, (4,), np.float32)

    def reset(self, seed=None, options=None):
        return super().reset()

    def observed(self, agents):
        return Meeting.observed(self, agents)

    def __init__(self):
        super().__init__("info")
        self.generator = np.random.default_rng(0)


def test_problems_are_named(capsys):
    assert main(["check-env", "--game=test_check_games:Wrong", "--num_steps=20"]) == 1
    shown = capsys.readouterr().out
    assert "problem      two resets with the same seed give different observations" in shown
    assert "problem      an observation of a is outside its space" in shown
    assert "problem      no game ended in 200 random steps" in shown and "raise --num_steps to 200" in shown
    assert "warning      b never appeared" in shown and "next         fix the problems" in shown


def test_mistakes_name_the_flag(refused):
    assert "--game is 'json', but this module has neither" in refused("check-env", "--game=json")
    assert "give only one of the two flags" in refused("check-env", "--game=json", "--env_id=CartPole-v1")
    assert "does not take game_kwargs={'x': 1}" in refused(
        "check-env", "--game=toy_games:Meeting", "--env_kwargs={'x': 1}"
    )


def test_a_mistake_of_a_game_is_a_sentence(refused):
    sentence = refused("check-env", "--game=test_check_games:Lost", printed=True)
    assert "meeting: a of game 0 has an observation that is not finite" in sentence


class Lost(Meeting):
    """Has an observation that is not finite."""

    def observed(self, agents):
        found = super().observed(agents)
        return {agent: row * np.nan if self.time == 2 else row for agent, row in found.items()}


@pytest.mark.parametrize("flag", ["--env_id=CartPole-v1"])
def test_environments_of_one_agent_are_checked_as_before(flag, untried_training, capsys):
    assert main(["check-env", flag, "--num_steps=100"]) == 0
    assert "game " not in capsys.readouterr().out


class Unrewarded(Masked):
    """Its rewards are lost, and its mask is beside two further parts of the observation."""

    def observation_space(self, agent):
        return spaces.Dict(**super().observation_space(agent), time=spaces.Box(0, 9, (1,), np.float32))

    def observed(self, agents):
        found = super().observed(agents)
        time = np.full(1, self.time, np.float32)
        return {
            agent: {**found[agent], "observation": Meeting.observed(self, agents)[agent] * [1, 0, 1, 1], "time": time}
            for agent in agents
        }

    def step(self, actions):
        observations, rewards, *others = super().step(actions)
        return observations, dict.fromkeys(rewards, 0.0), *others


def test_lost_rewards_and_an_unused_mask_are_mentioned(capsys):
    assert main(["check-env", "--game=test_check_games:Unrewarded", "--num_steps=40"]) == 0
    shown = capsys.readouterr().out
    assert (
        "warning      the return of each agent is 0 in each random game; check that step returns the rewards" in shown
    )
    assert "warning      the part action_mask that a, b, c observe is not used as a mask; bind make_games" in shown
