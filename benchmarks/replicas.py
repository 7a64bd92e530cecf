"""Largest differences between parameters that two learners train and those that one learner trains on the same rows.

    python -m benchmarks.replicas                 # all algorithms, plain and compiled: docs/results/replicas.csv
    python -m benchmarks.replicas ppo --compiled  # some rows; one to four minutes for each algorithm
    python -m benchmarks.replicas --show          # the rows as the table of docs/results.md
    python -m benchmarks.replicas --sums          # milliseconds of one sum over two learners, by its size

Rows, masks and importance weights are random, and each learner has another number of rows that train. A column has the
same difference of one learner whose batches have their rows in another order: no sum is exact to the last bit. Noise of
an update is a function of its row, so that both see the same. The two learners are processes of this machine, joined
by gloo as torchrun joins them.
"""

import argparse
import contextlib
import copy
import functools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.bc import BC
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.dqn import DQN
from alfish.algorithms.iql import IQL
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.learner.batches import EpochBatches, Minibatches
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam
from alfish.nest import Nest
from alfish.processes import replicas
from alfish.transforms import Transforms
from benchmarks import PROJECT
from benchmarks.tables import header, line, read_rows, replace_rows
from benchmarks.timing import seconds_a_call

TABLE = PROJECT / "docs" / "results" / "replicas.csv"
DTYPES = "float64", "float32"
KEY = ("algorithm", "dtype", "updates")  # of a row
ALGORITHMS: dict[str, Callable[..., RLAlgorithm]] = {
    "ppo": PPO, "a2c": A2C, "appo": APPO, "dqn": DQN, "sac": SAC, "td3": TD3, "ddpg": DDPG,
    "recurrent_sac": RecurrentSAC, "iql": IQL, "bc": BC,
}  # fmt: skip
NAMES = {"recurrent_sac": "RecurrentSAC"}
OBSERVATION, REWARD = spaces.Box(-3, 3, (4,)), spaces.Box(-10, 10, ())
CONTINUOUS, DISCRETE = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
NUM_LEARNERS = 2
NUM_COLUMNS, LENGTH = 32, {True: 9, False: 3}  # of rows, on-policy and off-policy
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 0.5


class Case(NamedTuple):
    """One training; a row of the table compares several."""

    algorithm: str
    dtype: str = "float64"
    is_compiled: bool = False
    num_updates: int = 100


def trained(case: Case, columns: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Returns all parameters, as one vector, after updates on random rows.

    Args:
      case: what to train.
      columns: of the rows that this learner trains on, in their order.
      seed: of networks and rows.
    """
    torch.manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    spec = DISCRETE if case.algorithm == "dqn" else CONTINUOUS
    algorithm = ALGORITHMS[case.algorithm](OBSERVATION, spec, REWARD).to(dtype)
    acting = copy.deepcopy(algorithm)
    learner = Learner(
        algorithm, optimizer=functools.partial(Adam, eps=1e-6), learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM, compile=case.is_compiled,
    )  # fmt: skip
    chunks = _epochs if algorithm.on_policy else _windows
    with noise_of_rows():
        for k in range(case.num_updates):
            torch.manual_seed(1000 * seed + k)
            learner.train(chunks(algorithm, random_rows(acting, spec, dtype), columns), summarize=False)
    assert learner.updates == case.num_updates and learner.is_plain != case.is_compiled
    return torch.cat([parameter.detach().reshape(-1) for parameter in algorithm.parameters()])


def random_rows(algorithm: RLAlgorithm, action_spec: spaces.Space, dtype: torch.dtype) -> Experience:
    """Returns rows `[T, B]` in which the later columns train less often, with the actions of an algorithm."""
    shape = LENGTH[algorithm.on_policy], NUM_COLUMNS
    ends = torch.rand(shape) < torch.linspace(0, 0.6, NUM_COLUMNS)
    step_type = torch.where(ends, torch.randint(StepType.FIRST, StepType.PAD + 1, shape), StepType.MID).int()
    observation, reward = torch.randn(*shape, *OBSERVATION.shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    action = nest.map(lambda leaf: leaf.unflatten(0, shape), specs.sample(action_spec, shape[0] * shape[1]))
    env_id = torch.arange(NUM_COLUMNS).expand(shape).int()
    discount = (torch.rand(shape) < 0.9).to(dtype)
    step = TimeStep(step_type, reward, discount, observation, nest.map(torch.zeros_like, action), env_id)
    info, state = None, nest.map(lambda leaf: leaf.to(dtype), algorithm.initial_state(NUM_COLUMNS))
    if algorithm.on_policy:
        with torch.no_grad():
            made = algorithm.rollout_step(nest.map(lambda leaf: leaf.flatten(0, 1), step), None)
        action, info = nest.map(lambda leaf: leaf.unflatten(0, shape), (made.output, made.info))
    elif action.is_floating_point():
        action = action.to(dtype)
    return Experience(step, action, info, state)


def _epochs(algorithm: RLAlgorithm, rows: Experience, columns: torch.Tensor) -> Iterator[Minibatches]:
    batches = EpochBatches(num_epochs=1)
    batches.bind(algorithm, Transforms([], OBSERVATION, REWARD), len(rows.action) - 1, len(columns))
    batches.add(nest.map(lambda leaf: leaf[:, columns], rows))
    return batches.chunks(0)


def _windows(algorithm: RLAlgorithm, rows: Experience, columns: torch.Tensor) -> list[Minibatches]:
    weight = torch.rand(NUM_COLUMNS, dtype=rows.time_step.reward.dtype)
    state = nest.map(lambda leaf: leaf[columns], rows.state)
    own = nest.map(lambda leaf: leaf[:, columns], rows._replace(state=None))._replace(state=state)
    return [Minibatches(Batch(own, trainable(own.time_step.step_type), weight=weight[columns]), None)]


@contextlib.contextmanager
def noise_of_rows() -> Iterator[None]:
    """Replaces normal noise by a function of the row that it is added to."""
    normal = torch.randn_like

    def noise(like: torch.Tensor) -> torch.Tensor:
        return 1.5 * torch.sin(5 * like.detach() + torch.arange(like.shape[-1], device=like.device))

    torch.randn_like = noise  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randn_like = normal


def start(
    arguments: Sequence[str], size: int = NUM_LEARNERS, environment: Mapping[str, str] = os.environ, **popen: Any
) -> list[subprocess.Popen]:
    """Starts a Python command once for each of several learners, with the environment variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**environment, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen([sys.executable, *arguments], env={**common, "RANK": str(k), "LOCAL_RANK": str(k)}, **popen)
        for k in range(size)
    ]


