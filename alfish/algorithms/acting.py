"""Calls of the hooks that act: in evaluation mode, from a state that is reset where an episode begins."""

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, StepType
from alfish.nest import Nest


class StatefulInfo(NamedTuple):
    """Info of a row, and the state before it, not yet reset where the row is FIRST; see `Unroller.stores_states`."""

    info: Nest
    state: Nest  # [B, ...], in unrolls [T, B, ...]


def without_states(experience: Experience) -> Experience:
    """Returns the experience with plain infos in place of `StatefulInfo`; others are returned as they are."""
    info = experience.info
    return experience._replace(info=info.info) if isinstance(info, StatefulInfo) else experience


def reset_state(state: Nest, initial_state: Nest, step_type: torch.Tensor) -> Nest:
    """Returns the policy state to act from: `initial_state` where a row is FIRST, else `state`.

    Callers of `rollout_step` and `predict_step` reset the state first. Memories reset it inside a sequence of rows.

    Args:
      state: nest of `[B, ...]`, or None.
      initial_state: the same nest.
      step_type: `[B]` int32.
    """
    if state is None:
        return None
    return nest.where(step_type == StepType.FIRST, initial_state, state)


@contextlib.contextmanager
def in_eval_mode(algorithm: RLAlgorithm, explores: bool = False) -> Iterator[None]:
    """Puts the algorithm into evaluation mode, and restores the mode of each of its modules on exit.

    Args:
      algorithm: with the modules.
      explores: whether modules that explore stay as they are, see `explorers`; for `rollout_step`.
    """
    training = [module for module in algorithm.modules() if module.training]  # frozen parts are not
    kept = explorers(algorithm) if explores else []
    algorithm.eval()
    for module in kept:
        module.training = module in training
    try:
        yield
    finally:
        for module in training:
            module.training = True


def explorers(algorithm: nn.Module) -> list[nn.Module]:
    """Returns the modules whose noise explores: they are in training mode in rollouts too (`NoisyLinear`)."""
    return [module for module in algorithm.modules() if getattr(module, "explores", False)]


class ModeSwitch:
    """Switches an algorithm between acting and training, in less than the 0.1 ms that `nn.Module.train` takes.

    Modules that explore stay in training mode, see `explorers`.

    Args:
      algorithm: to switch.
      frozen: modules of it that stay in evaluation mode.
    """

    def __init__(self, algorithm: nn.Module, frozen: Collection[nn.Module] = ()):
        self._algorithm = algorithm
        modules = list(algorithm.modules())
        self._is_plain = all(type(module).train is nn.Module.train for module in modules)
        self._frozen = [module.__dict__ for module in frozen]
        self._explorers = [module.__dict__ for module in explorers(algorithm) if module not in frozen]
        self._attributes = [module.__dict__ for module in modules if module not in frozen]

    def switch(self, training: bool) -> None:
        if not self._is_plain:
            self._algorithm.train(training)
        else:
            for attributes in self._attributes:
                attributes["training"] = training
        for attributes in self._explorers:
            attributes["training"] = True
        for attributes in self._frozen:
            attributes["training"] = False
