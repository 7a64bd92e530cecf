"""The global random generators: seeding, saving, restoring, and protection from code that seeds them.

alfish draws from torch's generators only; numpy's and Python's generators are left to the environments. An environment
may seed torch's generators, perhaps at each reset. In spite of this, the random numbers that alfish draws for warm-up,
noise and minibatches must not repeat; see `apart`.
"""

import contextlib
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from absl import logging

# Highest bits of seeds that alfish sets, by which it recognises them. A CPU's generator uses only the lowest 32 bits.
_OWN = 0x5A << 56

# Methods of the CPU's generator, looked up only once because they are called in each step.
seed_of_torch: Callable[[], int] = torch.default_generator.initial_seed
cpu_state: Callable[[], torch.Tensor] = torch.default_generator.get_state
set_cpu_state: Callable[[torch.Tensor], Any] = torch.default_generator.set_state


def seed_all(seed: int) -> None:
    """Seeds all global generators: of `random`, of numpy, and of torch on the CPU and each GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)


def seed_torch(seed: int, count: int = 0) -> None:
    """Seeds torch's generators as `torch.manual_seed` does, and marks the seed as alfish's own.

    Args:
      seed: seed of the generators, at least 0.
      count: number of times, modulo 2^24, that other code has seeded the generators; see `recover`.
    """
    if torch.accelerator.is_available():  # called only with a GPU, because `torch.manual_seed` is slow
        torch.manual_seed(seed)  # GPUs use all bits of the seed
    torch.default_generator.manual_seed(_OWN | count << 32 | seed % 2**32)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Context for code outside alfish: on exit, seeds torch's generators again if that code has seeded them."""
    before = seed_of_torch()
    try:
        yield
    finally:
        recover(before)


def called_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose calls run as within `apart`, but with less overhead."""

    def call(*arguments: Any) -> Any:
        before = seed_of_torch()
        result = function(*arguments)
        if seed_of_torch() != before:
            recover(before)
        return result

    return call


def recover(before: int) -> None:
    """Seeds torch's generators again if other code has seeded them, so that their numbers do not repeat.

    Args:
      before: value of `seed_of_torch()` before the other code ran. The new seed is derived from this value, so that a
        run stays reproducible. The new seed contains the number of seedings, so that it differs from all earlier seeds.
    """
    now = seed_of_torch()
    if now != before and not _is_own(now):
        count = (before >> 32) + 1 & 0xFFFFFF if _is_own(before) else 1
        seed_torch(int(np.random.SeedSequence(before).generate_state(1)[0]), count)


def derived_seeds(count: int, *numbers: int) -> list[int]:
    """Returns `count` 31-bit seeds derived from `numbers` and torch's CPU generator, whose state does not change."""
    state = hashlib.sha256(cpu_state().numpy().tobytes()).digest()
    entropy = [int.from_bytes(state, "little"), *numbers]
    return [int(seed >> 1) for seed in np.random.SeedSequence(entropy).generate_state(count)]


def draw_seeds(count: int) -> list[int]:
    """Returns random 31-bit seeds for environments, drawn from torch's generator, whose state checkpoints keep."""
    return torch.randint(2**31, (count,)).tolist()


def _is_own(seed: int) -> bool:
    return seed >> 56 == _OWN >> 56


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores the state of the generators on exit."""
    state = random.getstate(), np.random.get_state(legacy=False), _torch_states()
    try:
        yield
    finally:
        python, numpy, states = state
        random.setstate(python)
        np.random.set_state(numpy)
        _set_torch_states(*states)


def rng_state() -> dict[str, Any]:
    """Returns the state of all global generators: of `random`, of numpy, and of torch on the CPU and each GPU.

    This does not initialize CUDA, because a process that has not used a GPU has not drawn random numbers there.
    """
    on_cpu, on_gpus = _torch_states()
    return {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist),
        "torch": on_cpu,
        "cuda": on_gpus,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores a result of `rng_state`. With fewer GPUs, warns, and restores the generators of the GPUs that exist."""
    version, words, gauss = json.loads(state["python"])
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(json.loads(state["numpy"]))
    _set_torch_states(state["torch"], state["cuda"])


def _torch_states() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the states of torch's generators on the CPU and on each GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_torch_states(on_cpu: torch.Tensor, on_gpus: list[torch.Tensor]) -> None:
    """Restores a result of `_torch_states`."""
    torch.set_rng_state(on_cpu.cpu())  # map_location may have moved the state
    num_gpus = torch.cuda.device_count() if on_gpus else 0
    if num_gpus < len(on_gpus):
        logging.warning(
            "The states of %d GPU generators were saved, but this machine has %d GPUs.", len(on_gpus), num_gpus
        )
    for gpu, generator in enumerate(on_gpus[:num_gpus]):
        torch.cuda.set_rng_state(generator.cpu(), gpu)


def torch_state(device: torch.device) -> list[torch.Tensor]:
    """Returns the state of torch's generators on the CPU and on a device."""
    return [cpu_state()] if device.type != "cuda" else [cpu_state(), torch.cuda.get_rng_state(device)]


def set_torch_state(device: torch.device, states: list[torch.Tensor]) -> None:
    """Restores a result of `torch_state`."""
    set_cpu_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class RandomStream:
    """Separate states of torch's random generators for one part of a run, active within `with stream: ...`.

    Args:
      seed: seed of the stream, at least 0.
      device: device whose generator belongs to the stream, in addition to the CPU's.

    Attributes:
      seed: the constructor's argument.
    """

    def __init__(self, seed: int, device: torch.device):
        self.seed, self._device = seed, device
        with preserved():
            seed_torch(seed)
            self._state = torch_state(device)

    def __enter__(self) -> None:
        self._others = torch_state(self._device)
        self.resume()

    def __exit__(self, *exception: object) -> None:
        self.suspend()
        set_torch_state(self._device, self._others)

    def resume(self) -> None:
        """Makes the stream active until `suspend`; the caller must save and restore the global generators' states."""
        set_cpu_state(self._state[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state[1], self._device)

    def suspend(self) -> None:
        """Makes the stream inactive: stores the current states of the generators in it."""
        self._state = [cpu_state()]
        if self._device.type == "cuda":
            self._state.append(torch.cuda.get_rng_state(self._device))

    def state_dict(self) -> dict[str, Any]:
        return {"generators": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a result of `state_dict`. If it was saved without a GPU, the GPU generator's state is kept."""
        own = [generator.cpu() for generator in state["generators"]]
        self._state = own + self._state[len(own) :]
