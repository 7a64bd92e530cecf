"""Compares groups of runs by their final scores.

  alfish compare runs/ppo-* runs/a2c-* --threshold=475
  alfish compare 'before=runs/a-*' 'after=runs/b-*' --last=5 --format=markdown
  alfish compare runs --score_range=CartPole-v1:0,500 --score_range=Acrobot-v1:-500,-60 --format=csv > table.csv

Runs are given and grouped as in `alfish plot`. The score of a run is the mean of the last --last values of --metric.
The table has, for each group: the interquartile mean (IQM), the mean and the median of the scores with 95 % intervals
of a stratified bootstrap, the number of runs, and the steps per second of training. With --threshold it also has the
steps and seconds until a run first reaches the threshold (median over the runs), the number of runs that reach it, and
the optimality gap: the mean amount by which scores are below the threshold. For two groups, the output also has the
probability that a run of the first group is better than a run of the second.

--score_range=LOW,HIGH normalizes scores: LOW becomes 0 and HIGH becomes 1. The optimality gap is then the mean amount
by which scores are below 1. With a range for each environment, the table ends with rows over all environments. As in
rliable (Agarwal et al., 2021), the median is taken over environments, of the mean score of each environment's runs, so
it equals the mean if there is one environment.
"""

import sys

from absl import flags

from alfish.analysis.series import DEFAULT_METRIC
from alfish.bin import show

FLAGS = flags.FlagValues()
TAKES_WORDS = True
flags.DEFINE_string("metric", DEFAULT_METRIC, "Name of the metric that is compared.", flag_values=FLAGS)
flags.DEFINE_integer("last", 1, "Number of last values of a run; their mean is its score.", 1, flag_values=FLAGS)
flags.DEFINE_multi_string(
    "threshold", [], "Score to reach, such as 475 or CartPole-v1:475; one for each environment.", flag_values=FLAGS
)
flags.DEFINE_multi_string(
    "score_range",
    [],
    "Scores that are mapped to 0 and 1, such as 0,500 or CartPole-v1:0,500; repeatable.",
    flag_values=FLAGS,
)
flags.DEFINE_enum("format", "text", ["text", "csv", "markdown"], "Format of the table.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues, *words: str) -> int:
    from alfish.analysis import tables
    from alfish.analysis.comparison import compare
    from alfish.analysis.sources import find

    notes: list[str] = []
    options = flag_values.last, flag_values.threshold, flag_values.score_range
    comparison = compare(find(words, notes.append), flag_values.metric, notes.append, *options)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if flag_values.format == "csv":
        show(tables.as_csv(tables.for_programs(comparison)).rstrip("\n"))
        return 0
    form = tables.as_text if flag_values.format == "text" else tables.as_markdown
    sentences = tables.sentences(comparison)
    show("\n\n".join([form(tables.for_people(comparison)), "\n".join(f"{one}." for one in sentences)]))
    return 0
