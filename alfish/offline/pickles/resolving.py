"""Creation of the objects that a pickle's stand-ins represent, after the whole file was read."""

from typing import Any

import numpy as np

from alfish.offline.pickles.faults import KEYS, CopyBudget, PickleError
from alfish.offline.pickles.stand_ins import ArrayStandIn, DType, Inert

MAX_DEPTH = 200  # maximum depth of nested lists, tuples, dicts and objects


class Resolver:
    """Replaces each stand-in with its object. An object to which the file refers several times is made only once."""

    def __init__(self, copies: CopyBudget) -> None:
        self._copies = copies
        self._made: dict[int, Any] = {}
        self._seen: list[Any] = []  # kept alive, so that no other object gets an id that is in `_made`
        self._depth = 0

    def resolved(self, value: Any) -> Any:
        """Returns the value without stand-ins.

        Raises:
          PickleError: a part is incomplete, a tuple holds itself, or parts are nested too deep.
        """
        if isinstance(value, KEYS):
            return value
        if id(value) in self._made:
            made = self._made[id(value)]
            if made is self:
                raise PickleError("a tuple contains itself")
            return made
        if self._depth == MAX_DEPTH:
            raise PickleError(f"its parts are nested more than {MAX_DEPTH} deep")
        self._seen.append(value)
        self._made[id(value)] = self if isinstance(value, (tuple, ArrayStandIn)) else value
        self._depth += 1
        made = self._made[id(value)] = self._replaced(value)
        self._depth -= 1
        return made

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.resolved, value))
        if isinstance(value, list):
            value[:] = map(self.resolved, value)
        elif isinstance(value, dict):
            for key, child in value.items():
                value[key] = self.resolved(child)
        elif isinstance(value, Inert):
            self.resolved(value.attributes)
        elif isinstance(value, ArrayStandIn):
            if value.objects is not None:
                self._copies.spend(value.objects)
            made = value.made()
            if isinstance(made, np.ndarray) and made.dtype.hasobject:
                for i, child in enumerate(made.flat):
                    made.flat[i] = self.resolved(child)
            return made
        elif isinstance(value, DType):
            return value.made()
        return value
