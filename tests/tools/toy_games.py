"""Games of several agents whose rows are known, in PettingZoo's parallel interface and in its AEC interface."""

import json

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import AgentSelector

OBSERVATION = spaces.Box(0, 1000, (4,), np.float32)
MOVE = spaces.Discrete(3)


class Meeting(ParallelEnv):
    """Agents are present by a timetable: b comes late, leaves, and comes again.

    Observations are (agent, game, step, a random number), and the reward of a move is its step, of b's moves the
    negative. Even agents end by termination, odd ones by truncation. Records the moves of each agent as (game, step,
    action).
    """

    metadata = {"name": "meeting"}
    timetable = {"a": [(0, 8)], "b": [(2, 4), (6, 8)], "c": [(0, 7)]}

    def __init__(self, render_mode=None):
        self.possible_agents, self.agents, self.render_mode = list(self.timetable), [], render_mode
        self.length = max(end for times in self.timetable.values() for _, end in times)
        self.game, self.seeds, self.moves = -1, [], {agent: [] for agent in self.possible_agents}

    def observation_space(self, agent):
        return OBSERVATION

    def action_space(self, agent):
        return MOVE

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.game, self.time = self.game + 1, 0
        self.agents = self.present()
        return self.observed(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), "exactly the agents that are present act"
        acted, self.time = list(self.agents), self.time + 1
        for agent, action in actions.items():
            self.moves[agent].append((self.game, self.time - 1, int(action)))
        self.agents = self.present()
        ends = {agent: agent not in self.agents for agent in acted}
        odd = {agent: self.possible_agents.index(agent) % 2 == 1 for agent in acted}
        rewards = {agent: float(self.time) * (-1 if agent == "b" else 1) for agent in acted}
        terminated = {agent: ends[agent] and not odd[agent] for agent in acted}
        truncated = {agent: ends[agent] and odd[agent] for agent in acted}
        here = [agent for agent in self.possible_agents if agent in {*acted, *self.agents}]
        return self.observed(here), rewards, terminated, truncated, {agent: {"time": self.time} for agent in acted}

    def present(self):
        return [agent for agent, times in self.timetable.items() if any(x <= self.time < end for x, end in times)]

    def observed(self, agents):
        noise = self.generator.random()
        rows = {agent: (self.possible_agents.index(agent), self.game, self.time, noise) for agent in agents}
        return {agent: np.array(row, np.float32) for agent, row in rows.items()}

    def state(self):
        return np.array([self.game, self.time], np.float32)

    state_space = spaces.Box(0, 1000, (2,), np.float32)

    def render(self):
        return np.full((2, 2, 3), self.time, np.uint8)

    def close(self):
        self.agents = []


class Leaving(Meeting):
    """Agents that never come again, as PettingZoo's test of the interface asks."""

    metadata = {"name": "leaving"}
    timetable = {"player_0": [(0, 3)], "player_1": [(0, 5)], "player_2": [(0, 2)]}

    def step(self, actions):
        acted = list(self.agents)
        return tuple({agent: result[agent] for agent in acted} for result in super().step(actions))


class Tag(Leaving):
    """Agents with the names of the game of docs/several_policies.md, in an episode of five steps."""

    metadata = {"name": "tag"}
    timetable = {"adversary_0": [(0, 5)], "adversary_1": [(0, 3)], "agent_0": [(0, 5)]}

    def __init__(self, render_mode=None, max_cycles=5):
        super().__init__(render_mode)


class Kept(Meeting):
    """A meeting with a state, from which a resumed run continues."""

    def get_state(self):
        return {"game": self.game, "time": self.time, "generator": json.dumps(self.generator.bit_generator.state)}

    def set_state(self, state):
        self.game, self.time = state["game"], state["time"]
        self.generator.bit_generator.state = json.loads(state["generator"])
        self.agents = self.present()


