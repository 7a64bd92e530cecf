"""Draws curves of runs over their seeds.

  alfish plot runs/ppo-* runs/sac-* --output=curves.png
  alfish plot 'PPO=runs/ppo-*' 'stable-baselines3=logs/*' --threshold=475 --x=wall_seconds --output=curves.html
  alfish plot sweeps/rate --metric=train/entropy --statistic=median --output=entropy.svg

An argument is a directory of `alfish train`, a directory with such directories, a directory with the monitor files of
stable-baselines3, or another CSV file with a column of steps and a column of values. LABEL=PATH gives it a label.

Runs with equal configurations form a group. The legend shows the bindings in which groups differ. Each group has a line
for the --statistic of its runs, and a pointwise 95 % band from a bootstrap over runs. Each environment has a panel.

--metric is a column of metrics.csv, or NAME/COLUMN for the mean over episodes of a column of the files eval/NAME-*.csv.
A curve ends where the shortest run of its group ends.
"""

import sys

from absl import flags

from alfish.analysis.series import AXES, DEFAULT_METRIC
from alfish.bin import shared_flags, show

FLAGS = flags.FlagValues()
TAKES_WORDS = True
flags.DEFINE_string("output", None, "File to write: .png, .svg or .html.", flag_values=FLAGS)
flags.DEFINE_string("metric", DEFAULT_METRIC, "Name of the metric that is drawn.", flag_values=FLAGS)
flags.DEFINE_enum("x", None, AXES, "Axis; default: env_steps, or updates for offline runs.", flag_values=FLAGS)
flags.DEFINE_enum("statistic", "iqm", ["iqm", "mean", "median"], "Aggregate over the runs.", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "threshold", [], "Value for a horizontal line, such as 475 or CartPole-v1:475; repeatable.", flag_values=FLAGS
)


def main(flag_values: flags.FlagValues, *words: str) -> int:
    from alfish.analysis import figures, page, plotting
    from alfish.analysis.sources import find
    from alfish.runs.files import write_atomically

    output = shared_flags.output_file(flag_values.output, ".png", ".svg", ".html")
    notes: list[str] = []
    options = flag_values.metric, flag_values.x, flag_values.statistic
    curves, axis = plotting.curves_of(find(words, notes.append), *options, notes.append)
    figure = plotting.draw(curves, axis, flag_values.metric, flag_values.threshold)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if output.suffix == ".html":
        write_atomically(output, page.of_curves(curves, figure, flag_values.metric, flag_values.statistic, notes))
    else:
        write_atomically(output, figures.encoded(figure, output.suffix))
    show(f"written: {output}")
    return 0
