"""Shipped functional environments: gymnasium's classic control tasks, two tasks of bsuite, and a memory task.

The classic control tasks have gymnasium's dynamics, spaces and time limits. The tasks compute in the dtype of their
state, float32 in alfish.
"""

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv

from alfish.environments.functional.advance import Draws, Integers, Uniform
from alfish.environments.rendering import Frame
from alfish.parameters import PositiveInt, Range, checked


class Cart(NamedTuple):
    """State of a cart with a pole; leaves `[B]`, in m, m/s, rad and rad/s."""

    position: torch.Tensor
    velocity: torch.Tensor
    angle: torch.Tensor  # 0 where the pole is upright
    spin: torch.Tensor


class CartPole(FuncEnv):
    """gymnasium's CartPole-v1: pushes to the left (0) or right (1) keep a pole upright on a cart."""

    observation_space = spaces.Box(
        -np.array([4.8, np.inf, math.radians(24), np.inf], np.float32),
        np.array([4.8, np.inf, math.radians(24), np.inf], np.float32),
    )
    action_space = spaces.Discrete(2)
    max_episode_steps = 500
    render_fps = 50
    initial_draws = {"start": Uniform(-0.05, 0.05, (4,))}

    def initial(self, rng: Draws, params: Any = None) -> Cart:
        return Cart(*rng["start"].unbind(-1))

    def transition(self, state: Cart, action: torch.Tensor, rng: Draws, params: Any = None) -> Cart:
        position, velocity, angle, spin = state
        force = 20.0 * action.to(position.dtype) - 10.0
        cos, sin = torch.cos(angle), torch.sin(angle)
        # A cart of 1 kg, a pole of 0.1 kg and 2 x 0.5 m, Euler steps of 0.02 s.
        push = (force + 0.05 * spin.square() * sin) / 1.1
        angular = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        linear = push - 0.05 * angular * cos / 1.1
        return Cart(position + 0.02 * velocity, velocity + 0.02 * linear, angle + 0.02 * spin, spin + 0.02 * angular)

    def observation(self, state: Cart, rng: Draws, params: Any = None) -> torch.Tensor:
        return torch.stack(state, -1)

    def reward(self, state: Cart, action: torch.Tensor, next_state: Cart, rng: Draws, params: Any = None) -> Any:
        return torch.ones_like(state.position)

    def terminal(self, state: Cart, rng: Draws, params: Any = None) -> torch.Tensor:
        return (state.position.abs() > 2.4) | (state.angle.abs() > math.radians(12))

    def render_image(self, state: Cart, render_state: Any = None, params: Any = None) -> tuple[Any, np.ndarray]:
        position, _, angle, _ = (float(leaf[0]) for leaf in state)
        frame = Frame((-2.4, 2.4), (-1.2, 2.0))
        frame.line((-2.4, 0.0), (2.4, 0.0), 0.02)
        frame.line((position - 0.15, 0.0), (position + 0.15, 0.0), 0.25)
        frame.line((position, 0.1), (position + math.sin(angle), 0.1 + math.cos(angle)), 0.08, (202, 152, 101))
        return render_state, frame.pixels


class Swing(NamedTuple):
    """State of a pendulum; leaves `[B]`, in rad and rad/s."""

    angle: torch.Tensor  # 0 where the pendulum is upright
    spin: torch.Tensor