class Dash(ParallelEnv):
    """Two runners on a line of 9 places, of whom the first one at the flag wins.

    The runners begin equally far from the flag, and each step moves a runner by one place or not at all. Observations
    are the own place, the other's and the flag's, divided by 8. At the flag a runner gets 1, and the other one -1; both
    get 0 if they arrive together. A game has at most 12 steps.
    """

    metadata = {"name": "dash"}
    possible_agents = ["left", "right"]

    def __init__(self, render_mode=None):
        self.agents, self.render_mode = [], render_mode

    def observation_space(self, agent):
        return spaces.Box(0, 1, (3,), np.float32)

    def action_space(self, agent):
        return MOVE

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.agents, self.time, self.flag = list(self.possible_agents), 0, int(self.generator.integers(9))
        distance = int(self.generator.integers(2, 6))
        near = [place for place in (self.flag - distance, self.flag + distance) if 0 <= place < 9]
        near = near or [0 if self.flag > 4 else 8]
        self.places = {agent: int(self.generator.choice(near)) for agent in self.agents}
        return self.observed(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.time += 1
        for agent, action in actions.items():
            self.places[agent] = int(np.clip(self.places[agent] + int(action) - 1, 0, 8))
        left, right = (float(self.places[agent] == self.flag) for agent in self.possible_agents)
        rewards = {"left": left - right, "right": right - left}
        ends = bool(left or right)
        is_late = self.time >= 12 and not ends
        ended = [dict.fromkeys(actions, end) for end in (ends, is_late)]
        observations, infos = self.observed(), {agent: {} for agent in actions}
        if ends or is_late:
            self.agents = []
        return observations, rewards, *ended, infos

    def observed(self):
        left, right = (self.places[agent] for agent in self.possible_agents)
        places = {"left": (left, right, self.flag), "right": (right, left, self.flag)}
        return {agent: np.array(own, np.float32) / 8 for agent, own in places.items()}

    def get_state(self):
        generator = json.dumps(self.generator.bit_generator.state)
        return {"time": self.time, "flag": self.flag, "places": self.places, "agents": self.agents, "rng": generator}

    def set_state(self, state):
        self.time, self.flag = state["time"], state["flag"]
        self.places, self.agents = dict(state["places"]), list(state["agents"])
        self.generator = np.random.default_rng()
        self.generator.bit_generator.state = json.loads(state["rng"])

    def close(self):
        self.agents = []


class Masked(Meeting):
    """The action `step % 3` is forbidden, and at an agent's last step all actions."""

    def __init__(self, place="observation"):
        super().__init__()
        self.place = place

    def observation_space(self, agent):
        mask = spaces.Box(0, 1, (3,), np.int8)
        return spaces.Dict(observation=OBSERVATION, action_mask=mask) if self.place == "observation" else OBSERVATION

    def observed(self, agents):
        found = super().observed(agents)
        if self.place != "observation":
            return found
        return {agent: {"observation": found[agent], "action_mask": self.allowed(agent)} for agent in agents}

    def reset(self, seed=None, options=None):
        observations, _ = super().reset(seed)
        return observations, self.infos(observations)

    def step(self, actions):
        *results, _ = super().step(actions)
        return (*results, self.infos(results[0]))

    def infos(self, agents):
        return {agent: {"action_mask": self.allowed(agent)} for agent in agents} if self.place == "info" else {}

    def allowed(self, agent):
        is_present = any(begin <= self.time < end for begin, end in self.timetable[agent])
        return (np.arange(3) != self.time % 3).astype(np.int8) * is_present


class Counting(AECEnv):
    """Players add 0, 1 or 2 in turns; the player of a move gets what it adds, and the others half of it as a loss.

    Observations are (player, sum, number of moves, 0). The second of three players is terminated after its second move;
    after `length` moves all are truncated. Records the moves as (player, action).
    """

    metadata = {"name": "counting", "is_parallelizable": False}

    def __init__(self, length=9, render_mode=None):
        self.possible_agents, self.agents = ["player_0", "player_1", "player_2"], []
        self.length, self.moves, self.seeds, self.render_mode = length, [], [], render_mode

    def observation_space(self, agent):
        return OBSERVATION

    def action_space(self, agent):
        return MOVE

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.agents = list(self.possible_agents)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.selector = AgentSelector(self.agents)
        self.agent_selection = self.selector.reset()
        self.total = self.num_moves = 0

    def observe(self, agent):
        return np.array([self.possible_agents.index(agent), self.total, self.num_moves, 0], np.float32)

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.moves.append((agent, int(action)))
        self.total, self.num_moves = self.total + int(action), self.num_moves + 1
        self.rewards = {each: float(action) if each == agent else -float(action) / 2 for each in self.agents}
        self.infos = {each: {"total": self.total} for each in self.agents}
        if agent == "player_1" and self.num_moves > 3:
            self.terminations[agent] = True
            self.selector.reinit([each for each in self.agents if each != agent])
            self.selector.next()  # player_0; the next one is player_2
        if self.num_moves >= self.length:
            self.truncations = {each: not self.terminations[each] for each in self.agents}
        self.agent_selection = self.selector.next()
        self._accumulate_rewards()
        self._deads_step_first()

    state_space = spaces.Box(0, 1000, (1,), np.float32)

    def state(self):
        return np.array([self.total], np.float32)


def letters(step_types):
    """Returns step types as text: F, M, L, and . where a column has no row."""
    return "".join("FML."[kind] for kind in step_types)


def played(games, num_steps, choose=None):
    """Resets games and steps them with actions that follow from the number of the step and of the column.

    Returns:
      The rows of each step by group, and the actions before each step but the first.
    """
    choose = choose or (lambda t, group, rows: (t + np.arange(group.num_envs)) % 3)
    rows, actions = [games.reset()], []
    for t in range(num_steps):
        actions.append({key: choose(t, group, rows[-1][key]) for key, group in games.groups.items()})
        rows.append(games.step(actions[-1]))
    return rows, actions