def of_learners(cases: Sequence[Case]) -> list[list[torch.Tensor]]:
    """Returns the parameters of each case, in each of the learners that train it together."""
    with tempfile.TemporaryDirectory() as directory:
        texts = [",".join(map(str, case)) for case in cases]
        processes = start(["-m", "benchmarks.replicas", "--learner", directory, *texts], cwd=PROJECT)
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise SystemExit("a learner failed; its error is above")
        found = [torch.load(Path(directory) / f"{k}.pt") for k in range(NUM_LEARNERS)]
    return [list(each) for each in zip(*found)]


def _learn(directory: Path, texts: Sequence[str]) -> None:
    """Trains each case in this process, one of several learners, and saves its parameters."""
    fields = (text.split(",") for text in texts)
    cases = [Case(name, dtype, compiled == "True", int(updates)) for name, dtype, compiled, updates in fields]
    with replicas.joined():
        if not cases:
            times = milliseconds()
            print(f"learner {replicas.rank()}, milliseconds by number of values: {times}")
        columns = torch.arange(NUM_COLUMNS).chunk(replicas.size())[replicas.rank()]
        torch.save([trained(case, columns) for case in cases], directory / f"{replicas.rank()}.pt")


def milliseconds() -> dict[int, float]:
    """Returns the time of one sum over all learners, the quickest of several runs, by the number of its values."""

    def quickest(values: torch.Tensor) -> float:
        return min(seconds_a_call(lambda _: replicas.total(values), 20) for _ in range(10))

    return {size: round(1000 * quickest(torch.ones(size)), 3) for size in (1_000, 10_000, 100_000, 250_000, 1_700_000)}


def differences(case: Case, of_ranks: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Returns a row of the table."""
    one = trained(case, torch.arange(NUM_COLUMNS))
    shuffled = trained(case, torch.randperm(NUM_COLUMNS, generator=torch.Generator().manual_seed(1)))
    beginning = trained(case._replace(num_updates=0, is_compiled=False), torch.arange(NUM_COLUMNS))
    return {
        "algorithm": case.algorithm,
        "dtype": case.dtype,
        "updates": f"{case.num_updates} {'compiled' if case.is_compiled else 'plain'}",
        "two_learners": _largest(of_ranks[0] - one),
        "other_order": _largest(shuffled - one),
        "between_learners": _largest(of_ranks[0] - of_ranks[1]),
        "moved": _largest(one - beginning),
    }


def table(path: Path) -> str:
    """Returns the Markdown table of the rows in a file, a line for each algorithm, plain and compiled."""
    rows = {(row["algorithm"], row["dtype"], row["updates"]): row for row in read_rows(path)}
    of_dtype = [words for dtype in DTYPES for words in (f"{dtype}: two learners", "other order")]
    lines = [header(["largest difference of any parameter", *of_dtype, "moved by up to"])]
    for way in ("plain", "compiled"):
        for name in ALGORITHMS:
            keys = [(name, dtype, f"100 {way}") for dtype in DTYPES]
            if all(key in rows for key in keys):
                figures = [rows[key][column] for key in keys for column in ("two_learners", "other_order")]
                lines.append(line([f"{NAMES.get(name, name.upper())}, {way}", *figures, rows[keys[0]]["moved"]]))
    return "\n".join(lines)


def _largest(difference: Nest) -> float:
    return float(f"{difference.abs().max().item():.3g}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help=f"of {', '.join(ALGORITHMS)}; default: all")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="only plain updates")
    parser.add_argument("--compiled", action="store_true", help="only compiled updates")
    parser.add_argument("--show", action="store_true", help="print the table only")
    parser.add_argument("--sums", action="store_true", help="time sums only")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--learner", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.learner:
        _learn(given.learner, given.algorithms)
        return
    if given.sums:
        of_learners([])
        return
    if given.show:
        print(table(given.table))
        return
    ways = [False] if given.plain else [True] if given.compiled else [False, True]
    for name in given.algorithms or list(ALGORITHMS):
        cases = [Case(name, dtype, compiled, given.updates) for compiled in ways for dtype in DTYPES]
        rows = [differences(case, of_ranks) for case, of_ranks in zip(cases, of_learners(cases))]
        for row in rows:
            print("  ".join(map(str, row.values())), flush=True)
        order = lambda row: [row["updates"], row["dtype"], row["algorithm"]]  # noqa: E731
        replace_rows(given.table, rows, list(rows[0]), KEY, order)


if __name__ == "__main__":
    main()
