"""Text on frames."""

from collections.abc import Sequence

import numpy as np

SHADE = 0.35  # brightness of the picture behind the text


def captioned(frame: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Returns a frame `[H, W, 3]` uint8 with lines of white text in its upper left corner, on a darker ground."""
    from PIL import Image, ImageDraw, ImageFont  # here, because imageio brings it

    size = max(10, min(frame.shape[:2]) // 24)
    font, text = ImageFont.load_default(size), "\n".join(lines)
    picture = Image.fromarray(np.ascontiguousarray(frame))
    draw = ImageDraw.Draw(picture)
    right, bottom = (int(end) + size // 2 for end in draw.multiline_textbbox((0, 0), text, font=font)[2:])
    box = (0, 0, min(right, picture.width), min(bottom, picture.height))
    picture.paste(picture.crop(box).point(lambda value: int(value * SHADE)), box)
    draw.multiline_text((size // 4, 0), text, fill="white", font=font)
    return np.asarray(picture)
