"""Matplotlib figures in one style, without pyplot's global state. No other module imports matplotlib."""

import io
from typing import Any

import numpy as np

from alfish.errors import UsageError

# Okabe and Ito's colours for colour-blind people, without yellow, which is pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
LARGEST = 1e100  # largest absolute value that is drawn, so that an axis with margins stays finite
STYLES = ("-", "--", ":", "-.")  # line styles; the next one is used after all colours


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of a size in inches.

    Raises:
      UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a figure needs the extra 'plot': pip install 'alfish[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def drawable(values: Any) -> np.ndarray:
    """Returns values as an array; values that matplotlib cannot draw become nan."""
    array = np.asarray(values, float)
    return np.where(np.abs(array) < LARGEST, array, np.nan)


def tidy(axes: Any) -> None:
    """Adds a light grid to axes, and removes the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def engineering() -> Any:
    """Returns a tick formatter for large numbers: 50k, 2M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def encoded(figure: Any, suffix: str) -> bytes:
    """Returns the bytes of a figure as `.png` or `.svg`; equal figures have equal bytes."""
    import matplotlib

    content = io.BytesIO()
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "alfish"}):
        figure.savefig(content, format=suffix.removeprefix("."), dpi=120, metadata=metadata)
    return content.getvalue()
