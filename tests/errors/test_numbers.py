"""Numbers as people read them."""

import math

import pytest

from alfish.errors import significant, size


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


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_400, "999 kB"),
        (999_999, "1 MB"),
        (3_400_000, "3.4 MB"),
        (999_950_000, "1 GB"),
        (1_500_000_000_000, "1.5 TB"),
    ],
)
def test_sizes_use_the_largest_unit_with_a_value_of_at_least_1(num_bytes, text):
    assert size(num_bytes) == text