class Pendulum(FuncEnv):
    """gymnasium's Pendulum-v1: a torque in [-2, 2] swings a pendulum up and holds it there."""

    observation_space = spaces.Box(-np.array([1, 1, 8], np.float32), np.array([1, 1, 8], np.float32))
    action_space = spaces.Box(-2, 2, (1,), np.float32)
    max_episode_steps = 200
    initial_draws = {"angle": Uniform(-math.pi, math.pi), "spin": Uniform(-1, 1)}

    def initial(self, rng: Draws, params: Any = None) -> Swing:
        return Swing(rng["angle"], rng["spin"])

    def transition(self, state: Swing, action: torch.Tensor, rng: Draws, params: Any = None) -> Swing:
        torque = action[:, 0].clamp(-2, 2)
        # A rod of 1 kg and 1 m, g = 10 m/s^2, steps of 0.05 s.
        spin = (state.spin + (15.0 * torch.sin(state.angle) + 3.0 * torque) * 0.05).clamp(-8, 8)
        return Swing(state.angle + spin * 0.05, spin)

    def observation(self, state: Swing, rng: Draws, params: Any = None) -> torch.Tensor:
        return torch.stack([torch.cos(state.angle), torch.sin(state.angle), state.spin], -1)

    def reward(self, state: Swing, action: torch.Tensor, next_state: Swing, rng: Draws, params: Any = None) -> Any:
        torque = action[:, 0].clamp(-2, 2)
        return -(_wrapped(state.angle).square() + 0.1 * state.spin.square() + 0.001 * torque.square())

    def terminal(self, state: Swing, rng: Draws, params: Any = None) -> torch.Tensor:
        return torch.zeros_like(state.angle, dtype=torch.bool)

    def render_image(self, state: Swing, render_state: Any = None, params: Any = None) -> tuple[Any, np.ndarray]:
        angle, frame = float(state.angle[0]), Frame((-1.3, 1.3), (-1.3, 1.3))
        frame.line((0.0, 0.0), (-math.sin(angle), math.cos(angle)), 0.18, (204, 77, 77))
        frame.line((0.0, 0.0), (0.0, 0.0), 0.1)
        return render_state, frame.pixels


class Links(NamedTuple):
    """State of a chain of two links; leaves `[B]`, in rad and rad/s."""

    angle: torch.Tensor  # angle of the first link, 0 where it hangs down
    bend: torch.Tensor  # angle of the second link to the first
    spin: torch.Tensor
    bend_spin: torch.Tensor


