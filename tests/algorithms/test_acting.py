import pytest
import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.acting import Actor, reset_state
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, StepType, TimeStep
from alfish.errors import UsageError
from alfish.transforms import Transform, Transforms


def test_state_is_reset_at_first_and_nowhere_else():
    step_type = torch.tensor([StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD], dtype=torch.int32)
    state = {"h": torch.ones(4, 2), "n": torch.ones(4)}
    initial = {"h": torch.zeros(4, 2), "n": torch.full((4,), 7.0)}
    reset = reset_state(state, initial, step_type)
    assert reset["h"].tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert reset["n"].tolist() == [7, 1, 1, 1]
    assert state["n"].tolist() == [1, 1, 1, 1], "reset_state wrote into its argument"


def test_without_memory_there_is_nothing_to_reset():
    assert reset_state(None, None, torch.zeros(2, dtype=torch.int32)) is None


def test_a_state_without_an_initial_state_is_used_unchanged():
    state = torch.ones(2)
    assert reset_state(state, None, torch.full((2,), StepType.FIRST, dtype=torch.int32)) is state


class Counting(RLAlgorithm):
    """Acts by the sum of what it sees and remembers; `predict_step` adds 100. Its info is its mode."""

    on_policy = True

    def initial_state(self, batch_size):
        return torch.full((batch_size,), 10.0)

    def rollout_step(self, time_step, state):
        training = torch.full_like(state, self.training)
        return AlgStep((time_step.observation + state)[:, None], state + 1, training)

    def predict_step(self, time_step, state):
        return self.rollout_step(time_step, state)._replace(output=(time_step.observation + state)[:, None] + 100)

    def train_step(self, experience, state): ...

    def calc_loss(self, experience, info): ...


class Shifted(Transform):
    """Adds its state to observations and makes every row FIRST, so that the reset shows which rows it reads."""

    def initial_state(self, batch_size):
        return torch.zeros(batch_size)

    def forward(self, time_step, state):
        step_type = torch.zeros_like(time_step.step_type)
        return time_step._replace(observation=time_step.observation + state, step_type=step_type), state + 1


def test_an_actor_transforms_rows_resets_states_and_calls_the_hook():
    observation, action = spaces.Box(-1, 1, ()), spaces.Box(-1, 1, (1,))
    algorithm = Counting(observation, action, specs.reward_spec())
    transforms = Transforms([Shifted], observation, specs.reward_spec())
    one = torch.ones(2)
    row = TimeStep(one.int(), one, one, one, one[:, None], one.int())  # MID
    actor = Actor(algorithm, transforms)
    before, initial = actor.first_state(2)
    assert [leaf.tolist() for leaf in before] == [[0, 0]] and initial.tolist() == [10, 10]
    states = (5 * one,), 7 * one
    seen, after, state = actor.see(row, *states, initial)
    assert seen.observation.tolist() == [6, 6] and after[0].tolist() == [6, 6] and state.tolist() == [10, 10]
    step, after = actor.act(row, *states, initial)
    assert step.output.tolist() == [[16], [16]] and step.state.tolist() == [11, 11] and after[0].tolist() == [6, 6]
    assert actor.act(row, *states)[0].output.tolist() == [[13], [13]], "a state without an initial one was reset"
    actor.check(step, initial, 2)
    with pytest.raises(UsageError, match="^rollout_step of Counting returned .* as action"):
        actor.check(step, initial, 3)
    greedy = Actor(algorithm, transforms, samples=False, sets_mode=True)
    assert greedy.act(row, *states, initial)[0].output.tolist() == [[116], [116]]
    assert greedy.step(row, initial).info.tolist() == [0, 0] and algorithm.training
    assert actor.step(row, initial).info.tolist() == [1, 1], "callers set the mode"
