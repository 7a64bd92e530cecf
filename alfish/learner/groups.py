"""Parameter groups: the parameters that each loss trains, side by side in flat vectors.

A part of a group may have a separate learning rate. Frozen parts of the algorithm do not train.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from alfish.algorithms.contract import kind_of, return_error
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.errors import UsageError
from alfish.networks import target
from alfish.networks.layers import Projected
from alfish.networks.target import TargetNetwork
from alfish.runs.loading import names_below


class ParameterGroup:
    """Parameters that one loss trains, stored as views of flat vectors. Each part and dtype has one vector.

    Args:
      name: name of the group and its loss.
      parameters: parameters of each part, see `split_into_parts`.

    Attributes:
      parameters: parameters of all parts, in the order of the vectors.
      flat: flat vectors, one for each part and dtype.
      parts: name of each part, and the slice of `flat` that holds the part's vectors.
    """

    def __init__(self, name: str, parameters: Mapping[str, list[nn.Parameter]]):
        self._name = name
        self._members: list[list[nn.Parameter]] = []
        self.parts: list[tuple[str, slice]] = []
        for part, own in parameters.items():
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in own:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
            self.parts.append((part, slice(len(self._members), len(self._members) + len(by_dtype))))
            self._members += by_dtype.values()
        self.parameters = [parameter for same in self._members for parameter in same]
        self.flat = [target.lay_side_by_side(same) for same in self._members]
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

    def check(self, names: Mapping[int, str]) -> None:
        """Checks that updates reach all parameters of the group.

        Args:
          names: name of each parameter by its `id`.

        Raises:
          UsageError: code has frozen a parameter, or has given it other memory.
        """
        for parameter, address in zip(self.parameters, self._addresses):
            name = names.get(id(parameter), "a parameter")
            if not parameter.requires_grad:
                raise UsageError(
                    f"{name} was frozen by requires_grad_(False) during training, which compiled updates ignore; name "
                    "frozen parts in Learner.frozen_parts, or let a schedule in Learner.learning_rate reach 0"
                )
            if parameter.data_ptr() != address:
                raise UsageError(
                    f"{name} was given other memory during training (an assignment to .data, or vector_to_parameters), "
                    "so updates no longer reach it; write in place, as in `with torch.no_grad(): p.copy_(values)`"
                )

    def views(self, vectors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of `vectors`, laid out like `self.flat`, with the shapes of `self.parameters`."""
        return [view for vector, same in zip(vectors, self._members) for view in target.views(vector, same)]

    def gradients(self, loss: torch.Tensor, parameters: list[Any], retain_graph: bool) -> list[torch.Tensor]:
        """Returns the gradients of the loss, laid out like `self.flat`; 0 for parameters that the loss does not use.

        Raises:
          UsageError: the loss does not depend on any of the parameters, or its graph was already freed.
        """
        try:
            gradients = torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)
        except RuntimeError as error:
            if "a second time" not in str(error):
                raise
            raise UsageError(
                f"gradients of the loss {self._name!r} were already computed, which has freed its graph; leave "
                "backward() and torch.autograd.grad() out of calc_loss and the hooks before it, because the learner "
                "computes gradients"
            ) from error
        if parameters and all(gradient is None for gradient in gradients):
            raise UsageError(
                f"the loss {self._name!r} depends on parameters of other groups only; either a tensor is detached, or "
                "parameter_groups returns parameters that the networks no longer have"
            )
        remaining = iter(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients))
        return [torch.cat([next(remaining).reshape(-1) for _ in same]) for same in self._members]


def claimed_parameters(algorithm: RLAlgorithm) -> dict[str, list[nn.Parameter]]:
    """Returns each group's trainable parameters; raises UsageError if a parameter is in no group or in two groups."""
    names = {id(parameter): name for name, parameter in algorithm.named_parameters()}
    groups: dict[str, list[nn.Parameter]] = {}
    owner: dict[int, str] = {}
    claims = algorithm.parameter_groups()
    if not isinstance(claims, Mapping) or not all(isinstance(each, Iterable) for each in claims.values()):
        words = "a dict from a group's name to its parameters, such as {'all': self.parameters()}"
        raise return_error(claims, words, algorithm, "parameter_groups")
    for group, parameters in claims.items():
        members = list(parameters)
        for each in members:
            if not isinstance(each, nn.Parameter):
                raise UsageError(
                    f"parameter_groups of {type(algorithm).__name__} has {kind_of(each)} in the group {group!r}; each "
                    "entry must be a parameter, as in {'all': self.parameters()}"
                )
        groups[group] = [parameter for parameter in members if parameter.requires_grad]
        for parameter in groups[group]:
            if id(parameter) not in names:
                raise UsageError(
                    f"the group {group!r} has a parameter that is not registered with {type(algorithm).__name__}, so "
                    "it would not be saved; make it an attribute, or keep it in an nn.ParameterList"
                )
            if id(parameter) in owner:
                raise UsageError(
                    f"parameter {names[id(parameter)]} is in the groups {owner[id(parameter)]!r} and {group!r}; it may "
                    "be in only one group"
                )
            owner[id(parameter)] = group
    unclaimed = [name for name, p in algorithm.named_parameters() if p.requires_grad and id(p) not in owner]
    if unclaimed:
        raise UsageError(
            f"no parameter group of {type(algorithm).__name__} claims {', '.join(unclaimed[:3])}; add it to "
            "parameter_groups, or set requires_grad to False"
        )
    return {group: parameters for group, parameters in groups.items() if parameters}


