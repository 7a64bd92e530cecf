"""The HTML page of a run: task, end of the run, curves, evaluations, configuration and origin."""

import base64
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from alfish.analysis import figures, page
from alfish.analysis.curves import axis_of
from alfish.analysis.grouping import ALGORITHM
from alfish.analysis.run_source import RunSeriesSource, read_evaluations
from alfish.analysis.series import AXIS_WORDS
from alfish.configuration import locating, reading
from alfish.errors import UsageError, counted, printable, significant
from alfish.parameters import differences
from alfish.parameters.description import CONFIG_FILE
from alfish.runs import contents
from alfish.runs.run_log import warnings_in
from alfish.training.evaluations.evaluation import ENV_INFO, bootstrap_interval, mean, ranked

NUM_PANELS = 15  # largest number of plotted training metrics
NUM_COLUMNS = 3
MAX_FILMS = 32 * 2**20  # total bytes of the films inside the page
COUNTS = ("/n", "/environment_steps", "/episodes")  # ends of names of metrics that only count, which are not plotted
FILMS = {".mp4": "video/mp4", ".gif": "image/gif"}

Evaluations = Mapping[int, Sequence[float]]


def report(directory: Path) -> str:
    """Returns the page of a run; the page needs no other file.

    Raises:
      UsageError: the directory is not a run, or its metrics.csv is damaged.
    """
    run = RunSeriesSource(directory)
    metrics = run.metrics
    returns, lengths = (read_evaluations(directory, run.evaluation, column) for column in ("return", "length"))
    entries = provenance_of(directory)
    log = contents.last_text(directory, "log.txt")
    summary = [
        *_identity(run),
        ("end", _end(directory)),
        *_results(returns),
        *_infos(run, metrics),
        *_speed(run, metrics),
    ]
    sections = {
        "": page.facts(summary),
        "Command": _command(entries),
        "Evaluations": _evaluation_curve(run, returns) + _evaluation_table(returns, lengths),
        "Training": _training_curves(run, metrics),
        "Films": "".join(_films(directory)),
        "Warnings": "".join(f"<p>{escape(words)}</p>" for words in [*warnings_in(log), *run.notes]) or "<p>none</p>",
        "Configuration": _configuration(directory, entries),
        "Origin": _origin(entries),
        "Log": _hidden("log.txt", log),
    }
    parts = [f"<h2>{title}</h2>\n{body}" if title else body for title, body in sections.items() if body]
    return page.page(f"{directory.resolve().name}", parts)


def _identity(run: RunSeriesSource) -> Iterator[tuple[str, str]]:
    yield "algorithm", differences.name_of(run.bindings.get(ALGORITHM, "unknown"))
    yield "environment", run.environment or "unknown"
    yield "seed", run.seed or "unknown"


def _end(directory: Path) -> str:
    """Returns a sentence about the end of the run, from its file `done`."""
    counters = ("env_steps", "iterations", "updates")
    done = contents.record(directory, "done", {**dict.fromkeys(counters, int), "reason": str}, ["reason"])
    if done is None:
        return "not finished"
    counts = [f"{done[name]:,} {name.replace('_', ' ')}" for name in counters]
    return f"{done.get('reason', 'the budget is spent')}: {', '.join(counts)}"


def _results(returns: Evaluations) -> Iterator[tuple[str, str]]:
    if not returns:
        yield "evaluations", "none yet"
        return
    last, best = max(returns), max(returns, key=lambda clock: (ranked(mean(returns[clock])), clock))
    yield "last evaluation", f"{_mean(returns[last])} over {counted(len(returns[last]), 'episode')} at {last:,} steps"
    yield "best evaluation", f"{_mean(returns[best])} at {best:,} steps"


