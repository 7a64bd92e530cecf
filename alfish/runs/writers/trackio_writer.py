"""The writer that sends a run's summaries to trackio."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin

from alfish.parameters import checked
from alfish.runs.writers.tracker import Tracker
from alfish.runs.writers.writer import Histogram, Image, RunOrigin


@gin.configurable(module="alfish.writers")
@checked
class TrackioWriter(Tracker):
    """Sends a run's summaries to trackio, which keeps them on this machine or in a Hugging Face Space.

    The writer needs the extra 'trackio'. `trackio show` opens the page. If a Space cannot be reached, trackio itself
    warns, and keeps the values on this machine.

    Args:
      project: name of the trackio project.
      name: name of the run; None means the name of its directory, followed by the beginning of the run's id.
      group: name of a group of runs, such as the seeds of one setting.
      space_id: name of a Hugging Face Space (`user/space`); None means this machine.
    """

    title, package, extra = "trackio", "trackio", "trackio"
    environment = {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"}

    def __init__(
        self, project: str = "alfish", name: str | None = None, group: str | None = None, space_id: str | None = None
    ):
        self._options = {"project": project, "group": group, "space_id": space_id}
        self._name = name

    def connect(self, run: RunOrigin, id: str, is_new: bool, settings: Mapping[str, Any]) -> str:
        import trackio

        # Trackio finds a run by its name.
        name = (self._name or f"{run.directory.resolve().name}-{id[:8]}") if is_new else id
        config = {key: value if isinstance(value, (int, float)) else str(value) for key, value in settings.items()}
        self._remote = trackio.init(**self._options, name=name, config=config, resume="allow", embed=False)
        return self._remote.name

    def send(self, values: dict[str, float], steps: int, wall_seconds: float) -> None:
        self._remote.log(values, step=steps)

    def send_histogram(self, name: str, histogram: Histogram, steps: int) -> None:
        import trackio

        shown = trackio.Histogram(np_histogram=(histogram.counts.tolist(), histogram.edges.tolist()))
        self._remote.log({name: shown}, step=steps)

    def send_image(self, name: str, image: Image, steps: int) -> None:
        import trackio

        self._remote.log({name: trackio.Image(image.pixels)}, step=steps)

    def send_film(self, name: str, path: Path, steps: int) -> None:
        import trackio

        self._remote.log({name: trackio.Video(str(path), format="mp4")}, step=steps)

    def finish(self) -> None:
        self._remote.finish()
