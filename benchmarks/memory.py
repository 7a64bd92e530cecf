"""Milliseconds of gated memories over consecutive rows, forward and backward: row by row, and in pieces between resets.

  python -m benchmarks.memory                    all shapes
  python -m benchmarks.memory --device=cuda      on a GPU, where alfish always uses pieces
  python -m benchmarks.memory --compiled         updates of DQN with a GRU, plain and as one graph
  python -m benchmarks.memory --kinds            updates of DQN with each kind of memory, and steps, in turns

The smallest of nine times counts. The table also shows which way `alfish.networks.memory` chooses and, for graphs, the
processor seconds of compiling; set `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1` to measure these without caches. Prints a
Markdown table and writes no file.
"""

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.dqn import DQN
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, LSTM, AttentionWindow, MinGRU, QNetwork, StackedMemory, Torso
from alfish.networks.memory import cut
from alfish.specs import reward_spec
from benchmarks import tables
from benchmarks.timing import seconds_a_call

# Rows, columns, features.
SHAPES = [(16, 64, 64), (32, 8, 64), (32, 64, 64), (64, 16, 64), (128, 8, 64), (128, 32, 256)]
FIRST_SHARES = (0.0, 0.05, 0.25)
KINDS: dict[str, Callable[[int], Any]] = {
    "GRU": GRU,
    "LSTM": LSTM,
    "two GRUs": StackedMemory,
    "MinGRU": MinGRU,
    "two MinGRUs": functools.partial(StackedMemory, layers=[MinGRU, MinGRU]),
    "AttentionWindow, 16 rows": functools.partial(AttentionWindow, length=16),
    "AttentionWindow, 64 rows": AttentionWindow,
}
KINDS_ROWS = (16, 64)
HEADINGS = ["memory", "rows x columns x features", "share of FIRST rows", "one by one", "in pieces", "taken"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--kinds", action="store_true")
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(1)
    if arguments.compiled:
        print(tables.header(["rows x windows", "plain", "as one graph", "compiling"]))
        for num_rows in (8, 32):
            plain, graph = (update(num_rows, is_compiled) for is_compiled in (False, True))
            cells = [f"{num_rows} x 32", f"{plain[0]:.1f}", f"{graph[0]:.1f}", f"{graph[1]:.0f}"]
            print(tables.line(cells), flush=True)
        return
    if arguments.kinds:
        compare_kinds()
        return
    print(tables.header(HEADINGS))
    for kind in (GRU, LSTM):
        for shape in SHAPES:
            for share in FIRST_SHARES:
                print(tables.line(measured(kind, shape, share, device)), flush=True)


def measured(kind: type, shape: tuple[int, int, int], share: float, device: str) -> list[str]:
    """Returns the cells of a table row."""
    torch.manual_seed(0)
    num_rows, num_columns, size = shape
    memory = kind(size, size).to(device)
    features = torch.randn(shape, device=device, requires_grad=True)
    first = torch.rand(num_rows, num_columns) < share
    step_type = torch.where(first, StepType.FIRST, StepType.MID).int().to(device)
    state = nest.to(memory.initial_state(num_columns), device)

    def differentiate(output: torch.Tensor) -> None:
        torch.autograd.grad(output.sum(), [features, *memory.parameters()])

    one_by_one = milliseconds(lambda: differentiate(memory.row_by_row(features, state, step_type)[0]))
    in_pieces = milliseconds(lambda: differentiate(memory.in_pieces(features, state, cut(step_type))[0]))
    taken = "in pieces" if device != "cpu" or memory.pieces_pay(cut(step_type), num_rows) else "one by one"
    sizes = f"{num_rows} x {num_columns} x {size}"
    return [kind.__name__, sizes, str(share), f"{one_by_one:.2f}", f"{in_pieces:.2f}", taken]


def compare_kinds() -> None:
    """Prints the milliseconds of plain updates and of acting of each kind of memory, measured in turns."""
    print(tables.header(["memory", *(f"update, {num_rows} x 32" for num_rows in KINDS_ROWS), "step of 16"]))
    functions: dict[str, list[Callable[[int], object]]] = {}
    for name, memory in KINDS.items():
        updates = [updating(num_rows, False, memory) for num_rows in KINDS_ROWS]
        functions[name] = [functools.partial(_train, *made) for made in updates] + [stepping(memory)]
    least = {name: [float("inf")] * len(each) for name, each in functions.items()}
    for _ in range(20):
        for name, each in functions.items():
            for k, function in enumerate(each):
                least[name][k] = min(least[name][k], 1e3 * seconds_a_call(function))
    for name, found in least.items():
        print(tables.line([name, *(f"{each:.2f}" for each in found)]), flush=True)


def stepping(memory: Callable[[int], Any]) -> Callable[[int], object]:
    """Returns a function that takes one step of 16 rows of a memory alone, by torch and without gradient."""
    torch.manual_seed(0)
    made = memory(64)
    features, step_type, state = torch.randn(16, 64), torch.ones(16, dtype=torch.int32), made.initial_state(16)

    def step(_: int) -> None:
        with torch.no_grad():
            made(features, state, step_type)

    return step


def update(num_rows: int, is_compiled: bool) -> tuple[float, float]:
    """Returns milliseconds of an update of DQN with a GRU, and the processor seconds of its compilation."""
    began = sum(os.times()[:4])  # the C++ compiler's included
    learner, batch = updating(num_rows, is_compiled, GRU)
    _train(learner, batch)
    first = sum(os.times()[:4]) - began
    for _ in range(10):  # compared with plain updates
        _train(learner, batch)
    return milliseconds(lambda: _train(learner, batch)), first


def _train(learner: Learner, batch: Batch, _: int = 0) -> None:
    learner.train([Minibatches(batch, None)], False)


def updating(num_rows: int, is_compiled: bool, memory: Callable[[int], Any]) -> tuple[Learner, Batch]:
    """Returns a learner of DQN with a memory, and a batch of 32 windows."""
    torch.manual_seed(0)
    q_network = functools.partial(QNetwork, torso=functools.partial(Torso, memory=memory))
    dqn = DQN(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3), reward_spec(), q_network=q_network)
    shape = (num_rows, 32)
    step_type = torch.where(torch.rand(shape) < 0.1, StepType.FIRST, StepType.MID).int()
    action = torch.randint(3, shape)
    rows = TimeStep(step_type, torch.randn(shape), torch.ones(shape), torch.randn(*shape, 4), action, action.int())
    batch = Batch(Experience(rows, action, None, dqn.initial_state(32)), trainable(step_type))
    return Learner(dqn, compile=is_compiled), batch


def milliseconds(function: Callable[[], object]) -> float:
    """Returns the time of the quickest of nine calls, after one warm-up call."""

    def call(_: int) -> None:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return 1e3 * min([seconds_a_call(call) for _ in range(10)][1:])


if __name__ == "__main__":
    main()
