"""Numbers as people read them."""

import math

import pytest

from alfish.formatting import significant


@pytest.mark.parametrize(
    "value, text",
    [
        (0.99684, "0.9968"),
        (1.0, "1"),
        (0.000123456, "0.0001235"),
        (-141.93, "-141.9"),
        (999.96, "1000"),
        (-12845.3, "-12845"),
        (3.2e12, "3.2e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_number_has_its_significant_digits(value, text):
    assert significant(value) == text
