"""The writer that sends a run's summaries to Weights & Biases."""

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import gin
from absl import logging

from alfish.errors import UsageError, first_line
from alfish.parameters import checked
from alfish.runs.writers.tracker import DIRECTORY, Tracker
from alfish.runs.writers.writer import Histogram, Image, RunOrigin

INIT_SECONDS = 30.0  # seconds to wait for the server at the start
FINISH_SECONDS = 60.0  # seconds to wait at the end; unsent values stay in the run's directory


@gin.configurable(module="alfish.writers")
@checked
class WandbWriter(Tracker):
    """Sends a run's summaries to Weights & Biases; needs the extra 'wandb'.

    If the server cannot be reached at the start, the process writes to files in `trackers/wandb`, as in offline mode;
    `wandb sync` sends them later.

    Args:
      project: name of the Weights & Biases project.
      entity: user or team; None means the user's default entity.
      name: name of the run; None means the name of its directory.
      group: name of a group of runs, such as the seeds of one setting.
      tags: tags of the run.
      mode: mode of wandb; 'offline' writes files only.
    """

    title, package, extra = "Weights & Biases", "wandb", "wandb"
    environment = {"WANDB_ERROR_REPORTING": "false"}

    def __init__(
        self,
        project: str = "alfish",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] = "online",
    ):
        self._mode, self._name = mode, name
        self._options = {"project": project, "entity": entity, "group": group, "tags": list(tags)}

    def check(self) -> None:
        if self._mode == "online" and not _has_key():  # without a key, wandb.init would ask for one
            raise UsageError(
                "WandbWriter has no API key; run `wandb login`, set WANDB_API_KEY, or set WandbWriter.mode = 'offline'"
            )

    def connect(self, run: RunOrigin, id: str, is_new: bool, settings: Mapping[str, Any]) -> str:
        import wandb

        directory = run.directory / DIRECTORY / "wandb"
        directory.mkdir(parents=True, exist_ok=True)
        # With these settings, wandb neither captures output nor reads code, and keeps the runs of one process apart.
        own = wandb.Settings(
            console="off", disable_git=True, save_code=False, disable_code=True, silent=True,
            init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS,
        )  # fmt: skip
        arguments = {
            **self._options, "id": id, "name": self._name or run.directory.resolve().name, "dir": str(directory),
            "config": dict(settings), "resume": "allow", "reinit": "create_new", "settings": own,
        }  # fmt: skip
        try:
            self._remote = wandb.init(**arguments, mode=self._mode)
        except wandb.errors.CommError as error:
            wandb.teardown()  # discards the run that failed to begin, which has the same id
            self._remote = wandb.init(**arguments, mode="offline")
            logging.warning(
                "Weights & Biases cannot be reached, so this process writes to files; `wandb sync %s` uploads "
                "them (%s)",
                Path(self._remote.dir).parent,
                first_line(error),
            )
        self._remote.define_metric("counters/steps")
        self._remote.define_metric("*", step_metric="counters/steps")
        if not self._remote.offline:
            run.log(f"Weights & Biases: {self._remote.url}")
        return self._remote.id

    def send(self, values: dict[str, float], steps: int, wall_seconds: float) -> None:
        self._remote.log(values)

    def send_histogram(self, name: str, histogram: Histogram, steps: int) -> None:
        import wandb

        self._show(name, wandb.Histogram(np_histogram=(histogram.counts, histogram.edges)), steps)

    def send_image(self, name: str, image: Image, steps: int) -> None:
        import wandb

        self._show(name, wandb.Image(image.pixels), steps)

    def send_film(self, name: str, path: Path, steps: int) -> None:
        import wandb

        self._show(name, wandb.Video(str(path), format="mp4"), steps)

    def finish(self) -> None:
        self._remote.finish()

    def _show(self, name: str, value: Any, steps: int) -> None:
        self._remote.log({name: value, "counters/steps": steps})


def _has_key() -> bool:
    """Returns whether an API key for the server is stored, without asking the server or the user."""
    import wandb

    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file or os.environ.get("WANDB_API_KEY"):
        return True
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in (Path(file).expanduser() for file in files):
        try:
            if path.is_file() and netrc.netrc(str(path)).authenticators(urlsplit(settings.base_url).hostname or ""):
                return True
        except (netrc.NetrcParseError, OSError) as error:
            raise UsageError(f"WandbWriter cannot read its API key in {path}: {first_line(error)}") from error
    return False
