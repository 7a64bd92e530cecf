"""Numbers as text for people."""


def counted(count: int, noun: str) -> str:
    """Returns '1 episode' or '1,000 episodes'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def significant(value: float, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits, and with all digits before the point: 0.9968, 480.2, 12845."""
    if 10 ** (digits - 1) <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def size(num_bytes: int) -> str:
    """Returns '12 kB' or '3.4 MB', in powers of 1000."""
    if num_bytes < 1000:
        return counted(num_bytes, "byte")
    units = ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
    # From 999.5 on, three digits are 1 of the next unit.
    power, unit = next((power, unit) for power, unit in units if num_bytes >= 0.9995 * 10**power)
    return f"{significant(num_bytes / 10**power, 3)} {unit}"
