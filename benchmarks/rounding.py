"""How far gradients with products in bfloat16 are from those in float32, at the last checkpoint of a run.

  python -m benchmarks.rounding runs/learning/flashsac_halfcheetah/seed0

The run trains by replay and has saved it. Minibatches are drawn from it, and nothing is updated. Products are rounded
as oneDNN rounds them: factors and results, forward and backward. `--narrowest` is the least number of rows, inner
numbers and columns of a product that is rounded, as `NARROW` in `alfish.compiler.matmul`; 1: all large products are.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alfish.compiler import matmul
from alfish.configuration import reading
from alfish.configuration.runs import configured_trainer
from alfish.learner.batches import take


class Rounded(TorchDispatchMode):
    """Rounds large products to bfloat16.

    Args:
      narrowest: see the module.
    """

    def __init__(self, narrowest: int):
        super().__init__()
        self._narrowest = narrowest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in matmul.PRODUCTS or kwargs:
            return func(*args, **(kwargs or {}))
        *bias, a, b = args
        sizes = *a.shape[-2:], b.shape[-1]
        if min(sizes) < self._narrowest or sizes[0] * sizes[1] * sizes[2] < matmul.LARGE_PRODUCT:
            return func(*args)
        product = (a.bfloat16().float() @ b.bfloat16().float()).bfloat16().float()
        return product + bias[0] if bias else product


def gradients(updates: Any, batch: Any, seed: int, narrowest: int | None) -> dict[str, torch.Tensor]:
    """Returns the flat gradient of each group; `narrowest` None: without rounding."""
    torch.manual_seed(seed)
    with torch.enable_grad():
        if narrowest is None:
            return flat_gradients(updates, batch)
        with Rounded(narrowest):
            return flat_gradients(updates, batch)


def flat_gradients(updates: Any, batch: Any) -> dict[str, torch.Tensor]:
    means, _ = updates.means(batch)
    parameters = {name: group.parameters for name, group in updates.groups.items()}
    by_group = updates.gradients(means, parameters).by_group
    return {name: torch.cat([vector.reshape(-1) for vector in vectors]) for name, vectors in by_group.items()}


def compare(exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> str:
    """Returns a line about the gradients of one group on several minibatches."""
    one, other = torch.stack(exact).mean(0), torch.stack(rounded).mean(0)
    each = statistics.mean(float((a - b).norm() / a.norm()) for a, b in zip(exact, rounded))
    similar = statistics.mean(float(torch.cosine_similarity(a, b, 0)) for a, b in zip(exact, exact[1:]))
    of_mean = float((one - other).norm() / one.norm())
    return f"{100 * of_mean:8.1f} % {100 * each:8.1f} % {similar:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--narrowest", type=int, nargs="+", default=[1, matmul.NARROW])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(arguments.run, directory, dirs_exist_ok=True)
        changes = ["Learner.compile = False", "Learner.precision = 'float32'", "Trainer.num_env_steps = 1_000_000_000"]
        Path(directory, "done").unlink(missing_ok=True)
        trainer = configured_trainer(directory, reading.read([f"{directory}/config.gin"], changes))
        trainer.directory.accepts_config_change = True
        trainer.start()
        updates: Any = trainer.learner._plain
        updates.algorithm.trains_actor = lambda: True  # where the actor trains less often
        chunks = list(trainer.batches.chunks(trainer.clock.value + arguments.batches))
        batches = [take(chunk.source, index) for chunk in chunks for index in chunk.minibatches()]
        found = {narrowest: [gradients(updates, batch, k, narrowest) for k, batch in enumerate(batches)]
                 for narrowest in (None, *arguments.narrowest)}  # fmt: skip
        trainer.close()
    exact = found.pop(None)
    print(f"{len(batches)} minibatches\n{'group':10} narrowest  of mean  of each  batches alike (cosine)")
    for group in exact[0]:
        for narrowest, rounded in found.items():
            line = compare([each[group] for each in exact], [each[group] for each in rounded])
            print(f"{group:10} {narrowest:9} {line}")


if __name__ == "__main__":
    main()
