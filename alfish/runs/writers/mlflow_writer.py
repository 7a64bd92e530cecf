"""The writer that sends a run's summaries to MLflow."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin

from alfish.parameters import checked
from alfish.runs.writers.tracker import DIRECTORY, Tracker
from alfish.runs.writers.writer import Image, RunOrigin

MAX_PARAMETERS = 100  # maximum number of parameters of one request
MAX_LENGTH = 500  # characters of a parameter's value that all versions accept


@gin.configurable(module="alfish.writers")
@checked
class MlflowWriter(Tracker):
    """Sends a run's summaries to MLflow, except for histograms, which MLflow lacks; needs the extra 'mlflow'.

    Args:
      experiment: name of the MLflow experiment, which is created if needed.
      tracking_uri: address of a server or a database (`sqlite:////data/mlflow.db`); None means the address in
        MLFLOW_TRACKING_URI, or MLflow's default.
      name: name of the run; None means the name of its directory.
    """

    title, package, extra = "MLflow", "mlflow", "mlflow"
    # Without these limits, requests to an unreachable server are repeated for minutes.
    environment = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }

    def __init__(self, experiment: str = "alfish", tracking_uri: str | None = None, name: str | None = None):
        self._experiment, self._tracking_uri, self._name = experiment, tracking_uri, name

    def connect(self, run: RunOrigin, id: str, is_new: bool, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client, self._directory = MlflowClient(self._tracking_uri), run.directory
        if not is_new:
            self._id = id
            self._client.update_run(id, status="RUNNING")
            return id
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = (
            self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        )
        name = self._name or run.directory.resolve().name
        self._id = self._client.create_run(experiment_id, run_name=name, tags={"alfish.run": id}).info.run_id
        parameters = [Param(_allowed(name), str(value)[:MAX_LENGTH]) for name, value in settings.items()]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MAX_PARAMETERS])
        return self._id

    def send(self, values: dict[str, float], steps: int, wall_seconds: float) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(_allowed(name), value, now, steps) for name, value in values.items()])

    def send_image(self, name: str, image: Image, steps: int) -> None:
        path = self._directory / DIRECTORY / "mlflow" / f"{name.replace('/', '-')}-{steps:012d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.to_png())
        self._client.log_artifact(self._id, str(path), "images")

    def send_film(self, name: str, path: Path, steps: int) -> None:
        self._client.log_artifact(self._id, str(path), "films")

    def send_texts(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"configuration/{name}")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    """Returns a name with `_` instead of characters that MLflow does not allow in names."""
    return "".join(character if character.isalnum() or character in "_-. /" else "_" for character in name)
