"""Help texts, and readings of flags, that several commands share."""

from alfish.errors import UsageError

CHECKPOINT = "latest, best, or steps: environment steps, or updates where recorded data were trained on."
ALLOW_IMPORT = "Module or package that the run's configuration may import beside alfish's own, as my_lab; repeatable."
MAX_LENGTH = "Steps at which an episode is cut; default: Trainer.max_evaluation_length."

LARGEST_SEED = 2**63 - 2**32 - 1  # each episode adds one, and torch takes 63 bits


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
