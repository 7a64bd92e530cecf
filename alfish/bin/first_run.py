"""Suggests a first run in a new environment: algorithms, base configuration, command and duration."""

import contextlib
import io
import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gymnasium import spaces

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.configuration import reading
from alfish.configuration.opening import process_preserved
from alfish.configuration.runs import configured_run
from alfish.environments import Environment
from alfish.environments.games import Group
from alfish.errors import RunError, UsageError, counted, first_line, significant
from alfish.networks.images import is_image
from alfish.parameters.differences import literal

MEASURED_SECONDS = 2.0
IMAGE_BUDGET = 1_000_000  # environment steps of a first run on images


class BaseConf(NamedTuple):
    """A shipped base configuration.

    Attributes:
      algorithm: name of the algorithm's class.
      file: name of the configuration file.
      budget: number of environment steps in which the return of a first run on vector observations usually rises.
      for_speed: bindings that give a short run the speed of a long run.
      virtue: reason to choose the algorithm, as a clause.
    """

    algorithm: str
    file: str
    budget: int
    for_speed: tuple[str, ...]
    virtue: str


QUICK = "Trainer.unroll_length = 64", "Trainer.calibration = 0.0"
# Updates are not compiled, because a compiler at work would slow down the trial; a long run is faster.
PLAIN = "Learner.compile = False"
REPLAY = (
    "ReplayBatches.warmup_env_steps = 64",
    "ReplayBatches.capacity = 10_000",
    "Trainer.calibration = 0.0",
    PLAIN,
)
BASES = {
    base.algorithm: base
    for base in (
        BaseConf("PPO", "ppo.gin", 100_000, QUICK, "it takes the least time"),
        BaseConf("SAC", "sac.gin", 20_000, REPLAY, "it needs the fewest steps where actions are continuous"),
        BaseConf("TD3", "td3.gin", 20_000, REPLAY, "it needs few steps"),
        BaseConf("DQN", "dqn.gin", 50_000, REPLAY, "it learns from each step many times"),
    )
}
# For environments in tensors. The graphs that the measurement compiles are in the cache when the run begins.
IN_TENSORS = BaseConf(
    "PPO",
    "ppo_tensor.gin",
    500_000,
    ("Trainer.calibration = 0.0", "Learner.compile = True"),
    "it compiles steps, policy and updates",
)
SLOW = 500.0  # environment steps per second; below this speed, a step takes longer than an update
VERY_SLOW = 100.0  # steps per second below which a trial run takes too long


class Task(NamedTuple):
    """The environment as the user described it.

    Attributes:
      files: gin files of the task.
      bindings: gin bindings of the task.
    """

    files: Sequence[str]
    bindings: Sequence[str]

    def binds(self, parameter: str) -> bool:
        """Returns whether the files or bindings bind a parameter of Trainer."""
        with reading.preserved():
            reading.read(self.files, self.bindings)
            return parameter in reading.bound("alfish.Trainer", parameter)


def refusals(algorithms: Sequence[type[RLAlgorithm]], task: Environment | Group) -> dict[str, str]:
    """Returns, by the name of each algorithm, the reason why it does not accept the specs of a task; '' if it does."""
    found = {}
    for algorithm in algorithms:
        try:
            algorithm.check_specs(task.observation_spec, task.action_spec, task.reward_spec)
            found[algorithm.__name__] = ""
        except UsageError as error:
            found[algorithm.__name__] = str(error)
    return found


def print_algorithms(reasons: Mapping[str, str], agents: str = "") -> None:
    """Prints one line for the algorithms that accept a task, and one for each reason for which others refuse it.

    Args:
      reasons: result of `refusals`.
      agents: names of the groups of agents that the lines are about; '' means all agents, or a task without agents.
    """
    names: dict[str, list[str]] = {"": []}
    for name, reason in reasons.items():
        names.setdefault(reason.replace(name, "ALGORITHM"), []).append(name)
    where = f"for {agents}: " if agents else ""
    for reason, own in names.items():
        if own:
            head, end = ("refused by", f": {reasons[own[0]]}") if reason else ("algorithms", "")
            print(f"{head:<12} {where}{', '.join(own)}{end}")


