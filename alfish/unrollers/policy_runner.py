"""Computes actions from rows that are not transformed yet, with a numpy program in place of torch if possible."""

from typing import Any

import numpy as np
import torch
from absl import logging

from alfish import nest
from alfish.algorithms.acting import Actor, tensors_of, with_tensors
from alfish.algorithms.contract import check_action
from alfish.compiler.inductor import is_checked
from alfish.compiler.numpy_program import NotTranslatable, NumpyProgram
from alfish.compiler.torch_internals import TorchChanged
from alfish.data import AlgStep, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest, as_array, as_tensor
from alfish.runs import random_state


class PolicyRunner:
    """Computes the policy's actions from rows that are not transformed yet, with one call for each vector step.

    Args:
      actor: actor that computes the actions.
      initial_state: state of the policy at an episode's start, `[B, ...]`.
      numpy_policy: number of calls after which acting uses numpy; None means never.

    Attributes:
      initial_state: the constructor's argument; a new state of the same shapes may be assigned.
      num_calls: number of calls so far.
      gave_up: whether acting uses torch permanently. `num_calls` and `gave_up` are saved with the run, so that a
        resumed run is bitwise the same.
    """

    def __init__(self, actor: Actor, initial_state: Nest, numpy_policy: int | None):
        self._actor = actor
        self._algorithm = actor.algorithm
        self.initial_state = initial_state
        self._device = actor.device
        self._numpy_policy = numpy_policy if self._device.type == "cpu" else None
        self._program: NumpyProgram | None = None
        self._has_looked = False  # whether the first result of the actor was checked
        self._has_looked_at_random = False  # whether the result of `random_action` was checked
        self.num_calls = 0
        self.gave_up = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_program": None, "_sources": [], "_arrays": []}  # a copy translates the policy again

    def __call__(self, time_step: TimeStep, transform_state: Nest, state: Nest) -> tuple[AlgStep, Nest]:
        """Returns actions for B rows and the transforms' next state, without gradient.

        Leaves are arrays or tensors. The result has arrays if acting uses numpy. A call acts with torch if the program
        reads a leaf of a tensor subclass, such as the placeholder of a missing leaf.
        """
        row = time_step, transform_state, state, self.initial_state
        if self._numpy_policy is not None and not self.gave_up and self.num_calls >= self._numpy_policy:
            if self._program is None:
                self._translate(row)
            # Some calls are compared, because tracing makes constants of Python values that may change between calls.
            elif is_checked(self.num_calls - self._numpy_policy):
                self._compare(row)
        self.num_calls += 1
        return self._act(*row) if self._program is None else self._run(row)

    @torch.no_grad()
    def random_action(self, time_step: TimeStep, transform_state: Nest) -> Nest:
        """Returns the algorithm's `random_action` for B rows, as tensors on the algorithm's device."""
        seen, _ = self._actor.transforms(*nest.tensors((time_step, transform_state), self._device))
        algorithm = self._algorithm
        action = algorithm.random_action(seen)
        if not self._has_looked_at_random:
            self._has_looked_at_random = True
            check_action(action, algorithm, "random_action", algorithm.action_spec, len(seen.step_type))
        return nest.to(action, self._device)

    @property
    def sources(self) -> list[torch.Tensor] | None:
        """Parameters and buffers that acting reads; None if it may read all, because it uses torch."""
        return None if self._program is None else self._sources

    @property
    def acts_in_torch(self) -> bool:
        """True if the next call acts with torch."""
        return self._numpy_policy is None or self.gave_up or self.num_calls < self._numpy_policy

    def refresh(self) -> None:
        """Reads parameters and buffers again. Call it after they have changed."""
        if self._program is None:
            return
        if [tensor.data_ptr() for tensor in self._sources] != self._addresses:
            self._share_memory()
        self._program.prepare(self._arrays)

    def _share_memory(self) -> None:
        """Makes arrays that share memory with parameters and buffers; called again after a learner moves them."""
        self._addresses = [tensor.data_ptr() for tensor in self._sources]
        self._arrays = [tensor.detach().numpy() for tensor in self._sources]

    def _run(self, row: tuple) -> tuple[AlgStep, Nest]:
        assert self._program is not None
        # Looks up the leaves one by one: most policies read one or two, and flattening a whole row takes longer than
        # some matrix products.
        leaves = []
        for path in self._used:
            leaf: Any = row
            for key in path:
                leaf = leaf[key]
            if type(leaf) is not np.ndarray:
                if type(leaf) is not torch.Tensor:
                    return self._act(*row)
                leaf = as_array(leaf)
            leaves.append(leaf)
        return self._program(leaves)

    @torch.no_grad()
    def _act(self, *row: Nest) -> tuple[AlgStep, Nest]:
        *row_and_states, initial_state = row
        given = *nest.tensors(tuple(row_and_states), self._device), initial_state
        return self._actor.act(*given) if self._has_looked else self._look(*given)

    def _look(self, *row: Any) -> tuple[AlgStep, Nest]:
        """Acts; checks the result of the actor, and that acting does not write to the arguments."""
        given = nest.leaves(row)
        before = [leaf._version for leaf in given]
        step, transform_state = self._actor.act(*row)
        if [leaf._version for leaf in given] != before:
            raise UsageError(
                f"a transform, or {self._actor.hook} of {type(self._algorithm).__name__}, writes to the time step or "
                "the state in its arguments, which changes stored rows; change a copy"
            )
        self._actor.check(step, self.initial_state, len(row[0].step_type))
        self._has_looked = True
        return step, transform_state

    def _translate(self, row: tuple) -> None:
        if not self._has_looked:
            with random_state.preserved():
                self._act(*row)
        modules = (self._algorithm, self._actor.transforms)
        tensors = tensors_of(*modules)

        def act(arguments: Nest) -> Nest:
            given, *row = arguments
            with with_tensors(given, *modules):
                return self._actor.act(*row)

        try:
            fixed = nest.leaves(tensors)
            example = nest.detach(tensors), *nest.map(_plain, row)
            self._program = NumpyProgram(act, example, len(fixed))
        except NotTranslatable as reason:
            logging.debug("%s acts with torch: %s", type(self._algorithm).__name__, reason)
            self.gave_up = True
            return
        except TorchChanged as reason:
            logging.warning("%s acts with torch, which is slower: %s", type(self._algorithm).__name__, reason)
            self.gave_up = True
            return
        used = self._program.used
        self._sources = [fixed[index] for index in used if index < len(fixed)]
        self._share_memory()  # the program then reads parameters that are later updated in place
        keys = nest.keys(row)
        self._used = [keys[index - len(fixed)] for index in used if index >= len(fixed)]
        self.refresh()
        self._compare(row)

    def _compare(self, row: tuple) -> None:
        """Compares the results of the numpy program and the policy; if they are not close, later calls use torch."""
        with random_state.preserved():
            expected = nest.leaves(self._act(*row))
        with random_state.preserved():
            found = [as_tensor(leaf) for leaf in nest.leaves(self._run(row))]
        if not all(type(leaf) is torch.Tensor for leaf in expected):
            return  # results that depend on a missing leaf cannot be compared
        if len(expected) != len(found) or not all(
            a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
            for a, b in zip(expected, found)
        ):
            logging.warning(
                "%s acts differently in numpy, because its %s depends on a value that changes between steps; make the "
                "value a buffer. From now on it acts with torch",
                type(self._algorithm).__name__,
                self._actor.hook,
            )
            self._program, self.gave_up = None, True


def _plain(leaf: Any) -> torch.Tensor:
    """Returns a leaf as a tensor; for a tensor subclass, zeros of the same shape and dtype."""
    tensor = as_tensor(leaf)
    return tensor if type(tensor) is torch.Tensor else torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
