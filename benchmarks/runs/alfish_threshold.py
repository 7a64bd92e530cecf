"""Race of alfish: the shipped conf, trained as `alfish train` does, with the race's evaluation in place of its own."""

import signal
import tempfile

import torch

import alfish
from alfish.configuration import reading
from alfish.configuration.runs import configured_trainer
from alfish.training.listener import Listener, Report, Run
from alfish.training.listeners import Evaluate
from benchmarks.runs import threshold
from benchmarks.runs.threshold import EVALUATION_SEED, TASKS, Race


class Threshold(Listener):
    """Ends training when the race is over; the last listener, so that the time of checkpoints and summaries counts."""

    def __init__(self, race: Race):
        self._race = race

    def start(self, run: Run) -> None:
        with self._race.stopped_clock():
            num_episodes = self._race.task.num_episodes
            self._evaluator = run.evaluator(num_episodes, num_envs=num_episodes)

    def after_iteration(self, run: Run, report: Report) -> None:
        if self._race.is_over(report.env_steps, report.updates, run.clock.finished, self._mean) and not report.finished:
            signal.raise_signal(signal.SIGTERM)  # the trainer stops after one more iteration

    def close(self) -> None:
        self._evaluator.close()

    def _mean(self) -> float:
        return self._evaluator.evaluate(self._race.task.num_episodes, seed=EVALUATION_SEED).mean


def main() -> None:
    arguments = threshold.parse()
    race = Race(TASKS[arguments.task], arguments.started, arguments.max_env_steps)
    files = [f"{arguments.task}.gin"]
    found = reading.read(files, [f"Trainer.seed = {arguments.seed}", "Trainer.num_threads = 1", *arguments.gin_param])
    with tempfile.TemporaryDirectory() as root_dir:
        trainer = configured_trainer(root_dir, found)
        kept = [listener for listener in trainer.listeners if not isinstance(listener, Evaluate)]
        trainer.listeners[:] = [*kept, Threshold(race)]  # the list that the trainer calls
        trainer.train()
    race.print_result(f"alfish {alfish.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
