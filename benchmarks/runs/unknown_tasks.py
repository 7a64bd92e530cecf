"""Tasks of `benchmarks.defaults` that no configuration was tuned for. Peers import them, so no library is imported.

Each small environment has one property that defaults of algorithms are sensitive to, and is otherwise easy. `SECOND`
are tasks that were written after the defaults had been chosen on `FIRST`, and `THIRD` tasks that were written for the
next choice, on both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

# Environment steps of a run.
BUDGETS = {"PPO": 40_000, "A2C": 40_000, "DQN": 40_000, "SAC": 5000, "TD3": 5000}
NUM_EPISODES = 20  # of the evaluation
CONTINUOUS, DISCRETE = ("PPO", "A2C", "SAC", "TD3"), ("PPO", "A2C", "DQN")


class Docking(gymnasium.Env):
    """A point of mass 1 in the plane is docked at the origin: a double integrator with a rare bonus.

    Observation: position and velocity. Action: force in [-2, 2]. Reward: minus the distance and a hundredth of the
    squared force; 10 within 0.1 of the origin at a speed below 0.5, which ends the episode. Episodes have at most 100
    steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (2,), np.float32)
    length = 100

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._state = np.concatenate([self.np_random.uniform(-1, 1, 2), np.zeros(2)])
        self._step = 0
        return self._state.astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        force = np.clip(action, -2.0, 2.0)
        self._state[2:] += 0.1 * force
        self._state[:2] += 0.1 * self._state[2:]
        self._step += 1
        distance = float(np.hypot(*self._state[:2]))
        arrived = distance < 0.1 and float(np.hypot(*self._state[2:])) < 0.5
        reward = 10.0 if arrived else -distance - 0.01 * float(force @ force)
        return self._state.astype(np.float32), reward, arrived, self._step >= self.length, {}


class Balance(gymnasium.Env):
    """An unstable linear system is held at 0 for as long as possible: x' = 1.02 x + 0.1 u + noise.

    Observation: x, in `observation_units`, beside entries of other units. Reward: 1 - x^2 for each step, in
    `reward_unit`. It terminates where |x| > 1.

    Args:
      observation_units: of x, of the last action, and of two entries of noise.
      reward_unit: factor of the reward.
      length: steps until truncation.
      num_actions: of a Discrete action, forces evenly spaced in [-1, 1]; 0: a Box.
    """

    def __init__(
        self,
        observation_units: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
        reward_unit: float = 1.0,
        length: int = 200,
        num_actions: int = 0,
    ):
        self._units, self._reward_unit, self._length = np.array(observation_units), reward_unit, length
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self._forces = np.linspace(-1, 1, num_actions) if num_actions else None
        self.action_space = spaces.Discrete(num_actions) if num_actions else spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._x, self._u, self._step = float(self.np_random.uniform(-0.5, 0.5)), 0.0, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self._forces is not None:
            self._u = float(self._forces[int(action)])
        else:
            self._u = float(np.clip(np.asarray(action).reshape(-1)[0], -1, 1))
        self._x = 1.02 * self._x + 0.1 * self._u + 0.02 * float(self.np_random.standard_normal())
        self._step += 1
        fell = abs(self._x) > 1
        reward = 0.0 if fell else self._reward_unit * (1 - self._x**2)
        return self._observe(), reward, fell, self._step >= self._length, {}

    def _observe(self) -> np.ndarray:
        noise = self.np_random.standard_normal(2)
        return (np.array([self._x, self._u, *noise]) * self._units).astype(np.float32)


