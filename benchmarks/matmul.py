"""Microseconds of matrix products with torch's two libraries (MKL and oneDNN) and with alfish's kernels.

  python -m benchmarks.matmul --threads=1

The shapes are those of the benchmarks' networks: forward passes, and gradients of inputs and of weights. The quickest
of several runs counts. Prints a Markdown table and writes no file.
"""

import argparse
from collections.abc import Callable

import torch

from alfish.compiler import matmul
from benchmarks import tables
from benchmarks.timing import seconds_a_call

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
    ("its input", 256, 256, 256, False, False),
    ("its weight", 256, 256, 256, True, False),
    ("a layer of 1024 x 1024", 256, 1024, 1024, False, True),
]
HEADINGS = ["product", "rows x inner x columns", "MKL", "oneDNN", "alfish", "bfloat16: oneDNN", "alfish"]


def microseconds(product: Callable[[int], object]) -> float:
    """Returns microseconds of a call, in the quickest of 30 runs of 200 calls."""
    return 1e6 * min(seconds_a_call(product, 200) for _ in range(30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    if not matmul.has_products():
        raise SystemExit(
            "alfish's kernel is not for this processor or torch, or a warning above says why it is missing"
        )
    own, own_low = torch.ops.alfish.product, torch.ops.alfish.bfloat16_product
    linear = torch.ops.mkldnn._linear_pointwise
    print(tables.header(HEADINGS))
    for what, rows, inner, columns, *turned in SHAPES:
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        a, b = (x.T.contiguous().T if turn else x for x, turn in zip((a, b), turned))
        low_a, low_b = (x.to(torch.bfloat16) for x in (a, b))
        ways = [
            lambda _, a=a, b=b: torch.mm(a, b),
            lambda _, a=a, b=b: linear(a, b.t(), None, "none", [], ""),
            lambda _, a=a, b=b: own(a, b),
            lambda _, a=low_a, b=low_b: torch.mm(a, b),
            lambda _, a=low_a, b=low_b: own_low(a, b),
        ]
        if not matmul.has_bfloat16_products():
            ways.pop()
        figures = [f"{microseconds(way):.1f}" for way in ways]
        print(tables.line([what, f"{rows} x {inner} x {columns}", *figures]), flush=True)


if __name__ == "__main__":
    main()
