"""Commands of short runs, and commands in processes of their own."""

import os
import sys
import traceback

from alfish.__main__ import main

TINY = ["MLP.layers=(8,)", "EpochBatches.num_epochs=1", "Trainer.num_env_steps=600", "Evaluate.num_episodes=2"]


def train(root_dir, *parameters, conf="ppo_cartpole.gin", flags=()):
    """Arguments of the command that trains PPO on CartPole, or another configuration."""
    files = [f"--gin_file={one}" for one in ([conf] if isinstance(conf, str) else conf)]
    return ["train", *files, f"--root_dir={root_dir}", *(f"--gin_param={one}" for one in parameters), *flags]


def run_forked(directory, *arguments):
    """Runs a command in a process that has imported everything already; returns its status, stdout and stderr.

    Args:
      directory: of the files to which the process writes.
      arguments: of the command.
    """
    paths = [directory / name for name in ("stdout.txt", "stderr.txt")]
    process = os.fork()
    if not process:
        status = 70
        try:
            for number, path in enumerate(paths, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            sys.argv = ["alfish", *arguments]
            status = main()
            sys.stderr.flush()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return status, *(path.read_text() for path in paths)
