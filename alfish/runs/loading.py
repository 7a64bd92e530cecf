"""Checks of a loaded state, its transfer into modules, and the names of parts of modules."""

import difflib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from alfish.errors import UsageError

# Groups of types that `check_like` treats as equal.
_ALIKE = ((int, float), (list, tuple), (dict, OrderedDict), (torch.Tensor, nn.Parameter))


def check_like(state: Any, example: Any, path: str = "") -> None:
    """Checks the types of plain values and containers, because loading does not check them.

    Args:
      state: state that was loaded.
      example: state that would be saved now. Entries that only one of the two states has are ignored; None in either
        state matches anything.
      path: path of the entry, for the message.

    Raises:
      ValueError: an entry has different types in the two states; the message names the first such entry.
    """
    if state is None or example is None:
        return
    if isinstance(example, dict) and isinstance(state, dict):
        for key in example.keys() & state.keys():
            check_like(state[key], example[key], f"{path}.{key}" if path else str(key))
        return
    # Types are compared exactly, because a bool is an int too.
    alike = next((kinds for kinds in _ALIKE if type(example) in kinds), (type(example),))
    if type(state) not in alike:
        raise ValueError(f"{path} is a {type(state).__name__}, not a {type(example).__name__}")


def load_model(module: nn.Module, state_dict: dict[str, Any], name: str) -> None:
    """Loads a state into a module in place, completely or not at all.

    Args:
      module: module whose parameters and buffers are overwritten.
      state_dict: state of a module of the same architecture.
      name: name of the module, for the message.

    Raises:
      UsageError: entries are missing or unexpected, have a shape or dtype other than the module's, or are not finite;
        the message names the first such entries.
    """
    here = module.state_dict()
    # Older versions stored extra state in some modules that have none now.
    state_dict = {key: value for key, value in state_dict.items() if key in here or not key.endswith("_extra_state")}
    wrong = [f"missing {key}" for key in here if key not in state_dict]
    wrong += [f"unexpected {key}" for key in state_dict if key not in here]
    for key, value in here.items():
        there = state_dict.get(key)
        if key in state_dict and isinstance(value, torch.Tensor) and _form(there) != _form(value):
            wrong.append(f"{key} is {_form(there)} in the checkpoint and {_form(value)} here")
    if wrong:
        shown = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise UsageError(
            f"The checkpoint does not fit {name} ({shown}): build the run with the networks, observations and actions "
            "of the checkpoint, or start in an empty directory."
        )
    if found := nonfinite(module, state_dict):
        raise UsageError(
            f"The checkpoint of {name} is unusable: {found[0]} has values that are not finite; load an earlier one"
        )
    module.load_state_dict(state_dict)


def _form(value: Any) -> str:
    """Returns the shape and dtype of a tensor, or the type of any other value."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def nonfinite(module: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Returns the names of parameters in a state that are not finite, and of buffers that contain nan."""
    parameters = {name for name, _ in module.named_parameters()}
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    is_whole = {True: lambda value: torch.isfinite(value).all(), False: lambda value: not torch.isnan(value).any()}
    return [name for name, value in tensors.items() if not is_whole[name in parameters](value)]


def names_below(part: str, names: Iterable[str], owner: str) -> dict[str, str]:
    """Returns the full name of each entry in one part of a module, by the name that the entry has within the part.

    Args:
      part: part of a module: a prefix, such as `critic.encoder` of `critic.encoder.weight`, or a full name; '' means
        the whole module.
      names: full names of the module's parameters, or of the entries of its state dict.
      owner: subject of the message, such as 'Learner.frozen_parts: PPO'.

    Raises:
      UsageError: the part does not exist; the message names similar parts.
    """
    names, prefix = list(names), f"{part}." if part else ""
    found = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    if part in names:
        found[""] = part
    if found:
        return found
    parts = dict.fromkeys(name[:end] for name in names for end in (*_dots(name), len(name)))
    close = [one for one in parts if one.endswith(f".{part}")] or difflib.get_close_matches(part, parts, 3, 0.5)
    shown = close[:3] or [one for one in parts if "." not in one]
    raise UsageError(f"{owner} has no part {part!r}; {'close ones' if close else 'its parts'} are {', '.join(shown)}")


def _dots(name: str) -> list[int]:
    return [at for at, letter in enumerate(name) if letter == "."]
