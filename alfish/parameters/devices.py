"""Devices by the name that a parameter has."""

import torch

from alfish.errors import UsageError


def device_named(name: str, parameter: str = "Trainer.device") -> torch.device:
    """Returns a device; 'auto' is a GPU if there is one.

    Args:
      name: 'auto', 'cpu', 'cuda' or 'cuda:N'.
      parameter: for messages.

    Raises:
      UsageError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{parameter} is {name!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{parameter} is {name!r}, which alfish does not use; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{parameter} is {name!r}, but torch finds no GPU here; set it to 'cpu'")
    return device
