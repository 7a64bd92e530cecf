"""The command line: one module a subcommand, each with `FLAGS`, a docstring that --help prints, and `main(flags)`."""

import os
import sys


def show(text: str) -> None:
    """Prints; where the reader has seen enough and is gone (`| head`), that is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains of it at its end