def suggestions(
    task: Task, environment: Environment, able: Sequence[str], steps_per_second: float, in_tensors: bool
) -> Iterator[tuple[str, str]]:
    """Yields heading and text of each line about the first run.

    Args:
      task: environment as the user described it.
      environment: environment to train in.
      able: names of algorithms that support the environment's spaces.
      steps_per_second: speed of the environment without training.
      in_tensors: whether the environment is written in tensors.
    """
    yield "speed", f"about {rounded(steps_per_second)} random steps/s in one environment, without training"
    name = re.sub(r"\W+", "_", environment.name.rpartition("/")[2]).lower()
    if task.binds("algorithm"):  # no base configuration is needed
        root_dir = f"runs/{name}"
        yield "next", "the gin file chooses the algorithm"
        yield "command", _command([*_files(task.files), *_bound(task.bindings)], root_dir)
        yield from _expected(task, None, 0, steps_per_second)
        return
    has_image = any(is_image(leaf) for leaf in nest.leaves(environment.observation_spec))
    if has_image and environment.name.startswith("ALE/") and not task.files and len(task.bindings) == 1:
        yield "next", "ppo_atari.gin has preprocessing and settings of PPO for Atari games; dqn_atari.gin does for DQN"
        atari = Task(["ppo_atari.gin"], task.bindings)
        yield "command", _command([*_files(atari.files), *_bound(atari.bindings)], f"runs/ppo_{name}")
        yield from _expected(atari, None, 0, steps_per_second)
        return
    fitting = [base for base in BASES.values() if base.algorithm in able]
    if not fitting:
        return
    if in_tensors and "PPO" in able:
        fitting.insert(0, IN_TENSORS)
        base, reason = IN_TENSORS, IN_TENSORS.virtue
    else:
        base, reason = _choice(fitting, environment, steps_per_second)
    if has_goals(environment):
        yield (
            "goals",
            f"the observation has goals: --gin_param='ReplayBatches.hindsight = @HindsightReplay' lets "
            f"{_replaying(environment)} also learn from the goals that it achieved (docs/replay.md)",
        )
    others = ", ".join(f"{one.algorithm} ({one.file})" for one in fitting)
    yield "next", f"base configurations that fit: {others}. Begin with {base.file}: {reason}"
    budget = IMAGE_BUDGET if has_image else base.budget
    yield "command", _first_command(task, base, budget, name)
    if not task.files and (python := _python(base, task.bindings, budget, _root_dir(base, name))):
        yield "Python", python
    yield from _expected(task, base, budget, steps_per_second)
    instead = [BASES[name] for name in ("PPO", _replaying(environment)) if name != base.algorithm]
    if instead[0] in fitting and not has_image:
        yield from _instead(task, instead[0], steps_per_second, name)


def has_goals(environment: Environment) -> bool:
    """Returns whether observations have the leaves of gymnasium's goal environments, and rewards can be computed."""
    spec, names = environment.observation_spec, ("achieved_goal", "desired_goal")
    return isinstance(spec, dict) and all(name in spec for name in names) and bool(environment.method("compute_reward"))


def _choice(fitting: Sequence[BaseConf], environment: Environment, steps_per_second: float) -> tuple[BaseConf, str]:
    """Returns the base configuration to begin with, and the reason for it."""
    by_name = {base.algorithm: base for base in fitting}
    has_image = any(is_image(leaf) for leaf in nest.leaves(environment.observation_spec))
    if "PPO" in by_name and has_image:
        return by_name["PPO"], "it keeps no images in a replay buffer, and its updates are few"
    replays = _replaying(environment)
    if replays in by_name and has_goals(environment):
        return by_name[replays], "its replay can relabel goals"
    if replays in by_name and steps_per_second < SLOW:
        return by_name[replays], f"{by_name[replays].virtue}, and steps of this environment are slow"
    if "PPO" in by_name:
        return by_name["PPO"], f"{by_name['PPO'].virtue} and tuning"
    return fitting[0], "it accepts these spaces"


def _replaying(environment: Environment) -> str:
    """Returns the off-policy algorithm for a first run with the environment's actions."""
    return "SAC" if any(isinstance(leaf, spaces.Box) for leaf in nest.leaves(environment.action_spec)) else "DQN"


def _expected(task: Task, base: BaseConf | None, budget: int, steps_per_second: float) -> Iterator[tuple[str, str]]:
    """Yields a line about the training time with `base`, or with the task's own configuration if `base` is None."""
    try:
        rate = _rate(task, base, steps_per_second)
    except (UsageError, RunError) as error:
        yield "note", f"a short training in the environment failed: {first_line(error)}"
        return
    how = (
        f"tried for {MEASURED_SECONDS:.0f} s"
        if steps_per_second > VERY_SLOW
        else "at most, because the environment is slow"
    )
    said = f"training makes about {rounded(rate)} steps/s on this machine, {how}"
    if base is None:
        yield "time", said
        return
    length = _length(base, budget, rate, steps_per_second)
    if base is IN_TENSORS:
        length += ", plus compilation and evaluations"
    yield "time", f"{said}: {length}, a first budget; raise it if the return is still rising at the end"


def _instead(task: Task, base: BaseConf, steps_per_second: float, name: str) -> Iterator[tuple[str, str]]:
    """Yields a line about `base`, the second choice, and its training time, and a line with its command."""
    with contextlib.suppress(UsageError, RunError):
        length = _length(base, base.budget, _rate(task, base, steps_per_second), steps_per_second)
        yield "or", f"{base.algorithm} ({base.file}): {length}; {base.virtue}"
        yield "command", _first_command(task, base, base.budget, name)


