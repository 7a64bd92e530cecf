"""Numbers as text for people."""


def counted(count: int, noun: str) -> str:
    """Returns '1 episode' or '1,000 episodes'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def significant(value: float, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits, and with all digits before the point: 0.9968, 480.2, 12845."""
    if 10 ** (digits - 1) <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