def _infos(run: RunSeriesSource, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields a line for each number that evaluations read from infos, such as success rates."""
    head = f"{run.evaluation}/{ENV_INFO}"
    for metric in metrics:
        if metric.startswith(head):
            values = run.series(metric).values
            last, largest = significant(values[-1]), significant(values.max())
            yield metric.removeprefix(head), f"{last} in the last evaluation that reports it; the largest is {largest}"


def _speed(run: RunSeriesSource, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    if metrics:
        series = run.series(metrics[0])
        axis = axis_of([series], [run.name])
        if "wall_seconds" in series.clocks and (seconds := series.clocks["wall_seconds"][-1]):
            yield "training", f"{seconds:,.0f} s, {series.clocks[axis][-1] / seconds:,.0f} {AXIS_WORDS[axis]}/s"


def command_of(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the command that started a run, with one flag on each line; '' if it is unknown.

    Args:
      entries: entries that `provenance_of` returned.
    """
    command = list(map(str, entries[0]["command"])) if entries else []
    if not command:
        return ""
    program = Path(command[0]).name
    shown = ["alfish"] if program in ("alfish", "__main__.py") else ["python", command[0]]
    flags = itertools.dropwhile(lambda word: not word.startswith("-"), command[1:])
    first = shlex.join([*shown, *itertools.takewhile(lambda word: not word.startswith("-"), command[1:])])
    return " \\\n    ".join([first, *map(shlex.quote, flags)])


def _command(entries: Sequence[Mapping[str, Any]]) -> str:
    command = command_of(entries)
    return f"<pre>{escape(command)}</pre>" if command else ""


def _evaluation_curve(run: RunSeriesSource, returns: Evaluations) -> str:
    if not returns:
        return ""
    figure = figures.new_figure(8, 3.6)
    axes = figure.subplots()
    clocks = list(returns)
    intervals = figures.drawable([bootstrap_interval(returns[clock]) for clock in clocks]).T
    marker = "o" if len(clocks) == 1 else None
    means = figures.drawable([mean(returns[clock]) for clock in clocks])
    axes.plot(clocks, means, color=figures.COLORS[0], marker=marker)
    axes.fill_between(clocks, *intervals, color=figures.COLORS[0], alpha=0.2, linewidth=0)
    axes.set_xlabel(run.clock_words)
    axes.set_ylabel("return of the episodes")
    axes.xaxis.set_major_formatter(figures.engineering())
    figures.tidy(axes)
    caption = "<p>Mean return, and its 95 % bootstrap interval over the episodes of each evaluation.</p>"
    return page.picture(figure, "Returns of the evaluations") + caption


def _evaluation_table(returns: Evaluations, lengths: Evaluations) -> str:
    if not returns:
        return "<p>none yet</p>"
    header = ["steps", "mean", "95 % interval", "min", "max", "returns and lengths of the episodes"]
    rows = []
    for clock, values in returns.items():
        low, high = map(significant, bootstrap_interval(values))
        ends = [significant(float(end)) for end in (mean(values), min(values), max(values))]
        episodes = ", ".join(f"{significant(value)} ({length:.0f})" for value, length in zip(values, lengths[clock]))
        rows.append([f"{clock:,}", ends[0], f"[{low}, {high}]", *ends[1:], episodes])
    return f"<details><summary>All episodes</summary>\n{page.table(header, rows)}\n</details>"


def _training_curves(run: RunSeriesSource, metrics: Sequence[str]) -> str:
    """Returns small plots of training metrics; metrics that never change are left out."""
    series = {name: run.series(name) for name in metrics if name.startswith(("train/", "metrics/", "time/"))}
    changing = [name for name, one in series.items() if len(set(one.values)) > 1]
    shown = [name for name in changing if not name.endswith(COUNTS)][:NUM_PANELS]
    if not shown:
        return ""
    num_rows = -(-len(shown) // NUM_COLUMNS)
    figure = figures.new_figure(4 * NUM_COLUMNS, 2.2 * num_rows)
    grid = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flat
    axis = axis_of(list(series.values()), list(series))
    for name, axes in zip(shown, grid):
        values = figures.drawable(series[name].values)
        axes.plot(series[name].clocks[axis], values, color=figures.COLORS[0], linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.xaxis.set_major_formatter(figures.engineering())
        axes.tick_params(labelsize=8)
        figures.tidy(axes)
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_visible(False)
    return page.picture(figure, "Metrics of training") + f"<p>Against {AXIS_WORDS[axis]}.</p>"


def _films(directory: Path) -> Iterator[str]:
    """Yields the films of a run, the newest first, until their total size reaches `MAX_FILMS`."""
    found = [path for path in directory.rglob("[!.]*") if path.suffix in FILMS and path.is_file()]
    left, left_out = MAX_FILMS, []
    for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name), reverse=True):
        name = str(path.relative_to(directory))
        shown = printable(name)  # a file name may have bytes that are not UTF-8
        try:
            content = contents.content(directory, name, left) or b""
        except UsageError as error:  # the film is too large, or lies outside the run
            left_out.append(printable(str(error)) if path.is_symlink() else shown)
            continue
        left -= len(content)
        source = f"data:{FILMS[path.suffix]};base64,{base64.b64encode(content).decode()}"
        tag = f'<video controls src="{source}"></video>' if path.suffix == ".mp4" else f'<img alt="" src="{source}">'
        yield f"<figure>{tag}<figcaption>{escape(shown)}</figcaption></figure>"
    if left_out:
        limit = f"{MAX_FILMS / 2**20:.0f} MiB"
        yield f"<p>Left out, because this page holds at most {limit} of films: {escape(', '.join(left_out))}</p>"


def _configuration(directory: Path, entries: Sequence[Mapping[str, Any]]) -> str:
    given = contents.text(directory, CONFIG_FILE)
    shipped = _shipped(entries[0]["command"]) if entries else []
    parts = []
    if shipped and given:
        with reading.preserved(brief=True):
            reading.read(shipped, [])
            changes = differences.difference(reading.text(), given, with_budget=True)
        words = f"Compared with {' and '.join(shipped)} (- shipped, + this run):"
        parts.append(f"<p>{words}</p><pre>{escape(changes) or 'no difference'}</pre>")
    operative = "".join(f"{name} = {value}\n" for name, value in RunSeriesSource(directory).bindings.items())
    return "".join([*parts, _hidden("As it was given", given or ""), _hidden("With all defaults", operative)])


def _shipped(command: Sequence[str]) -> list[str]:
    """Returns the gin files of a command if all of them are shipped confs; else an empty list."""
    files = [Path(word.partition("=")[2]).name for word in map(str, command) if word.startswith("--gin_file=")]
    return files if all((locating.confs_directory() / name).is_file() for name in files) else []


def _origin(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the software versions, machine and git revision of each start of the run."""
    shown = ("steps", "time", "versions", "git", "device", "machine", "num_threads")
    rows = [(name, _plain(entry[name])) for entry in entries for name in shown if entry.get(name) is not None]
    return page.facts(rows) if rows else ""


def provenance_of(directory: Path) -> list[Mapping[str, Any]]:
    """Returns one entry for each start of the run, with its command; empty if the run has no provenance file.

    Raises:
      UsageError: the file is damaged.
    """
    path, entries = directory / "provenance.json", contents.json_value(directory, "provenance.json") or []
    entries = [entries] if isinstance(entries, dict) else entries  # older versions wrote a single entry
    if not isinstance(entries, list):
        raise UsageError(f"{path} does not hold the run's history; move it away")
    checked = [contents.checked_entries(path, entry, {"command": list}, ["command"]) for entry in entries]
    return [{"command": [], **entry} for entry in checked]


def _plain(value: Any) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)


def _mean(values: Sequence[float]) -> str:
    low, high = map(significant, bootstrap_interval(values))
    return f"{significant(mean(values))} [{low}, {high}]"


def _hidden(title: str, text: str) -> str:
    """Returns HTML with a title that shows a text when clicked."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text else ""