class Heating(gymnasium.Env):
    """A room is kept at a temperature that changes twice a day, over days of 1000 steps: a long horizon.

    Observation: the temperature, the temperature wanted now, and the temperature of the heater, in degrees. Action:
    power in [0, 1], which warms the heater slowly. Reward: minus the absolute error, at most 10, divided by 10.
    """

    observation_space = spaces.Box(-50.0, 150.0, (3,), np.float32)
    action_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    length = 1000

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._room, self._heater = 10.0 + float(self.np_random.uniform(-5, 5)), 10.0
        self._phase, self._step = int(self.np_random.integers(1000)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        power = float(np.clip(np.asarray(action).reshape(-1)[0], 0, 1))
        self._heater += 0.1 * (10 + 80 * power - self._heater)
        self._room += 0.05 * (self._heater - self._room) - 0.05 * (self._room - 5)
        self._step += 1
        error = abs(self._room - self._wanted())
        return self._observe(), -min(error, 10.0) / 10, False, self._step >= self.length, {}

    def _wanted(self) -> float:
        return 21.0 if (self._step + self._phase) // 250 % 2 else 15.0

    def _observe(self) -> np.ndarray:
        return np.array([self._room, self._wanted(), self._heater], np.float32)


class Errand(gymnasium.Env):
    """An agent in a grid of 4 x 4 fetches one of three things and brings it to a door: integers in a Dict.

    Observation: Dict of the position (MultiDiscrete), the place of the thing (MultiDiscrete), its kind (Discrete), and
    whether it is carried (MultiBinary). The door of each kind is another corner. Actions: four moves, and pick up.
    Rewards: 1 for picking up, 1 for the right door, -0.01 for each step. Episodes have 40 steps at most.
    """

    size, length = 4, 40
    observation_space = spaces.Dict(
        position=spaces.MultiDiscrete([4, 4]),
        thing=spaces.MultiDiscrete([4, 4]),
        kind=spaces.Discrete(3),
        carried=spaces.MultiBinary(1),
    )
    action_space = spaces.Discrete(5)
    _moves = np.array([[0, 1], [0, -1], [1, 0], [-1, 0], [0, 0]])
    _doors = np.array([[0, 0], [0, 3], [3, 0]])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._position, self._thing = self.np_random.integers(4, size=2), self.np_random.integers(4, size=2)
        self._kind, self._carried, self._step = int(self.np_random.integers(3)), False, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self._position = np.clip(self._position + self._moves[int(action)], 0, self.size - 1)
        reward, arrived = -0.01, False
        if not self._carried and int(action) == 4 and (self._position == self._thing).all():
            self._carried, reward = True, 1.0
        elif self._carried and (self._position == self._doors[self._kind]).all():
            reward, arrived = 1.0, True
        self._step += 1
        return self._observe(), reward, arrived, self._step >= self.length, {}

    def _observe(self) -> dict:
        return {
            "position": self._position.astype(np.int64),
            "thing": self._thing.astype(np.int64),
            "kind": np.int64(self._kind),
            "carried": np.array([self._carried], np.int8),
        }


class Tuning(gymnasium.Env):
    """One of `num_actions` dials brings a value to its target: actions with an order that nothing says.

    Observation: value and target, in [0, 1]. Action k moves the value towards k / (num_actions - 1) by a third. Reward:
    1 - 5 |value - target|, at least -1. Targets change every 10 steps; episodes have 50.
    """

    length = 50

    def __init__(self, num_actions: int = 50):
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(num_actions)
        self._goals = np.linspace(0, 1, num_actions)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._value, self._target, self._step = 0.5, float(self.np_random.uniform()), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._value += (self._goals[int(action)] - self._value) / 3
        reward = max(-1.0, 1 - 5 * abs(self._value - self._target))
        self._step += 1
        if self._step % 10 == 0:
            self._target = float(self.np_random.uniform())
        return self._observe(), reward, False, self._step >= self.length, {}

    def _observe(self) -> np.ndarray:
        return np.array([self._value, self._target], np.float32)


class Pixels(gymnasium.Env):
    """A ball falls through an image of 32 x 32 pixels, and a paddle catches it: reward 1 or -1 at the end.

    Observation: uint8 `[32, 32, 3]`, the ball red and the paddle green, 3 x 3 and 2 x 7 pixels. Actions: left, stay,
    right, by 3 pixels. The ball falls 3 pixels in a step, 9 steps in all.
    """

    observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._ball, self._paddle, self._row = int(self.np_random.integers(2, 30)), 16, 2
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._paddle = min(28, max(3, self._paddle + 3 * (int(action) - 1)))
        self._row += 3
        landed = self._row >= 29
        reward = (1.0 if abs(self._ball - self._paddle) <= 4 else -1.0) if landed else 0.0
        return self._observe(), reward, landed, False, {}

    def _observe(self) -> np.ndarray:
        image = np.zeros((32, 32, 3), np.uint8)
        image[max(0, self._row - 1) : self._row + 2, self._ball - 1 : self._ball + 2, 0] = 255
        image[30:, max(0, self._paddle - 3) : self._paddle + 4, 1] = 255
        return image


class Recall(gymnasium.Env):
    """One of two signals is shown at the start, and asked for 5 steps later: a policy without memory gets half of it.

    Observation: the signal, -1 or 1, then 0; and the fraction of the episode. Reward: 1 for the right answer.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    length = 6

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._signal, self._step = int(self.np_random.integers(2)), 0
        return np.array([2 * self._signal - 1, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        ends = self._step >= self.length
        reward = float(ends and int(action) == self._signal)
        return np.array([0.0, self._step / self.length], np.float32), reward, ends, False, {}


class Following(gymnasium.Env):
    """A point in space follows another one that circles: three actions, and a reward at each step.

    Observation: position, velocity, and the distance to the target in each direction. Action: acceleration in [-1, 1].
    Reward: exp(-distance). Episodes have 200 steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (9,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    length = 200

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._position, self._velocity = self.np_random.uniform(-1, 1, 3), np.zeros(3)
        self._phase, self._step = float(self.np_random.uniform(0, 2 * np.pi)), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._velocity = 0.95 * self._velocity + 0.1 * np.clip(action, -1, 1)
        self._position = self._position + 0.1 * self._velocity
        self._step += 1
        reward = float(np.exp(-np.linalg.norm(self._target() - self._position)))
        return self._observe(), reward, False, self._step >= self.length, {}

    def _target(self) -> np.ndarray:
        angle = self._phase + 0.02 * self._step
        return np.array([np.cos(angle), np.sin(angle), 0.5])

    def _observe(self) -> np.ndarray:
        return np.concatenate([self._position, self._velocity, self._target() - self._position])


class Mixing(gymnasium.Env):
    """Two flows of unequal range are mixed to a pressure and a temperature, in units of their own.

    Observation: pressure in pascal and temperature in kelvin, and what is wanted. Action: cold flow in [0, 3] and hot
    flow in [-5, 10], of which negative values do nothing. Reward: minus the cost of both errors, in the thousands.
    Episodes have 150 steps.
    """

    observation_space = spaces.Box(0.0, np.inf, (4,), np.float32)
    action_space = spaces.Box(np.array([0, -5], np.float32), np.array([3, 10], np.float32))
    length = 150

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._amount, self._heat, self._step = 5.0, 5.0 * 300, 0
        self._wanted = np.array([self.np_random.uniform(5, 10), self.np_random.uniform(300, 350)])
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        cold, hot = np.clip(action, [0, 0], [3, 10])
        self._amount, self._heat = (
            0.8 * self._amount + 0.3 * (cold + hot / 3),
            0.8 * self._heat + 0.3 * (280 * cold + 400 * hot / 3),
        )
        self._step += 1
        amount, heat = self._wanted
        error = abs(self._amount - amount) / 5 + abs(self._temperature() - heat) / 50
        return self._observe(), -1000.0 * float(error), False, self._step >= self.length, {}

    def _temperature(self) -> float:
        return self._heat / max(self._amount, 0.1) if self._amount > 0.1 else 280.0

    def _observe(self) -> np.ndarray:
        amount, heat = self._wanted
        return np.array([1e4 * self._amount, self._temperature(), 1e4 * amount, heat], np.float32)


class Sorting(gymnasium.Env):
    """Five numbers are sorted by exchanging neighbours: -0.1 for each step, and 1 when they are in order.

    Observation: MultiDiscrete, the permutation. Actions: which of four pairs. Episodes have 30 steps at most.
    """

    observation_space = spaces.MultiDiscrete([5] * 5)
    action_space = spaces.Discrete(4)
    length = 30

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._numbers, self._step = self.np_random.permutation(5), 0
        return self._numbers.astype(np.int64), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        pair = [int(action), int(action) + 1]
        self._numbers[pair] = self._numbers[pair[::-1]]
        self._step += 1
        is_sorted = bool((np.diff(self._numbers) > 0).all())
        return self._numbers.astype(np.int64), 1.0 if is_sorted else -0.1, is_sorted, self._step >= self.length, {}


class Chase(gymnasium.Env):
    """A bright square is moved onto a dim one that walks at random, in a grey image of 24 x 24 pixels.

    Observation: uint8 `[24, 24, 1]`, of 8 x 8 cells. Actions: stay, and four moves. Reward: 1 for each step on the
    other square. Episodes have 30 steps.
    """

    observation_space = spaces.Box(0, 255, (24, 24, 1), np.uint8)
    action_space = spaces.Discrete(5)
    length = 30
    _moves = np.array([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._own, self._other, self._step = self.np_random.integers(8, size=2), self.np_random.integers(8, size=2), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._own = np.clip(self._own + self._moves[int(action)], 0, 7)
        if self.np_random.random() < 0.3:
            self._other = np.clip(self._other + self._moves[int(self.np_random.integers(5))], 0, 7)
        self._step += 1
        reward = float((self._own == self._other).all())
        return self._observe(), reward, False, self._step >= self.length, {}

    def _observe(self) -> np.ndarray:
        image = np.zeros((8, 8), np.uint8)
        image[tuple(self._other)] = 100
        image[tuple(self._own)] = 255
        return image.repeat(3, 0).repeat(3, 1)[..., None]


class Queue(gymnasium.Env):
    """A server works at one of three speeds while customers arrive in waves: a long horizon and chance.

    Observation: waiting customers, 0 to 100, and the time of the day, 0 to 500. Actions: speed. Reward: minus the
    waiting customers and the cost of the speed. Episodes have 500 steps.
    """

    observation_space = spaces.Box(np.array([0, 0], np.float32), np.array([100, 500], np.float32))
    action_space = spaces.Discrete(3)
    length = 500

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._waiting, self._step = 10, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        rate = 1.0 + np.sin(2 * np.pi * self._step / 250)
        arrived = int(self.np_random.poisson(rate))
        self._waiting = int(np.clip(self._waiting + arrived - int(action), 0, 100))
        self._step += 1
        cost = 0.1 * self._waiting + (0.0, 0.3, 1.0)[int(action)]
        return self._observe(), -float(cost), False, self._step >= self.length, {}

    def _observe(self) -> np.ndarray:
        return np.array([self._waiting, self._step], np.float32)


class Battery(gymnasium.Env):
    """A battery buys and sells energy at a price that changes over the day: rewards in euros, units that differ.

    Observation: charge in kilowatt-hours (0 to 10), price in euros per megawatt-hour (about 20 to 180), sine and
    cosine of the time of day. Action: power in [-5, 5] kilowatts, positive to charge. Reward: income of the quarter of
    an hour, in euros; losses are a tenth of the energy. Episodes have 192 steps, two days.
    """

    observation_space = spaces.Box(
        np.array([0, 0, -1, -1], np.float32), np.array([10, 400, 1, 1], np.float32), dtype=np.float32
    )
    action_space = spaces.Box(-5.0, 5.0, (1,), np.float32)
    length = 192

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._charge, self._step, self._noise = 5.0, int(self.np_random.integers(96)), 0.0
        self._end = self._step + self.length
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        wanted = 0.25 * float(np.clip(np.asarray(action).reshape(-1)[0], -5, 5))
        energy = float(np.clip(wanted, -self._charge, 10 - self._charge))
        reward = -self._price() / 1000 * (energy if energy > 0 else 0.9 * energy)
        self._charge += 0.9 * energy if energy > 0 else energy
        self._noise = 0.9 * self._noise + 4 * float(self.np_random.standard_normal())
        self._step += 1
        return self._observe(), reward, False, self._step >= self._end, {}

    def _price(self) -> float:
        return float(np.clip(100 - 60 * np.cos(2 * np.pi * self._step / 48) + self._noise, 0, 400))

    def _observe(self) -> np.ndarray:
        angle = 2 * np.pi * self._step / 96
        return np.array([self._charge, self._price(), np.sin(angle), np.cos(angle)], np.float32)


class Parking(gymnasium.Env):
    """A car with a turning circle is brought to a parking space and stopped there: a Dict observation.

    Observation: Dict of `pose` (x and y in metres, sine and cosine of the heading) and `speed` in metres per second.
    Action: acceleration and steering, each in [-1, 1]. Reward: minus the distance to the origin, divided by 10; -20
    where the car leaves the lot of 20 x 20 metres, which ends the episode. Episodes have 100 steps of 0.2 seconds.
    """

    observation_space = spaces.Dict(
        pose=spaces.Box(-20.0, 20.0, (4,), np.float32), speed=spaces.Box(-5.0, 5.0, (1,), np.float32)
    )
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    length = 100

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._place = self.np_random.uniform(-8, 8, 2)
        self._heading, self._speed, self._step = float(self.np_random.uniform(-np.pi, np.pi)), 0.0, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        acceleration, steering = np.clip(np.asarray(action, np.float64), -1, 1)
        self._speed = float(np.clip(self._speed + 0.2 * 2 * acceleration, -5, 5))
        self._heading += 0.2 * self._speed * np.tan(0.6 * steering) / 2.5
        self._place = self._place + 0.2 * self._speed * np.array([np.cos(self._heading), np.sin(self._heading)])
        self._step += 1
        left = bool((np.abs(self._place) > 10).any())
        reward = -20.0 if left else -float(np.hypot(*self._place)) / 10
        return self._observe(), reward, left, self._step >= self.length, {}

    def _observe(self) -> dict:
        pose = np.array([*self._place, np.sin(self._heading), np.cos(self._heading)], np.float32)
        return {"pose": pose, "speed": np.array([self._speed], np.float32)}


class Crossroads(gymnasium.Env):
    """A traffic light of two directions switches so that few cars wait: integers, chance, and a cost of switching.

    Observation: MultiDiscrete of the four queues (0 to 20), the direction that is green, and steps since the last
    switch (at most 9). Actions: keep or switch. After a switch no car passes for two steps. Reward: minus the waiting
    cars, divided by 10. Episodes have 250 steps.
    """

    observation_space = spaces.MultiDiscrete([21, 21, 21, 21, 2, 10])
    action_space = spaces.Discrete(2)
    length = 250

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._queues, self._green, self._since, self._step = self.np_random.integers(6, size=4), 0, 9, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if int(action):
            self._green, self._since = 1 - self._green, 0
        else:
            self._since = min(9, self._since + 1)
        arrived = self.np_random.random(4) < (0.45, 0.35, 0.25, 0.15)
        passed = np.zeros(4, np.int64)
        if self._since >= 2:
            passed[2 * self._green : 2 * self._green + 2] = 1
        self._queues = np.clip(self._queues + arrived - passed, 0, 20)
        self._step += 1
        return self._observe(), -float(self._queues.sum()) / 10, False, self._step >= self.length, {}

    def _observe(self) -> np.ndarray:
        return np.array([*self._queues, self._green, self._since], np.int64)


class Snake(gymnasium.Env):
    """A snake of three cells collects food without leaving its field: an image of 30 x 30 pixels in colour.

    Observation: uint8 `[30, 30, 3]`, of 10 x 10 cells: head red, body green, food blue. Actions: left, ahead, right.
    Reward: 1 for food, which appears anew elsewhere; -1 at the border, which ends the episode. Episodes have 60 steps
    at most.
    """

    observation_space = spaces.Box(0, 255, (30, 30, 3), np.uint8)
    action_space = spaces.Discrete(3)
    length = 60
    _moves = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._direction, self._step = int(self.np_random.integers(4)), 0
        head = self.np_random.integers(3, 7, size=2)
        self._body = [head - k * self._moves[self._direction] for k in range(3)]
        self._food = self.np_random.integers(10, size=2)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._direction = (self._direction + int(action) - 1) % 4
        head = self._body[0] + self._moves[self._direction]
        self._step += 1
        left = bool(((head < 0) | (head > 9)).any())
        reward = -1.0 if left else 0.0
        if not left:
            self._body = [head, *self._body[:-1]]
            if (head == self._food).all():
                reward, self._food = 1.0, self.np_random.integers(10, size=2)
        return self._observe(), reward, left, self._step >= self.length, {}

    def _observe(self) -> np.ndarray:
        image = np.zeros((10, 10, 3), np.uint8)
        image[self._food[0], self._food[1], 2] = 255
        for k, (row, column) in enumerate(self._body):
            image[row, column, 0 if k == 0 else 1] = 255
        return image.repeat(3, 0).repeat(3, 1)


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      name: of the row.
      env: id of gymnasium, or a function that makes the environment.
      algorithms: that are compared on it.
    """

    name: str
    env: str | Callable[[], gymnasium.Env]
    algorithms: tuple[str, ...]


def _units() -> gymnasium.Env:
    return Balance(observation_units=(1e-3, 1.0, 1e2, 1e4))


def _large_rewards() -> gymnasium.Env:
    return Balance(reward_unit=1e3)


def _small_rewards() -> gymnasium.Env:
    return Balance(reward_unit=1e-3, num_actions=3)


def _cliff_walking() -> gymnasium.Env:
    return gymnasium.make("CliffWalking-v1", max_episode_steps=200)  # gymnasium sets no limit


FIRST = {
    task.name: task
    for task in (
        Task("docking", Docking, CONTINUOUS),
        Task("heating", Heating, CONTINUOUS),
        Task("units", _units, CONTINUOUS),
        Task("large_rewards", _large_rewards, CONTINUOUS),
        Task("inverted_pendulum", "InvertedPendulum-v5", CONTINUOUS),
        Task("reacher", "Reacher-v5", CONTINUOUS),
        Task("mountain_car", "MountainCarContinuous-v0", ("PPO", "A2C", "TD3")),
        Task("small_rewards", _small_rewards, DISCRETE),
        Task("tuning", Tuning, DISCRETE),
        Task("errand", Errand, DISCRETE),
        Task("pixels", Pixels, DISCRETE),
        Task("recall", Recall, DISCRETE),
        Task("frozen_lake", "FrozenLake-v1", DISCRETE),
        Task("acrobot", "Acrobot-v1", ("A2C",)),
    )
}
SECOND = {
    task.name: task
    for task in (
        Task("following", Following, CONTINUOUS),
        Task("mixing", Mixing, CONTINUOUS),
        Task("double_pendulum", "InvertedDoublePendulum-v5", CONTINUOUS),
        Task("sorting", Sorting, DISCRETE),
        Task("chase", Chase, DISCRETE),
        Task("queue", Queue, DISCRETE),
    )
}
THIRD = {
    task.name: task
    for task in (
        Task("battery", Battery, CONTINUOUS),
        Task("parking", Parking, CONTINUOUS),
        Task("swimmer", "Swimmer-v5", CONTINUOUS),
        Task("crossroads", Crossroads, DISCRETE),
        Task("snake", Snake, DISCRETE),
        Task("cliff_walking", _cliff_walking, DISCRETE),
    )
}
TASKS = FIRST | SECOND | THIRD


def made(task: Task) -> gymnasium.Env:
    """Returns a new environment of a task."""
    return gymnasium.make(task.env) if isinstance(task.env, str) else task.env()


def returns(task: Task, act: Callable[[Any, bool], Any]) -> list[float]:
    """Returns the return of each episode of the evaluation, the same episodes for every policy.

    Args:
      task: that the policy was trained on.
      act: takes an observation, and whether it is the first of its episode; returns an action of the environment.
    """
    env, found = made(task), []
    for k in range(NUM_EPISODES):
        observation, _ = env.reset(seed=1000 + k)
        is_first, ended, total = True, False, 0.0
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(act(observation, is_first))
            is_first, ended, total = False, terminated or truncated, total + float(reward)
        found.append(total)
    env.close()
    return found
