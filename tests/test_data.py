import itertools

import torch

from alfish.data import StepType, trainable

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


def test_a_row_trains_only_from_first_or_mid_to_mid_or_last():
    for here, arrival in itertools.product((FIRST, MID, LAST, PAD), repeat=2):
        step_type = torch.tensor([[here], [arrival]], dtype=torch.int32)
        trains = here in (FIRST, MID) and arrival in (MID, LAST)
        assert trainable(step_type).tolist() == [[trains]], (here, arrival)


def test_no_row_trains_across_an_episodes_end_or_into_padding():
    column = torch.tensor([FIRST, MID, LAST, FIRST, LAST, FIRST, MID, PAD, PAD], dtype=torch.int32)
    expected = [True, True, False, True, False, True, False, False]
    mask = trainable(torch.stack([column, column], 1))
    assert mask.shape == (8, 2)
    assert mask.dtype == torch.bool
    assert mask[:, 0].tolist() == mask[:, 1].tolist() == expected


def test_trainable_rows_of_a_column_do_not_depend_on_other_columns():
    step_type = torch.tensor([[LAST, MID], [FIRST, MID], [MID, LAST]], dtype=torch.int32)
    assert trainable(step_type).tolist() == [[False, True], [True, True]]


def test_one_row_trains_nothing():
    assert trainable(torch.zeros(1, 3, dtype=torch.int32)).shape == (0, 3)