def _length(base: BaseConf, budget: int, rate: float, steps_per_second: float) -> str:
    """Returns how long a run takes, as text; `rate` is the result of `_rate`."""
    limit = "at most " if PLAIN in base.for_speed and steps_per_second > VERY_SLOW else ""
    return f"{limit}about {_duration(budget / rate)} for {budget:,} steps"


def _rate(task: Task, base: BaseConf | None, steps_per_second: float) -> float:
    """Returns the training steps per second; for a very slow environment, the steps per second without training."""
    return training_speed(task, base) if steps_per_second > VERY_SLOW else steps_per_second


def training_speed(task: Task, base: BaseConf | None) -> float:
    """Trains in a temporary directory and returns the environment steps per second on this machine.

    Raises:
      UsageError, RunError: training with this configuration fails.
    """
    files = [*([] if base is None else [base.file]), *task.files]
    budget = [] if base is None else ["Trainer.num_env_steps = 1_000_000_000", *base.for_speed]
    listeners = ["Trainer.listeners = []"]
    if task.binds("extra_listeners"):  # they may need evaluations, which are not due before the end of the run
        listeners = ["Trainer.listeners = [@Evaluate()]", "Evaluate.period = 0", "Evaluate.video_period = 0"]
    with (
        tempfile.TemporaryDirectory(prefix="alfish-") as directory,
        contextlib.redirect_stderr(io.StringIO()),  # hides lines that the run prints
        reading.preserved(),
        process_preserved(),
        configured_run(Path(directory) / "run", files, [*task.bindings, *budget, *listeners]) as trainer,
    ):
        try:
            trainer.start()
            started, began, first = time.perf_counter(), 0.0, 0
            for number, report in enumerate(trainer.iterate()):
                now = time.perf_counter()
                if began and (now - began > MEASURED_SECONDS or report.finished):
                    return (trainer.clock.env_steps - first) / (now - began)
                # The measurement begins after the first updates, which are slow, and after the warm-up.
                if not began and number and (trainer.clock.updates > 8 or now - started > MEASURED_SECONDS):
                    began, first = now, trainer.clock.env_steps
        finally:
            trainer.close()
    raise RunError("the run's budget was spent before the speed of training could be measured")


def _files(files: Sequence[str]) -> list[str]:
    return [f"--gin_file={file}" for file in files]


def _bound(bindings: Sequence[str]) -> list[str]:
    """Returns flags for bindings, with quotes where a shell requires them."""
    flags = []
    for binding in bindings:
        text = re.sub(r"\s*=\s*", "=", binding, count=1)
        has_special = set(text) & set('"$`\\!')
        quoted = f'"{text}"'
        is_plain = re.fullmatch(r"[\w.=/:@%+,-]+", text)
        flags.append(f"--gin_param={text if is_plain else shlex.quote(text) if has_special else quoted}")
    return flags


def _first_command(task: Task, base: BaseConf, budget: int, name: str) -> str:
    bound = _bound([*task.bindings, f"Trainer.num_env_steps = {budget}"])
    return _command([*_files([base.file, *task.files]), *bound], _root_dir(base, name))


def _root_dir(base: BaseConf, name: str) -> str:
    return f"runs/{base.file.removesuffix('.gin')}_{name}"


def _command(arguments: Sequence[str], root_dir: str) -> str:
    return " ".join(["alfish train", *arguments, f"--root_dir={root_dir}"])


def _python(base: BaseConf, bindings: Sequence[str], budget: int, root_dir: str) -> str:
    """Returns the equivalent call of `alfish.train`; '' if the value of a binding is not a Python literal."""
    is_plain = base.file == f"{base.algorithm.lower()}.gin"  # the name of the algorithm selects the file
    arguments, others = [f'"{base.algorithm}"' if is_plain else f'conf="{base.file}"'], {}
    for binding in bindings:
        name, _, value = (part.strip() for part in binding.partition("="))
        try:
            plain = literal(value)
        except ValueError:
            return ""
        if name == "make_environment.env_id":
            arguments.append(f'"{plain}"' if is_plain else f'environment="{plain}"')
        else:
            others[name] = plain
    arguments += [f"num_env_steps={budget:_}", f'root_dir="{root_dir}"', *([f"**{others}"] if others else [])]
    return f"alfish.train({', '.join(arguments)})"


def rounded(rate: float) -> str:
    """Returns a speed with two significant digits, the precision of the measurement."""
    return f"{float(f'{rate:.2g}'):,.0f}" if rate >= 10 else significant(rate, 2)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return counted(max(1, round(seconds)), "second")
    if seconds < 90 * 60:
        return counted(round(seconds / 60), "minute")
    return f"{significant(seconds / 3600, 2)} hours"
