"""The random generators that everything shares: saved, restored, and left as they were."""

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from absl import logging


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Leaves the generators as they were, whatever is drawn inside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """State of every global generator: `random`, numpy's legacy one, torch's on the CPU and on each GPU.

    CUDA is not woken for it: a process that has not used a GPU has drawn nothing there.
    """
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned; on a machine with fewer GPUs, says so and restores those it has."""
    version, words, gauss = json.loads(state["python"])
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(json.loads(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())  # wherever map_location has put it
    num_gpus = torch.cuda.device_count() if state["cuda"] else 0
    if num_gpus < len(state["cuda"]):
        logging.warning("%d GPU generators were saved, %d GPUs are here.", len(state["cuda"]), num_gpus)
    for gpu, generator in enumerate(state["cuda"][:num_gpus]):
        torch.cuda.set_rng_state(generator.cpu(), gpu)
