"""Parameters of constructors: their kinds and ranges, the parts that users pass, and descriptions as gin text.

An annotation declares what a parameter takes, and `checked` checks each call.
"""

from alfish.parameters import gin_internals
from alfish.parameters.checking import checked
from alfish.parameters.kinds import (
    FiniteFloat,
    LayerSize,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    Range,
    Rate,
    UnitInterval,
)

gin_internals.keep_sentences()
gin_internals.allow_redefinitions()

__all__ = [
    "FiniteFloat",
    "LayerSize",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OpenUnitInterval",
    "PositiveFloat",
    "PositiveInt",
    "Range",
    "Rate",
    "UnitInterval",
    "checked",
]
