"""The directory of a run: checks its name, creates it, and compares its saved configuration with a new one."""

import os
from pathlib import Path

from absl import logging

from alfish.configuration import locating, moved_settings, reading
from alfish.errors import UsageError, argument, is_command
from alfish.parameters import description, differences
from alfish.parameters.kinds import shown


def run_directory(name: str | Path) -> Path:
    """Returns the path of a run's directory, with `~` replaced by the home directory.

    Raises:
      UsageError: the name cannot be the name of a directory.
    """
    if not str(name).strip():
        raise UsageError(f"{argument('root_dir')} is empty; give a directory for the run")
    path = Path(os.path.expanduser(name))
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError means that the name contains a NUL character
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{argument('root_dir', shown(str(name)))} is not a directory: {reason}; choose another directory"
        ) from error
    return path


def make_directory(root_dir: Path) -> None:
    """Creates the directory of a run. Call it before building the parts, to find errors early.

    Raises:
      UsageError: the directory cannot be created or written to.
    """
    try:
        root_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if root_dir.is_file() else error.strerror
        raise UsageError(
            f"{argument('root_dir', root_dir)} cannot be created: {reason}; choose another directory"
        ) from error
    if not os.access(root_dir, os.W_OK | os.X_OK):
        raise UsageError(f"{argument('root_dir', root_dir)} is not writable; choose another directory")


def is_to_change(saved: Path, choice: str) -> bool:
    """Returns True if the current configuration should replace the existing run's configuration.

    Raises:
      UsageError: the saved configuration differs from the current one, and `choice` is 'stop'; or the saved
        configuration is not text.
    """
    from alfish.runs.checkpoints import Checkpoints

    if choice == "stop" and not Checkpoints(saved.parent / "checkpoints").steps():
        return True  # a run without checkpoints may change its configuration
    before = locating.text_of(saved)
    # The saved text may have full names, which gin would shorten, or settings that have moved since.
    if before.startswith(description.HEADER) or moved_settings.has_moved(before):
        with reading.preserved(brief=True), reading.saved(saved):
            before = reading.text()
    changes = differences.difference(before, reading.text())
    if not changes or choice == "new":
        return True
    if choice == "old":
        logging.warning(
            "The run continues with its saved configuration and budget, without these changes (- saved, + given):\n%s",
            differences.difference(before, reading.text(), with_budget=True),
        )
        return False
    raise UsageError(
        f"{saved.parent} is a run with another configuration (- then, + now):\n{changes}\nchoose another "
        f"{argument('root_dir')}, or continue with {argument('on_config_change', 'old')} or "
        + ("=new" if is_command() else "'new'")
    )
