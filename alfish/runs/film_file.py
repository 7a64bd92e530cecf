"""Film files. Each frame is encoded when it is added, so the memory does not depend on the length of a film."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alfish.errors import RunError, UsageError, first_line, printable
from alfish.runs.files import temporary_of

SUFFIXES = (".mp4", ".gif")
# Maximum width in pixels, frames per second, and maximum seconds of the GIFs that TensorBoard shows instead of films.
GIF_WIDTH, GIF_FPS, GIF_SECONDS = 320, 10, 60


def check_extra(setting: str) -> None:
    """Raises UsageError if the extra 'video' is not installed; the message begins with `setting`."""
    try:
        import imageio.v2
        import imageio_ffmpeg
    except ImportError as error:
        raise UsageError(f"{setting} needs the extra 'video': pip install 'alfish[video]'") from error
    del imageio, imageio_ffmpeg


class FilmFile:
    """A film file; it gets its final name when it is complete.

    Args:
      directory: existing directory, in which the film is written.
      suffix: suffix of the file, one of `SUFFIXES`.
      fps: number of frames per second.
      setting: name of the film in messages, such as `--video=film.mp4`.

    Attributes:
      num_frames: number of frames so far.

    Raises:
      RunError: the file cannot be written.
    """

    def __init__(self, directory: Path, suffix: str, fps: float, setting: str):
        import imageio.v2  # imported here, because it is an extra

        self._setting, self.num_frames = setting, 0
        self._unfinished = Path(f"{temporary_of(directory / 'film')}.{id(self)}{suffix}")
        options: dict[str, Any] = {"duration": 1000 / fps} if suffix == ".gif" else {"fps": fps, "macro_block_size": 2}
        with self._named_errors():
            self._writer = imageio.v2.get_writer(self._unfinished, **options)

    def append(self, frame: np.ndarray) -> None:
        """Adds a frame `[H, W, 3]` uint8, always of one size; drops the last pixel row or column if H or W is odd."""
        height, width = (size // 2 * 2 for size in frame.shape[:2])  # video codecs require even sizes
        with self._named_errors():
            self._writer.append_data(frame[:height, :width])
        self.num_frames += 1

    def finish(self, path: Path) -> None:
        """Completes the film, and moves it to `path`, where it replaces an existing file."""
        with self._named_errors():
            self._writer.close()
            self._check_whole()
            os.replace(self._unfinished, path)

    def abandon(self) -> None:
        """Deletes the unfinished film."""
        with contextlib.suppress(OSError):  # must not hide the exception that ended the film
            self._writer.close()
        self._unfinished.unlink(missing_ok=True)

    def _check_whole(self) -> None:
        """Raises OSError if frames are missing, because the ffmpeg process could not write them."""
        if self._unfinished.suffix == ".gif":
            return
        import imageio_ffmpeg

        try:
            found, _ = imageio_ffmpeg.count_frames_and_secs(str(self._unfinished))
        except RuntimeError:  # the film's index, which is written last, is missing
            found = 0
        if found < self.num_frames:
            raise OSError(f"its file has {found} of {self.num_frames} frames; is the disk full?")

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self._setting} cannot be written: {first_line(error)}") from error


def side_by_side(films: Sequence[Path], path: Path, setting: str) -> None:
    """Writes a film that shows films side by side at the height of the first; a shorter film holds its last frame.

    Args:
      films: at least two complete films.
      path: path of the film to write, .mp4.
      setting: name of the film in messages.

    Raises:
      RunError: the film cannot be written.
    """
    import imageio_ffmpeg  # imported here, because it is an extra

    reader = imageio_ffmpeg.read_frames(str(films[0]))
    height = next(reader)["size"][1]
    reader.close()
    scaled = "".join(f"[{k}]scale=-2:{height},setsar=1[film{k}];" for k in range(len(films)))
    joined = "".join(f"[film{k}]" for k in range(len(films))) + f"hstack=inputs={len(films)}"
    unfinished = Path(f"{temporary_of(path)}{path.suffix}")
    inputs = [word for film in films for word in ("-i", str(film))]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *inputs, "-filter_complex", scaled + joined]
    ran = subprocess.run([*command, "-pix_fmt", "yuv420p", str(unfinished)], capture_output=True)
    if ran.returncode:
        unfinished.unlink(missing_ok=True)
        raise RunError(f"{setting} cannot be written: {printable(ran.stderr.decode(errors='replace'))}")
    os.replace(unfinished, path)


def as_gif(path: Path) -> bytes:
    """Returns a film as a small GIF with few frames per second, for programs that show only pictures.

    Raises:
      RunError: the film cannot be read.
    """
    import imageio_ffmpeg  # imported here, because it is an extra

    # GIF allows only 256 colours, so the palette is computed from the film's own colours.
    colours = "split[shown][seen];[seen]palettegen[palette];[shown][palette]paletteuse"
    filters = f"fps={GIF_FPS},scale='min({GIF_WIDTH},iw)':-1:flags=lanczos,{colours}"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-t", str(GIF_SECONDS), "-i", str(path)]
    ran = subprocess.run([*command, "-vf", filters, "-f", "gif", "-"], capture_output=True)
    if ran.returncode:
        raise RunError(f"{path} cannot be converted to a GIF: {printable(ran.stderr.decode(errors='replace'))}")
    return ran.stdout
