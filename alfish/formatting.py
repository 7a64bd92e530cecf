"""Numbers as people read them."""


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, or all those before the point: 0.9968, 480.2, 12845."""
    if 10 ** (digits - 1) <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
