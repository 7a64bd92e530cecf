"""The command line: one module a subcommand, each with `FLAGS`, a docstring that --help prints, and `main(flags)`."""

import io
import os
import sys

from alfish.errors import RunError


class _Output(io.FileIO):
    """Standard output, whose failure is the failure of the command, but for a reader who is gone."""

    has_failed = False  # and was reported: what is left in the buffer is written to nowhere

    def write(self, content):  # type: ignore[override, no-untyped-def]
        if self.has_failed:
            return len(content)
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.has_failed = True
            raise RunError(f"standard output cannot be written to: {error.strerror}") from error


class _Messages(io.FileIO):
    """Standard error. Where it cannot be written to, nobody can be told; the run goes on, and log.txt has its lines."""

    def write(self, content):  # type: ignore[override, no-untyped-def]
        try:
            return super().write(content)
        except OSError:
            return len(content)


def prepare_process() -> None:
    """Makes standard streams that work for a command, also where they are closed, full, or nobody reads them.

    Raises:
      RunError: the working directory has been deleted.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed, and the next file to be opened would take its place and be written messages into
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    encoding = getattr(sys.stdout, "encoding", None)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)
        for raw in (_Output(1, "w", closefd=False), _Messages(2, "w", closefd=False))
    )
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RunError("the working directory has been deleted; change to another one") from error


def show(text: str) -> None:
    """Prints; where the reader has seen enough and is gone (`| head`), that is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        end_output()


def end_output() -> None:
    """Lets go of what standard output did not take: else Python complains of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
