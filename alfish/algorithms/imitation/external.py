"""Modules whose content comes from outside the run: a checkpoint stores a checksum instead of the content."""

import abc
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from alfish.errors import UsageError, printable

_OPENED_TO_ACT: ContextVar[bool] = ContextVar("opened_to_act", default=False)


class External(nn.Module, abc.ABC):
    """A part of an algorithm whose content is read from another run or from recorded data.

    Attributes:
      name: name of the source, for messages.
      checksum: checksum of the content, known after `start`; None means that there is no content to check.
      reward_spec: spec of the environment's rewards, if the content reads rewards; None means that it reads none.
    """

    name: str
    checksum: str | None = None
    reward_spec: spaces.Box | None = None

    @abc.abstractmethod
    def start(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        """Reads the content before the run's state is loaded, and checks that it fits the environment.

        Args:
          observation_space, action_space: spaces of one training environment.

        Raises:
          UsageError: the content belongs to another environment, or cannot be read.
        """

    def check_rewards(self, reward_spec: spaces.Box | None, cause: str) -> None:
        """Raises UsageError if the content reads rewards, and would receive rewards of another kind.

        Args:
          reward_spec: spec of the environment's rewards; None means that the run changes rewards.
          cause: setting that changes rewards, for the message.
        """
        if self.reward_spec is None or self.reward_spec == reward_spec:
            return
        if reward_spec is None:
            why = f"{cause} changes the rewards of this run; leave this change out"
        else:
            there, here = printable(str(self.reward_spec)), printable(str(reward_spec))
            why = f"rewards are {there} in its run and {here} in this run; train it in this environment"
        raise UsageError(
            f"{self.name} reads the previous reward (PreviousStep), but {why}, or train the expert with "
            "PreviousStep.reward = False"
        )

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the checksum only, not the state of submodules."""
        found = super().state_dict(*arguments, **keywords)
        prefix = keywords.get("prefix", "")
        for key in [key for key in found if key.startswith(prefix) and key != f"{prefix}_extra_state"]:
            del found[key]
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        state_dict.update(super().state_dict(prefix=prefix))  # entries that torch expects when it loads the submodules

    def get_extra_state(self) -> dict[str, Any]:
        return {"sha256": self.checksum}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Checks that the content is unchanged since `state` was saved.

        Raises:
          UsageError: the content has changed since the run was saved.
        """
        found, saved = self.checksum, state["sha256"]
        if found is not None and saved is not None and found != saved:
            raise UsageError(
                f"{self.name} has changed since this run was saved: its checksum is {found[:8]}, but was {saved[:8]}; "
                "restore the content, or start a new run in another directory"
            )


def checksum_of(tensors: Iterable[torch.Tensor]) -> str:
    """Returns the SHA-256 sum over dtypes, shapes and bits of tensors, in the given order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_opened_to_act() -> bool:
    """Returns whether the policy is being built only to act, without external content."""
    return _OPENED_TO_ACT.get()


@contextlib.contextmanager
def opened_to_act(is_opened: bool = True) -> Iterator[None]:
    """Makes `is_opened_to_act` return `is_opened` within the context."""
    token = _OPENED_TO_ACT.set(is_opened)
    try:
        yield
    finally:
        _OPENED_TO_ACT.reset(token)
