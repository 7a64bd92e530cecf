"""Acts with an algorithm: applies transforms, keeps the policy's state, calls hooks, and sets the modules' mode."""

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn

from alfish import nest
from alfish.algorithms.contract import check_step
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler import torch_internals
from alfish.data import AlgStep, Experience, StepType, TimeStep
from alfish.nest import Nest
from alfish.transforms import Transforms


class StatefulInfo(NamedTuple):
    """Info of a row, and the policy's state before the row, not yet reset at FIRST; see `Unroller.stores_states`."""

    info: Nest
    state: Nest  # [B, ...], in unrolls [T, B, ...]


def without_states(experience: Experience) -> Experience:
    """Returns the experience with the info that `StatefulInfo` wraps; keeps an info of any other type."""
    info = experience.info
    return experience._replace(info=info.info) if isinstance(info, StatefulInfo) else experience


def reset_state(state: Nest, initial_state: Nest, step_type: torch.Tensor) -> Nest:
    """Returns the policy state to act from: `initial_state` where a row is FIRST, else `state`.

    Callers of `rollout_step` and `predict_step` reset the state before the call. Memories reset it within sequences.

    Args:
      state: nest of `[B, ...]`, or None.
      initial_state: initial state with the same structure; None means that there is no state, or that `state` is
        already reset.
      step_type: step types of the rows, `[B]` int32.
    """
    if initial_state is None:
        return state
    return nest.where(step_type == StepType.FIRST, initial_state, state)


class Actor:
    """Computes actions from rows: applies transforms, resets the policy's state at FIRST rows, and calls a hook.

    The hook is `rollout_step` or `predict_step` of the algorithm.

    Args:
      algorithm, transforms: modules that act; they are not changed.
      samples: whether to act with `rollout_step`, which samples, instead of `predict_step`.
      sets_mode: whether `step` puts the algorithm into evaluation mode for each call; if False, the caller must.
    """

    def __init__(self, algorithm: RLAlgorithm, transforms: Transforms, samples: bool = True, sets_mode: bool = False):
        self.algorithm = algorithm
        self.transforms = transforms
        self.samples = samples
        self._sets_mode = sets_mode

    @property
    def device(self) -> torch.device:
        return self.algorithm.progress.device

    @property
    def hook(self) -> str:
        return "rollout_step" if self.samples else "predict_step"

    def first_state(self, batch_size: int) -> tuple[Nest, Nest]:
        """Returns the transforms' state and the policy's state at the start of an episode, `[B, ...]` each."""
        parts = self.transforms, self.algorithm
        return nest.to(tuple(part.initial_state(batch_size) for part in parts), self.device)

    def see(
        self, time_step: TimeStep, transform_state: Nest, state: Nest, initial_state: Nest = None
    ) -> tuple[TimeStep, Nest, Nest]:
        """Returns the transformed rows, the transforms' next state, and the policy's state to act from, reset at FIRST.

        Args:
          time_step: `[B]` stored rows, see `Transforms.encode`; tensors on the algorithm's device.
          transform_state: state of the transforms before these rows, `[B, ...]`.
          state, initial_state: see `reset_state`.
        """
        seen, transform_state = self.transforms(time_step, transform_state)
        return seen, transform_state, reset_state(state, initial_state, seen.step_type)

    def step(self, seen: TimeStep, state: Nest) -> AlgStep:
        """Calls the hook with the rows and the policy's state that `see` returned; returns the hook's result."""
        act = self.algorithm.rollout_step if self.samples else self.algorithm.predict_step
        if not self._sets_mode:
            return act(seen, state)
        with in_eval_mode(self.algorithm, explores=self.samples):
            return act(seen, state)

    def act(
        self, time_step: TimeStep, transform_state: Nest, state: Nest, initial_state: Nest = None
    ) -> tuple[AlgStep, Nest]:
        """Calls `see` and `step`; returns the hook's result and the transforms' next state."""
        seen, transform_state, state = self.see(time_step, transform_state, state, initial_state)
        return self.step(seen, state), transform_state

    def check(self, step: AlgStep, initial_state: Nest, batch_size: int) -> None:
        """Raises UsageError if the hook's result for `batch_size` rows is wrong, see `check_step`."""
        check_step(step, self.algorithm, self.hook, self.algorithm.action_spec, batch_size, initial_state)


def tensors_of(*modules: nn.Module) -> tuple[dict[str, torch.Tensor], ...]:
    """Returns the parameters and buffers of each module by name."""
    return tuple(dict((*module.named_parameters(), *module.named_buffers())) for module in modules)


def changing_tensors(algorithm: RLAlgorithm, transforms: Transforms) -> list[torch.Tensor]:
    """Returns the parameters and buffers that training changes, without duplicates, in a fixed order.

    Tensors of encoders in the transforms never change, so workers receive them only at the start.
    """
    by_name = tensors_of(algorithm, *transforms.others)
    return list({id(tensor): tensor for own in by_name for tensor in own.values()}.values())


@contextlib.contextmanager
def with_tensors(tensors: tuple[dict[str, torch.Tensor], ...], *modules: nn.Module) -> Iterator[None]:
    """Makes modules use other tensors within the context; `tensors` has the form that `tensors_of` returns."""
    with contextlib.ExitStack() as stack:
        for module, own in zip(modules, tensors, strict=True):
            stack.enter_context(torch_internals.reparametrize_module(module, own, tie_weights=True))
        yield


@contextlib.contextmanager
def in_eval_mode(algorithm: RLAlgorithm, explores: bool = False) -> Iterator[None]:
    """Puts the algorithm into evaluation mode, and restores the mode of each of its modules on exit.

    Args:
      algorithm: algorithm to put into evaluation mode.
      explores: whether the modules in `explorers` keep their mode; True for `rollout_step`.
    """
    training = [module for module in algorithm.modules() if module.training]  # frozen parts are not in training mode
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
    """Returns the modules whose noise explores (`NoisyLinear`); they stay in training mode in rollouts."""
    return [module for module in algorithm.modules() if getattr(module, "explores", False)]


class ModeSwitch:
    """Switches an algorithm between acting and training, in less than the 0.1 ms that `nn.Module.train` takes.

    The modules in `explorers` stay in training mode.

    Args:
      algorithm: algorithm to switch.
      frozen: modules of the algorithm that stay in evaluation mode.
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
