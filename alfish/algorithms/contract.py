"""Checks of the results of `RLAlgorithm` hooks; an error names the hook and the expected result."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from absl import logging
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import AlgStep, LossInfo
from alfish.errors import RunError, UsageError, first_line
from alfish.errors.user_code import CodeError, overridden, refuse
from alfish.nest import Nest

BEYOND = 1e-3  # largest distance of an action beyond its bounds that is ignored as a rounding error


def return_error(found: Any, expected: str, owner: object, hook: str) -> UsageError:
    """Returns the error for a hook of `owner` that did not return `expected`."""
    return UsageError(f"{hook} of {type(owner).__name__} returned {kind_of(found)}; it must return {expected}")


def losses_error(groups: Iterable[str]) -> UsageError:
    """Returns the error for a `calc_loss` that returned a single loss for several parameter groups."""
    return UsageError(f"calc_loss must return a dict with one loss for each of the groups {list(groups)}")


def check_step(step: Any, owner: object, hook: str, action_spec: Nest, batch_size: int, initial_state: Nest) -> None:
    """Checks the result of `rollout_step` or `predict_step` for `batch_size` environments.

    Args:
      step: the `AlgStep` that the hook returned.
      owner, hook: algorithm, and name of its method, for the message.
      action_spec: canonical spec of the actions, see `alfish.specs`.
      batch_size: number of rows, B.
      initial_state: initial state of the algorithm, `[B, ...]`; later states must have the same structure, shapes and
        dtypes.

    Raises:
      UsageError: a part of `step` is wrong; the message says what it must be.
    """
    if not isinstance(step, AlgStep):
        raise return_error(step, "AlgStep(action, state, info)", owner, hook)
    who = f"{hook} of {type(owner).__name__}"
    check_action(step.output, owner, hook, action_spec, batch_size)
    for name, leaf in nest.named_leaves(step.info, "info"):
        if not _is_tensor(leaf) or leaf.shape[:1] != (batch_size,):
            asked = f"a tensor that begins with [{batch_size}]"
            raise UsageError(f"{who} returned {kind_of(leaf)} as {name}; it must be {asked}")
    carried, first = (
        ", ".join(
            f"{path} {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
            for path, leaf in nest.named_leaves(state, "state")
            if _is_tensor(leaf)
        )
        for state in (step.state, initial_state)
    )
    if carried != first:
        carried, first = carried or "none", first or "none"
        raise UsageError(
            f"{who} returned a state of {carried}, but initial_state returned a state of {first}; make the two equal"
        )


def refuse_hooks(error: Exception, algorithm: Any) -> None:
    """Raises CodeError if alfish's code failed on the result of a method that the user's algorithm overrides.

    Args:
      error: error of an update. If the user's code was running, the CodeError names the line of that code instead.
      algorithm: algorithm of the update.
    """
    names = overridden(algorithm)
    refuse(error, "")
    if names and not isinstance(error, (UsageError, RunError)):
        raise CodeError(
            f"an update of {type(algorithm).__name__} raised {type(error).__name__}: {first_line(error)}; the cause "
            f"may be the result of a method that the class overrides: {', '.join(names)}"
        ).with_traceback(error.__traceback__) from error.__cause__ or error.__context__


def check_initial_state(algorithm: Any) -> None:
    """Raises UsageError if `initial_state` of an algorithm does not return tensors `[B, ...]`."""
    for name, leaf in nest.named_leaves(algorithm.initial_state(2), "state"):
        if not _is_tensor(leaf) or leaf.shape[:1] != (2,):
            raise UsageError(
                f"initial_state(2) of {type(algorithm).__name__} returned {kind_of(leaf)} as {name}; it must be a "
                "tensor whose first dimension is the batch size, 2"
            )


def check_registered(algorithm: nn.Module) -> None:
    """Checks that torch has registered all parameters; an unregistered parameter is neither trained nor saved.

    Raises:
      UsageError: an attribute of a user-defined module has parameters that are not registered.
    """
    known = {id(one) for one in (*algorithm.modules(), *algorithm.parameters())}
    for path, module in algorithm.named_modules():
        if type(module).__module__.partition(".")[0] in ("alfish", "torch"):
            continue
        for name, value in vars(module).items():
            hidden = [one for one in _parts(value) if id(one) not in known and _is_trainable(one)]
            if hidden:
                where = f"{type(algorithm).__name__}.{path}.{name}" if path else f"{type(algorithm).__name__}.{name}"
                raise UsageError(
                    f"{where} has {_kind(hidden[0])}, which torch does not register there: it would be neither trained "
                    "nor saved; keep modules in torch.nn.ModuleList or ModuleDict, and tensors in torch.nn.Parameter"
                )


def _parts(value: Any) -> list[Any]:
    """Returns the entries of a list, tuple or dict; for any other value, a list with the value."""
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(value.values()) if isinstance(value, dict) else [value]


def _is_trainable(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return _is_tensor(value) and value.requires_grad and value.is_leaf


def _kind(value: Any) -> str:
    return f"a module ({type(value).__name__})" if isinstance(value, nn.Module) else kind_of(value)


def check_detached(algorithm: nn.Module) -> None:
    """Raises UsageError if an attribute holds a tensor with an autograd graph."""
    for module in algorithm.modules():
        for name, value in vars(module).items():
            if any(_is_tensor(one) and one.grad_fn is not None for one in _parts(value)):
                raise UsageError(
                    f"{type(module).__name__}.{name} keeps a tensor with the graph that computed it, so each update "
                    "would take longer than the last; detach() the tensor"
                )


def check_loss_info(loss_info: LossInfo, owner: object) -> None:
    """Raises UsageError if a field of the `LossInfo` from `calc_loss` has the wrong type.

    The number of rows is not checked.
    """

    def check(field: str, value: Any, is_right: bool, asked: str) -> None:
        if not is_right:
            name = f"calc_loss of {type(owner).__name__}"
            raise UsageError(f"{name} returned {kind_of(value)} as LossInfo.{field}; it must be {asked}")

    content = {"scalar": "a parameter group to its 0-d loss", "extra": "names to tensors"}
    content["buffers"] = "buffers to their new values, all tensors"
    for field, parts in content.items():
        value = getattr(loss_info, field)
        check(field, value, isinstance(value, (Mapping, type(None))), f"a dict from {parts}")
    buffers = [*(loss_info.buffers or {}), *(loss_info.buffers or {}).values()]
    check("buffers", loss_info.buffers, all(map(_is_tensor, buffers)), f"a dict from {content['buffers']}")
    for field in ("stop", "kl", "priority"):
        rows = getattr(loss_info, field)
        is_right = rows is None or (_is_tensor(rows) and (rows.ndim > 0 or field == "priority"))
        check(field, rows, is_right, "a tensor, one number per row")
    losses = loss_info.loss if isinstance(loss_info.loss, Mapping) else {"": loss_info.loss}
    for field, each in (("loss", losses), ("scalar", loss_info.scalar or {})):
        asked = "a float tensor, one number per row" if field == "loss" else "a 0-d float tensor"
        for name, loss in each.items():
            is_right = _is_tensor(loss) and loss.is_floating_point() and (field == "loss" or loss.ndim == 0)
            check(f"{field}[{name!r}]" if name else field, loss, is_right, asked)


def check_action(action: Nest, owner: object, hook: str, action_spec: Nest, batch_size: int) -> None:
    """Checks the action that a hook of `owner` returned for `batch_size` environments.

    Args:
      action: action that the hook returned.
      owner, hook: algorithm, and name of its method, for the message.
      action_spec: canonical spec of the actions, see `alfish.specs`.
      batch_size: number of rows, B.

    Raises:
      UsageError: the action is wrong; the message says what it must be.
    """
    who = f"{hook} of {type(owner).__name__}"
    found, asked = dict(nest.named_leaves(action, "action")), dict(nest.named_leaves(action_spec, "action"))
    if found.keys() != asked.keys():
        raise UsageError(
            f"{who} returned {' and '.join(found) or 'no action'}; the action space asks for {' and '.join(asked)}"
        )
    for name, spec in asked.items():
        _check_leaf(who, name, found[name], spec, batch_size)


def warn_of_bounds(action: Nest, algorithm: Any) -> bool:
    """Logs a warning if Box actions in the CPU's memory are beyond the bounds of the canonical action space.

    Environments execute clipped actions, but replay stores the actions before clipping, so a critic would learn from
    actions that were not executed.

    Args:
      action: actions `[T, B, ...]`, arrays or tensors; tensors outside the CPU's memory are not read.
      algorithm: algorithm that chose the actions.

    Returns:
      True if a warning was logged.
    """
    pairs = zip(nest.named_leaves(action, "action"), nest.leaves(algorithm.action_spec), strict=True)
    for (name, leaf), spec in pairs:
        if not isinstance(spec, spaces.Box) or (isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"):
            continue
        values = nest.as_array(leaf)
        beyond = np.maximum(spec.low - values, values - spec.high).max(initial=-np.inf)
        if beyond > BEYOND:
            logging.warning(
                "%s chose an %s that is %.3g beyond the bounds [%g, %g], but the environment executes clipped actions; "
                "a critic then learns from actions that were not executed: clamp actions in rollout_step, also after "
                "adding noise",
                *(type(algorithm).__name__, name, beyond, spec.low.min(), spec.high.max()),
            )
            return True
    return False


def _check_leaf(who: str, name: str, action: Any, spec: spaces.Space, batch_size: int) -> None:
    asked = (batch_size, *(spec.shape or ()))
    dtype = specs.torch_dtype(spec)
    fitting = (dtype,) if dtype.is_floating_point else (dtype, torch.int64, torch.int32)
    if not _is_tensor(action) or tuple(action.shape) != asked or action.dtype not in fitting:
        raise UsageError(
            f"{who} returned {kind_of(action)} as {name}; {spec} asks for a tensor of shape {list(asked)} and dtype "
            f"{str(dtype).removeprefix('torch.')}"
        )
    if isinstance(spec, (spaces.Discrete, spaces.MultiDiscrete)):
        count = torch.as_tensor(spec.n if isinstance(spec, spaces.Discrete) else spec.nvec, device=action.device)
        outside = (action < 0) | (action >= count)
        if outside.any():
            value = action[outside][0].item()
            raise UsageError(f"{who} returned {value} as {name}, which is outside {spec}; choices count from 0")


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def kind_of(found: Any) -> str:
    """Returns a description of a value for messages."""
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {list(found.shape)} and dtype {str(found.dtype).removeprefix('torch.')}"
    return "None" if found is None else f"a {type(found).__name__}"
