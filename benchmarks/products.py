"""Microseconds of a product of matrices: torch's own (MKL), oneDNN's, and alfish's kernel for small ones; one thread.

  python -m benchmarks.products

Prints a Markdown table. The shapes are those of the benchmarks' networks: forward passes, gradients of inputs and of
weights. Of the runs of each, the quickest counts.
"""

import time
from collections.abc import Callable

import torch

from alfish import products

# (what, rows, inner, columns, whether the left and the right matrix are transposed views)
SHAPES = [
    ("forward, PPO CartPole's first layer", 256, 4, 64, False, True),
    ("forward, its second layer", 256, 64, 64, False, True),
    ("forward, its last layer", 256, 64, 2, False, True),
    ("its second layer's input", 256, 64, 64, False, False),
    ("its second layer's weight", 64, 256, 64, True, False),
    ("its first layer's weight", 64, 256, 4, True, False),
    ("forward, DQN CartPole's second layer", 64, 64, 64, False, True),
    ("a critic's first layer's input, HalfCheetah", 256, 256, 23, False, True),
    ("a layer of 128 x 128", 256, 128, 128, False, True),
    ("a layer of 256 x 256", 256, 256, 256, False, True),
]


def microseconds(function: Callable[[], object]) -> float:
    best, calls = float("inf"), 200
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - began) / calls)
    return 1e6 * best


def main() -> None:
    torch.set_num_threads(1)
    if not (products.has_small_products() and products.has_large_products()):
        raise SystemExit("one of the kernels is missing here; the warning above says which")
    print("| product | rows x inner x columns | MKL | oneDNN | alfish |\n|---|---|---|---|---|")
    for what, rows, inner, columns, *turned in SHAPES:
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        a, b = (x.T.contiguous().T if turn else x for x, turn in zip((a, b), turned))
        out = torch.empty(rows, columns)
        ways = [
            lambda a=a, b=b, out=out: torch.mm(a, b, out=out),
            lambda a=a, b=b: torch.ops.alfish.large_product(a, b),
            lambda a=a, b=b: torch.ops.alfish.small_product(a, b),
        ]
        figures = " | ".join(f"{microseconds(way):.1f}" for way in ways)
        print(f"| {what} | {rows} x {inner} x {columns} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
