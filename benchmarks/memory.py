"""The two ways of a memory through consecutive rows, forward and backward: one by one, and in pieces between resets.

  python -m benchmarks.memory                    all shapes
  python -m benchmarks.memory --device=cuda      there, where pieces are always taken

Prints milliseconds, the smallest of nine, and which way `alfish.networks.memory` takes.
"""

import argparse
import time
from collections.abc import Callable

import torch

from alfish import nest
from alfish.data import StepType
from alfish.networks import GRU, LSTM
from alfish.networks.memory import cut

# Rows, columns, features.
SHAPES = [(16, 64, 64), (32, 8, 64), (32, 64, 64), (64, 16, 64), (128, 8, 64), (128, 32, 256)]
FIRST_SHARES = (0.0, 0.05, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    print("| memory | rows x columns x features | share of FIRST rows | one by one | in pieces | taken |")
    print("|---|---|---|---|---|---|")
    for kind in (GRU, LSTM):
        for shape in SHAPES:
            for share in FIRST_SHARES:
                print(measured(kind, shape, share, device), flush=True)


def measured(kind: type, shape: tuple[int, int, int], share: float, device: str) -> str:
    """A row of the table."""
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
    where = f"{kind.__name__} | {num_rows} x {num_columns} x {size}"
    return f"| {where} | {share} | {one_by_one:.2f} | {in_pieces:.2f} | {taken} |"


def milliseconds(function: Callable[[], None]) -> float:
    times = []
    for _ in range(10):
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times[1:])


if __name__ == "__main__":
    main()
