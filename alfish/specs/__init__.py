"""Specs: nests (dict, tuple) whose leaves are gymnasium's Box, Discrete, MultiDiscrete and MultiBinary spaces.

A spec describes the observations or actions of an algorithm, for one environment, without batch dimension. Specs differ
from an environment's spaces as follows, and stored rows differ from the environment's values in the same way:

- Observations: float64 becomes float32; Discrete and MultiDiscrete start at 0.
- Actions: every leaf except Discrete becomes one-dimensional. A Box becomes float32, scaled to [-1, 1] if it is
  bounded; otherwise it keeps the environment's units. Discrete and MultiDiscrete start at 0 and are int64.

Only `ObservationUnits` and `ActionUnits` convert between these units.

An observation may have an action mask (`alfish.specs.masks`), a leaf with the space `ActionMask`.
"""

from alfish.specs.checks import (
    check_bounded,
    check_box_action,
    check_finite_choice,
    check_hybrid_action,
    check_learnable,
    check_scalar_reward,
    outside,
)
from alfish.specs.leaves import (
    VectorReward,
    action_spec,
    describe,
    leaves_in_words,
    observation_spec,
    reward_names,
    reward_spec,
    sample,
    zeros,
)
from alfish.specs.masks import ActionMask, MaskLayout, MaskReader, mask_path, mask_reader, num_choices, uniform_choice
from alfish.specs.spaces import (
    LEAF_SPACES,
    batch_of_one,
    has_channels_last,
    is_bounded,
    is_float,
    map_space,
    missing_bounds,
    torch_dtype,
    without_vast_bounds,
)
from alfish.specs.units import ActionUnits, ObservationUnits

__all__ = [
    "LEAF_SPACES",
    "ActionMask",
    "ActionUnits",
    "MaskLayout",
    "MaskReader",
    "ObservationUnits",
    "VectorReward",
    "action_spec",
    "batch_of_one",
    "check_bounded",
    "check_box_action",
    "check_finite_choice",
    "check_hybrid_action",
    "check_learnable",
    "check_scalar_reward",
    "describe",
    "has_channels_last",
    "is_bounded",
    "is_float",
    "leaves_in_words",
    "map_space",
    "missing_bounds",
    "mask_path",
    "mask_reader",
    "num_choices",
    "observation_spec",
    "outside",
    "reward_names",
    "reward_spec",
    "sample",
    "torch_dtype",
    "uniform_choice",
    "without_vast_bounds",
    "zeros",
]