def split_into_parts(
    algorithm: RLAlgorithm, groups: Mapping[str, list[nn.Parameter]], parts: Collection[str]
) -> dict[str, dict[str, list[nn.Parameter]]]:
    """Returns the parameters of each group, divided into parts.

    In the dict of a group, parts have the keys `group/part`. Parameters outside all parts have the group's name as key.

    A parameter in several parts belongs to the part with the longest name.

    Args:
      algorithm: algorithm with the parameters.
      groups: parameter groups of the algorithm.
      parts: prefixes of the names of parameters.

    Raises:
      UsageError: the algorithm has no such part, no parameter of the part trains, or other parts have all of its
        parameters.
    """
    named = dict(algorithm.named_parameters())
    owner = f"Learner.learning_rate: {type(algorithm).__name__} has the groups {list(groups)}, and"
    part_of: dict[int, str] = {}
    for part in sorted(parts, key=len):
        members = [named[name] for name in names_below(part, named, owner).values()]
        part_of |= {id(parameter): part for parameter in members}
        if not any(parameter.requires_grad for parameter in members):
            raise UsageError(
                f"Learner.learning_rate has the part {part!r}, which is frozen; remove it from Learner.learning_rate "
                "or from Learner.frozen_parts"
            )
    if unread := set(parts) - set(part_of.values()):
        raise UsageError(
            f"Learner.learning_rate has the part {min(unread)!r}, but all of its parameters belong to parts with "
            "longer names; remove it"
        )
    result: dict[str, dict[str, list[nn.Parameter]]] = {}
    for group, parameters in groups.items():
        names = [group, *(f"{group}/{part}" for part in parts)]
        of_part: dict[str, list[nn.Parameter]] = {name: [] for name in names}
        for parameter in parameters:
            own = part_of.get(id(parameter))
            of_part[group if own is None else f"{group}/{own}"].append(parameter)
        result[group] = {name: members for name, members in of_part.items() if members}
    return result


def unit_rows_of(algorithm: nn.Module, groups: Mapping[str, ParameterGroup]) -> dict[str, list[Projected]]:
    """Returns, for each group, the layers whose weights are projected to a fixed norm after the group's updates."""
    group_of = {id(parameter): name for name, group in groups.items() for parameter in group.parameters}
    found: dict[str, list[Projected]] = {}
    for layer in algorithm.modules():
        if isinstance(layer, Projected) and id(layer.weight) in group_of:
            found.setdefault(group_of[id(layer.weight)], []).append(layer)
    return found


class FrozenParts:
    """Parts of an algorithm whose parameters do not train; their modules stay in evaluation mode.

    Modules with a method `freeze` (`BatchNorm`, `NoisyLinear`) need more than evaluation mode, so `freeze` is called,
    too.

    Args:
      algorithm: algorithm with the parts.
      parts: prefixes of the names of the algorithm's parameters.

    Attributes:
      names: the prefixes, sorted.
      modules: modules of the parts, and copies of these modules in target networks.

    Raises:
      UsageError: the algorithm has no such part; the message names similar parts.
    """

    def __init__(self, algorithm: RLAlgorithm, parts: Sequence[str]):
        parts = [parts] if isinstance(parts, str) else parts
        self._algorithm, self.names = algorithm, sorted(parts)
        parameters, owner = dict(algorithm.named_parameters()), f"Learner.frozen_parts: {type(algorithm).__name__}"
        names = [name for part in parts for name in names_below(part, parameters, owner).values()]
        self._parameters = {id(parameters[name]) for name in names}
        for name in names:
            parameters[name].requires_grad_(False)
        heads = tuple(f"{part}." if part else "" for part in parts)
        self.modules = [module for name, module in algorithm.named_modules() if f"{name}.".startswith(heads)]
        frozen = set(self.modules)
        for copied in algorithm.modules():
            if isinstance(copied, TargetNetwork):  # copies in target networks must compute as the frozen modules do
                copies = dict(copied.network.named_modules())
                names = [name for name, module in copied.online[0].named_modules() if module in frozen]
                self.modules += [copies[name] for name in names if name in copies]
        for module in self.modules:
            module.eval()
            if callable(freeze := getattr(module, "freeze", None)):
                freeze()

    def check(self, groups: Collection[str]) -> None:
        """Raises UsageError if a whole group of the algorithm is frozen, because it would not train."""
        for name, parameters in self._algorithm.parameter_groups().items():
            if name not in groups and any(id(parameter) in self._parameters for parameter in parameters):
                raise UsageError(
                    f"Learner.frozen_parts leaves nothing to train in the group {name!r} of "
                    f"{type(self._algorithm).__name__}, which has a loss; freeze fewer parts"
                )
