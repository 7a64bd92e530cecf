"""Writes an HTML page about a run; it opens in a browser without a network.

  alfish report --root_dir=runs/ppo --output=report.html

The page has the task and algorithm, how the run ended, the command that repeats it, the curve and all episodes of the
evaluations, metrics of training, films in the directory of the run, warnings, the configuration and its difference from
the shipped configuration, versions and machine. Nothing in the run is executed or changed.
"""

from pathlib import Path

from absl import flags

from alfish.bin import shared_flags, show
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run.", flag_values=FLAGS)
flags.DEFINE_string("output", "report.html", "File to write.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    from alfish.analysis.run_source import is_run

    shared_flags.check_root_dir(flag_values.root_dir)
    directory, output = Path(flag_values.root_dir), shared_flags.output_file(flag_values.output, ".html", ".htm")
    if not is_run(directory):
        raise UsageError(f"{directory} is not a run: it has neither config.gin nor metrics.csv in it")
    from alfish.analysis.report import report
    from alfish.runs.files import write_atomically

    write_atomically(output, report(directory))
    show(f"written: {output}")
    return 0
