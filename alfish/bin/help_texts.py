"""Help texts and checks of flags that several commands share."""

from alfish.errors import UsageError

CHECKPOINT = "latest, best, or a number of environment steps (of updates, for a run on recorded data)."
ALLOW_IMPORT = "Module or package, as my_lab, that the run's configuration may import besides alfish's own; repeatable."
MAX_LENGTH = "Number of steps after which an episode is cut; default: Trainer.max_evaluation_length."

LARGEST_SEED = 2**63 - 2**32 - 1  # of episode 0: the seeds of later episodes must fit 63 bits, too


def checkpoint(name: str) -> str | int:
    """Returns 'latest', 'best', or a number of steps.

    Raises:
      UsageError: it is none of these.
    """
    if name in ("latest", "best"):
        return name
    if name.replace("_", "").isdigit():
        return int(name)
    raise UsageError(f"--checkpoint is {name!r}; it is latest, best, or a number of steps")
