"""Films of episodes: cameras, captions, and recorders that an evaluator tells what happens."""

from alfish.films.camera import Camera
from alfish.films.recorder import FILMS, Recorder, Row
from alfish.films.schedule import FilmSchedule

__all__ = ["FILMS", "Camera", "FilmSchedule", "Recorder", "Row"]
