"""Parameters of constructors: their kinds and ranges, parts that a user gave, and all of them as a configuration.

An annotation declares what a parameter takes, and `checked` checks it, whoever calls.
"""

from alfish.parameters.kinds import (
    FiniteFloat,
    LayerSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Rate,
    UnitInterval,
    checked,
)

__all__ = [
    "FiniteFloat",
    "LayerSize",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Range",
    "Rate",
    "UnitInterval",
    "checked",
]
