"""Parts of an algorithm that do not train, or that train with a separate learning rate."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.errors import UsageError
from alfish.networks.target import TargetNetwork
from alfish.runs.loading import names_below


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
        for target in algorithm.modules():
            if isinstance(target, TargetNetwork):  # copies in target networks must compute as the frozen modules do
                copies = dict(target.network.named_modules())
                names = [name for name, module in target.online[0].named_modules() if module in frozen]
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


def split(
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
      UsageError: the algorithm has no such part, or no parameter of the part trains.
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
    result: dict[str, dict[str, list[nn.Parameter]]] = {}
    for group, parameters in groups.items():
        names = [group, *(f"{group}/{part}" for part in parts)]
        of_part: dict[str, list[nn.Parameter]] = {name: [] for name in names}
        for parameter in parameters:
            own = part_of.get(id(parameter))
            of_part[group if own is None else f"{group}/{own}"].append(parameter)
        result[group] = {name: members for name, members in of_part.items() if members}
    return result
