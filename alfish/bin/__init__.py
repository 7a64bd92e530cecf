"""The command line: one module per subcommand, with `FLAGS`, a docstring that --help prints, and `main(flags)`."""

import io
import keyword
import os
import sys

from alfish.errors import RunError

SUBCOMMANDS = {
    "train": "train the configuration in a gin file, or continue a run",
    "sweep": "train a configuration with many combinations of settings, and compare them",
    "population": "train a population, and replace the worst members with copies of the best",
    "evaluate": "evaluate a run's policy on whole, seeded episodes",
    "watch": "evaluate the checkpoints of a run while it is trained",
    "verify": "train the beginning of a run again, and compare the bits",
    "crossplay": "play games between policies of runs, and rate them",
    "play": "play episodes of a run's policy, and film them",
    "plot": "draw curves of runs over their seeds",
    "compare": "compare groups of runs at their end, in a table",
    "report": "write one page about a run",
    "record": "record episodes of a run's policy as a data set",
    "export": "write the replay buffer of a run as a data set",
    "import": "read data in another format, check them, and write them as a data set",
    "export-policy": "write a run's policy as ONNX, numpy code or a torch program",
    "pack": "pack a run into one file, with a card for the Hugging Face hub",
    "unpack": "unpack a packed run, to continue it",
    "from-rsl-rl": "write a runner configuration of rsl_rl as a gin file",
    "confs": "list the shipped configurations",
    "params": "list the parameters that a configuration can bind",
    "completion": "print a script that completes commands in bash or zsh",
    "check-env": "report whether alfish can train on an environment",
}


class _Output(io.FileIO):
    """Standard output. A failed write ends the command with an error, unless the reader has closed the pipe."""

    has_failed = False  # True once a failure was reported; later output is then discarded

    def write(self, content):  # type: ignore[override, no-untyped-def]
        if self.has_failed:
            return len(content)
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.has_failed = True
            raise RunError(f"cannot write to standard output: {error.strerror}") from error


class _Messages(io.FileIO):
    """Standard error. If a write fails, the run continues, and only log.txt has the lines."""

    def write(self, content):  # type: ignore[override, no-untyped-def]
        try:
            return super().write(content)
        except OSError:
            return len(content)


class _Text(io.TextIOWrapper):
    """A standard stream that other code cannot close; an environment may call `sys.stdout.close()`."""

    def close(self) -> None:
        self.flush()


def module_of(name: str) -> str:
    """Returns the module name of a subcommand; names that are Python keywords end with an underscore."""
    return f"alfish.bin.{name.replace('-', '_')}" + "_" * keyword.iskeyword(name)


def prepare_process() -> None:
    """Replaces the standard streams with streams that work even if the originals are closed, full or without a reader.

    Raises:
      RunError: the working directory has been deleted.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        # The stream is closed. The next file that is opened would get this descriptor, and would receive the messages.
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    encoding = getattr(sys.stdout, "encoding", None)
    sys.stdout, sys.stderr = (
        _Text(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)
        for raw in (_Output(1, "w", closefd=False), _Messages(2, "w", closefd=False))
    )
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RunError("the working directory has been deleted; change to another one") from error


def show(text: str) -> None:
    """Prints a text. A reader that closes the pipe early (`| head`) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        end_output()


def end_output() -> None:
    """Discards output that could not be written, because Python would report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
