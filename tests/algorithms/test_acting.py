import torch

from alfish.algorithms.acting import reset_state
from alfish.data import StepType


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