class Acrobot(FuncEnv):
    """gymnasium's Acrobot-v1: a torque of -1, 0 or 1 between two links swings their end above a height."""

    observation_space = spaces.Box(
        -np.array([1, 1, 1, 1, 4 * np.pi, 9 * np.pi], np.float32),
        np.array([1, 1, 1, 1, 4 * np.pi, 9 * np.pi], np.float32),
    )
    action_space = spaces.Discrete(3)
    max_episode_steps = 500
    render_fps = 15
    initial_draws = {"start": Uniform(-0.1, 0.1, (4,))}

    def initial(self, rng: Draws, params: Any = None) -> Links:
        return Links(*rng["start"].unbind(-1))

    def transition(self, state: Links, action: torch.Tensor, rng: Draws, params: Any = None) -> Links:
        torque = action.to(state.angle.dtype) - 1.0

        def shifted(slope: Links, seconds: float) -> Links:
            return Links(*(value + seconds * change for value, change in zip(state, slope)))

        # Runge-Kutta of order 4, one step of 0.2 s.
        first = _slope(state, torque)
        second = _slope(shifted(first, 0.1), torque)
        third = _slope(shifted(second, 0.1), torque)
        fourth = _slope(shifted(third, 0.2), torque)
        mean = Links(*((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(first, second, third, fourth)))
        after = shifted(mean, 0.2)
        return Links(
            _wrapped(after.angle),
            _wrapped(after.bend),
            after.spin.clamp(-4 * math.pi, 4 * math.pi),
            after.bend_spin.clamp(-9 * math.pi, 9 * math.pi),
        )

    def observation(self, state: Links, rng: Draws, params: Any = None) -> torch.Tensor:
        angle, bend, spin, bend_spin = state
        directions = torch.cos(angle), torch.sin(angle), torch.cos(bend), torch.sin(bend)
        return torch.stack([*directions, spin, bend_spin], -1)

    def reward(self, state: Links, action: torch.Tensor, next_state: Links, rng: Draws, params: Any = None) -> Any:
        return -(~self.terminal(next_state, rng)).to(state.angle.dtype)

    def terminal(self, state: Links, rng: Draws, params: Any = None) -> torch.Tensor:
        return -torch.cos(state.angle) - torch.cos(state.bend + state.angle) > 1.0

    def render_image(self, state: Links, render_state: Any = None, params: Any = None) -> tuple[Any, np.ndarray]:
        angle, bend = float(state.angle[0]), float(state.bend[0])
        frame = Frame((-2.2, 2.2), (-2.2, 2.2))
        elbow = math.sin(angle), -math.cos(angle)
        end = elbow[0] + math.sin(angle + bend), elbow[1] - math.cos(angle + bend)
        frame.line((-2.2, 1.0), (2.2, 1.0), 0.02)
        frame.line((0.0, 0.0), elbow, 0.2, (0, 204, 204))
        frame.line(elbow, end, 0.2, (0, 150, 204))
        return render_state, frame.pixels


class Ride(NamedTuple):
    """State of a car in a valley; leaves `[B]`."""

    position: torch.Tensor
    velocity: torch.Tensor


class MountainCarContinuous(FuncEnv):
    """gymnasium's MountainCarContinuous-v0: a weak motor, with a force in [-1, 1], drives a car out of a valley."""

    observation_space = spaces.Box(np.array([-1.2, -0.07], np.float32), np.array([0.6, 0.07], np.float32))
    action_space: spaces.Space = spaces.Box(-1, 1, (1,), np.float32)
    max_episode_steps = 999
    initial_draws = {"start": Uniform(-0.6, -0.4)}
    goal = 0.45

    def initial(self, rng: Draws, params: Any = None) -> Ride:
        return Ride(rng["start"], torch.zeros_like(rng["start"]))

    def transition(self, state: Ride, action: torch.Tensor, rng: Draws, params: Any = None) -> Ride:
        push = self._push(action, state.position)
        velocity = (state.velocity + push - 0.0025 * torch.cos(3 * state.position)).clamp(-0.07, 0.07)
        position = (state.position + velocity).clamp(-1.2, 0.6)
        is_at_wall = (position <= -1.2) & (velocity < 0)
        return Ride(position, velocity.masked_fill(is_at_wall, 0))

    def observation(self, state: Ride, rng: Draws, params: Any = None) -> torch.Tensor:
        return torch.stack(state, -1)

    def reward(self, state: Ride, action: torch.Tensor, next_state: Ride, rng: Draws, params: Any = None) -> Any:
        return 100.0 * self.terminal(next_state, rng) - 0.1 * action[:, 0].square()

    def terminal(self, state: Ride, rng: Draws, params: Any = None) -> torch.Tensor:
        return (state.position >= self.goal) & (state.velocity >= 0)

    def render_image(self, state: Ride, render_state: Any = None, params: Any = None) -> tuple[Any, np.ndarray]:
        position, frame = float(state.position[0]), Frame((-1.2, 0.6), (-0.1, 1.1))
        places = np.linspace(-1.2, 0.6, 40)
        heights = 0.45 * np.sin(3 * places)
        for one in zip(places, heights + 0.5, places[1:], heights[1:] + 0.5):
            frame.line(one[:2], one[2:], 0.01)
        frame.line((self.goal, 0.45 * math.sin(3 * self.goal) + 0.5), (self.goal, 1.05), 0.02, (204, 204, 0))
        height = 0.45 * math.sin(3 * position) + 0.53
        frame.line((position - 0.04, height), (position + 0.04, height), 0.06)
        return render_state, frame.pixels

    def _push(self, action: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns the change of the velocity by the motor, `[B]`."""
        return 0.0015 * action[:, 0].clamp(-1, 1)


class MountainCar(MountainCarContinuous):
    """gymnasium's MountainCar-v0: the motor pushes to the left (0), not at all (1), or to the right (2)."""

    action_space = spaces.Discrete(3)
    max_episode_steps = 200
    goal = 0.5

    def reward(self, state: Ride, action: torch.Tensor, next_state: Ride, rng: Draws, params: Any = None) -> Any:
        return torch.full_like(state.position, -1.0)

    def _push(self, action: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return 0.001 * (action.to(like.dtype) - 1.0)


class Fall(NamedTuple):
    """State of a game of catch; leaves `[B]` int64."""

    ball: torch.Tensor  # column of the ball
    row: torch.Tensor  # row of the ball, 0 at the top
    paddle: torch.Tensor  # column of the paddle


class Catch(FuncEnv):
    """bsuite's Catch: a paddle in the lowest row of a board of 10 x 5 catches a ball that falls one row a step.

    The observation has the board row by row, with 1 at the ball and at the paddle. Actions move the paddle to the left
    (0), not at all (1), or to the right (2). An episode has 9 steps; the reward of the last step is 1 or -1.

    Source: Osband et al., "Behaviour Suite for Reinforcement Learning", 2020.
    """

    observation_space = spaces.Box(0, 1, (50,), np.float32)
    action_space = spaces.Discrete(3)
    max_episode_steps = 9
    render_fps = 5
    initial_draws = {"column": Integers(5)}

    def initial(self, rng: Draws, params: Any = None) -> Fall:
        zeros = torch.zeros_like(rng["column"])
        return Fall(rng["column"], zeros, zeros + 2)

    def transition(self, state: Fall, action: torch.Tensor, rng: Draws, params: Any = None) -> Fall:
        return Fall(state.ball, state.row + 1, (state.paddle + action - 1).clamp(0, 4))

    def observation(self, state: Fall, rng: Draws, params: Any = None) -> torch.Tensor:
        places = torch.arange(50, device=state.ball.device)
        ball, paddle = state.row * 5 + state.ball, 45 + state.paddle
        return ((places == ball[:, None]) | (places == paddle[:, None])).to(torch.float32)

    def reward(self, state: Fall, action: torch.Tensor, next_state: Fall, rng: Draws, params: Any = None) -> Any:
        caught = torch.where(next_state.ball == next_state.paddle, 1.0, -1.0)
        return caught.masked_fill(~self.terminal(next_state, rng), 0.0)

    def terminal(self, state: Fall, rng: Draws, params: Any = None) -> torch.Tensor:
        return state.row >= 9

    def render_image(self, state: Fall, render_state: Any = None, params: Any = None) -> tuple[Any, np.ndarray]:
        return render_state, Frame.of_board(self.observation(state, None)[0].reshape(10, 5))  # type: ignore[arg-type]


class Dive(NamedTuple):
    """State of a diver in a square grid; leaves `[B]` int64."""

    row: torch.Tensor
    column: torch.Tensor


@checked
class DeepSea(FuncEnv):
    """bsuite's DeepSea: a task of exploration in a grid of `size` x `size` cells.

    Each step moves one row down, and one column to the left or to the right. The action that moves to the right differs
    between cells. A step to the right costs 0.01 / size; in the last column, it also has reward 1. The observation is
    the one-hot code of the cell, row by row. The best return is 0.99; random actions reach it with probability 2^-size.

    Source: Osband et al., "Behaviour Suite for Reinforcement Learning", 2020.

    Args:
      size: number of rows and of columns, and of steps in an episode.
    """

    action_space = spaces.Discrete(2)
    render_fps = 5

    def __init__(self, size: PositiveInt = 10):
        super().__init__()
        self.size, self.max_episode_steps = size, size
        self.observation_space = spaces.Box(0, 1, (size * size,), np.float32)
        self.right = torch.from_numpy(np.random.default_rng(size).integers(2, size=size * size))

    def initial(self, rng: Draws, params: Any = None) -> Dive:
        zeros = torch.zeros(rng.batch_size, dtype=torch.int64, device=rng.device)
        return Dive(zeros, zeros)

    def transition(self, state: Dive, action: torch.Tensor, rng: Draws, params: Any = None) -> Dive:
        shift = torch.where(self._is_right(state, action), 1, -1)
        return Dive(state.row + 1, (state.column + shift).clamp(0, self.size - 1))

    def observation(self, state: Dive, rng: Draws, params: Any = None) -> torch.Tensor:
        cells = torch.arange(self.size * self.size, device=state.row.device)
        return (cells == self._cell(state)[:, None]).to(torch.float32)  # zeros below the last row

    def reward(self, state: Dive, action: torch.Tensor, next_state: Dive, rng: Draws, params: Any = None) -> Any:
        gain = (state.column == self.size - 1) * 1.0 - 0.01 / self.size
        return gain.masked_fill(~self._is_right(state, action), 0.0)

    def terminal(self, state: Dive, rng: Draws, params: Any = None) -> torch.Tensor:
        return state.row >= self.size

    def render_image(self, state: Dive, render_state: Any = None, params: Any = None) -> tuple[Any, np.ndarray]:
        board = self.observation(state, None)[0].reshape(self.size, self.size)  # type: ignore[arg-type]
        return render_state, Frame.of_board(board)

    def _cell(self, state: Dive) -> torch.Tensor:
        return state.row * self.size + state.column

    def _is_right(self, state: Dive, action: torch.Tensor) -> torch.Tensor:
        # Below the last row there is no cell; the value is not used, but the index must exist.
        return action == self.right[self._cell(state).clamp(max=self.size * self.size - 1)]


class Memory(NamedTuple):
    """State of a memory task; leaves `[B]` int64."""

    cue: torch.Tensor
    step: torch.Tensor


@checked
class Recall(FuncEnv):
    """A memory task: the first observation shows a cue, and the action `length` steps later must name it.

    The observation has the one-hot code of the cue in the first step, and zeros in later steps. Its last entry is 1 in
    the last step. The action of the last step has reward 1 if it names the cue. Without memory, the average return is 1
    / num_cues.

    Args:
      length: number of steps from the cue to the action that must name it, at least 1.
      num_cues: number of cues and of actions, at least 2.
    """

    def __init__(self, length: PositiveInt = 10, num_cues: Annotated[int, Range(2)] = 2):
        super().__init__()
        self.length = length
        self.num_cues = num_cues
        self.max_episode_steps = length + 1
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues)
        self.initial_draws = {"cue": Integers(num_cues)}

    def initial(self, rng: Draws, params: Any = None) -> Memory:
        return Memory(rng["cue"], torch.zeros_like(rng["cue"]))

    def transition(self, state: Memory, action: torch.Tensor, rng: Draws, params: Any = None) -> Memory:
        return Memory(state.cue, state.step + 1)

    def observation(self, state: Memory, rng: Draws, params: Any = None) -> torch.Tensor:
        entries = torch.arange(self.num_cues + 1, device=state.cue.device)
        shown = (entries == state.cue[:, None]) & (state.step == 0)[:, None]
        asked = (entries == self.num_cues) & (state.step == self.length)[:, None]
        return (shown | asked).to(torch.float32)

    def reward(self, state: Memory, action: torch.Tensor, next_state: Memory, rng: Draws, params: Any = None) -> Any:
        return ((state.step == self.length) & (action == state.cue)).to(torch.float32)

    def terminal(self, state: Memory, rng: Draws, params: Any = None) -> torch.Tensor:
        return state.step > self.length


def _slope(state: Links, torque: torch.Tensor) -> Links:
    """Returns the time derivative of an acrobot's state. Each link has 1 kg, 1 m and a moment of inertia of 1 kg m^2.

    Source: Sutton & Barto, "Reinforcement Learning", 1998, section 11.3.
    """
    angle, bend, spin, bend_spin = state
    cos, sin = torch.cos(bend), torch.sin(bend)
    inertia, coupling = 3.5 + cos, 1.25 + 0.5 * cos
    lower = 4.9 * torch.cos(angle + bend - math.pi / 2)
    upper = -0.5 * bend_spin.square() * sin - bend_spin * spin * sin
    upper = upper + 14.7 * torch.cos(angle - math.pi / 2) + lower
    moment = torque + coupling / inertia * upper - 0.5 * spin.square() * sin - lower
    bend_change = moment / (1.25 - coupling.square() / inertia)
    return Links(spin, bend_spin, -(coupling * bend_change + upper) / inertia, bend_change)


def _wrapped(angle: torch.Tensor) -> torch.Tensor:
    """Returns an angle in [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
