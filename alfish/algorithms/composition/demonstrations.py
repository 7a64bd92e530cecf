"""Recorded episodes of an expert, for rewards that are learned by imitation."""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.composition.part import Transitions, transitions_of
from alfish.algorithms.imitation.external import External, is_opened_to_act
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline import OfflineBuffer, Spaces
from alfish.offline.recorded_spaces import check_fit
from alfish.parameters.parts import build


class Demonstrations(External):
    """All steps of recorded episodes, in buffers that compiled updates can sample and checkpoints leave out.

    The episodes are read when the algorithm is built; a policy that only acts does not read them.

    Args:
      make_buffer: class or factory of the recorded data, an `OfflineBuffer`.
      name: name of the setting of `make_buffer` in messages, for example `GAIL.demonstrations`.
      observation_spec, action_spec: specs of the algorithm's observations and actions.

    Attributes:
      lengths: lengths of the episodes, in steps.

    Raises:
      UsageError: the data cannot be read, or their spaces differ from the environment's.
    """

    def __init__(self, make_buffer: Callable[..., OfflineBuffer], name: str, observation_spec: Nest, action_spec: Nest):
        super().__init__()
        self.name, self._spaces = name, Spaces()
        self.lengths: tuple[int, ...] = ()
        if is_opened_to_act():
            return
        data = build(make_buffer, OfflineBuffer, name)
        assert data.spaces.observation is not None and data.spaces.action is not None
        self.name, self._spaces = data.report.name, data.spaces
        found = specs.observation_spec(data.spaces.observation), specs.action_spec(data.spaces.action)
        for kind, there, here in zip(("observations", "actions"), found, (observation_spec, action_spec)):
            if there != here:
                raise UsageError(
                    f"the {kind} of {self.name} are {specs.describe(there)}, but {name} compares them with {kind} that "
                    f"are {specs.describe(here)}; use data of this environment, and leave out transforms of "
                    "observations (composition.NormalizedObservation normalizes them for the algorithm)"
                )
        self.checksum = data.state_dict()["sha256"]
        self.lengths = tuple(episode.length for episode in data.episodes)
        leaves, self._structure = nest.flatten(recorded_steps(data))
        for k, leaf in enumerate(leaves):
            self.register_buffer(f"leaf_{k}", leaf, persistent=False)
        self._num_leaves = len(leaves)

    @property
    def steps(self) -> Transitions:
        """All steps, `[M, ...]`."""
        return nest.unflatten(self._structure, [getattr(self, f"leaf_{k}") for k in range(self._num_leaves)])

    def forward(self, shape: torch.Size) -> Transitions:
        """Returns steps `[*shape, ...]`, drawn uniformly with replacement."""
        steps = self.steps
        index = torch.randint(len(steps.next_discount), shape, device=steps.next_discount.device)
        return nest.at(steps, index)

    def start(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        """Checks the units of actions, which are in the spaces but not in the specs."""
        check_fit(self._spaces, Spaces(observation_space, action_space), self.name)


def recorded_steps(data: OfflineBuffer) -> Transitions:
    """Returns the steps of all episodes, `[M, ...]`."""
    found: list[Any] = []
    for episode in data.episodes:
        position = torch.arange(episode.position, episode.position + episode.length + 1).unsqueeze(1)
        rows = data.read(torch.tensor([episode.column]), position)
        found.append(nest.map(lambda leaf: leaf.squeeze(1), transitions_of(rows.time_step)))
    return nest.map(lambda *leaves: torch.cat(leaves), *found)
