"""The choice of the evaluations that a training films."""

from pathlib import Path

from alfish.environments import Environment, rendering
from alfish.films.camera import Camera
from alfish.films.recorder import Recorder
from alfish.runs.film_file import check_extra

SETTING = "Evaluate.video_period"


class FilmSchedule:
    """Films of a run's evaluations: one in each period, and the last one of a run that spends its budget.

    Args:
      period: clock steps between evaluations that are filmed, positive.
      num_episodes: episodes of a film, side by side.
      captions: whether films show return, reward, value and action.

    Attributes:
      next: clock steps from which on an evaluation is filmed; part of a run's state.
      num_episodes, captions: the arguments.

    Raises:
      UsageError: the extra 'video' is missing.
    """

    def __init__(self, period: int, num_episodes: int, captions: bool):
        check_extra(SETTING)
        rendering.prepare()
        self._period, self.num_episodes, self.captions, self.next = period, num_episodes, captions, period
        self._camera: Camera | None = None

    def start(self, environment: Environment) -> None:
        """Takes the environments of the evaluation; raises UsageError if they cannot be filmed."""
        self._camera = Camera(environment, SETTING)

    def recorder(self, clock: int, is_last: bool, root_dir: Path, stem: str) -> Recorder | None:
        """Returns the recorder of an evaluation at this clock, see `Recorder.into_run`; None: it is not filmed."""
        assert self._camera is not None
        if clock < self.next and not is_last:
            return None
        return Recorder.into_run(self._camera, root_dir, stem, self.num_episodes, SETTING, self.captions)

    def move_on(self, clock: int) -> None:
        """Plans the next film, after one at this clock."""
        self.next = (clock // self._period + 1) * self._period
