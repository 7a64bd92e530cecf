"""State of the global random generators: saved, restored and preserved."""

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
    """Restores the generators at the end of the context."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Returns the state of all global generators: of `random`, of numpy, and of torch on the CPU and each GPU.

    CUDA is not initialized for this purpose: a process that has not used a GPU has drawn no numbers there.
    """
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the state of `rng_state`. With fewer GPUs, warns and restores those that there are."""
    version, words, gauss = json.loads(state["python"])
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(json.loads(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())  # map_location may have moved it
    num_gpus = torch.cuda.device_count() if state["cuda"] else 0
    if num_gpus < len(state["cuda"]):
        logging.warning("%d GPU generators were saved, %d GPUs are here.", len(state["cuda"]), num_gpus)
    for gpu, generator in enumerate(state["cuda"][:num_gpus]):
        torch.cuda.set_rng_state(generator.cpu(), gpu)


def torch_state(device: torch.device) -> list[torch.Tensor]:
    """Returns the state of torch's generators on the CPU and on a device."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def set_torch_state(device: torch.device, states: list[torch.Tensor]) -> None:
    """Restores the state of `torch_state`."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
