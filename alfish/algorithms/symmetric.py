"""PPO for bodies with left-right symmetry: mirrored rows as additional data, and a loss on asymmetric policies.

A mirror M exchanges the left side and the right side of observations and actions, so M M = 1 (the identity).

    L = (L_PPO(s, a) + L_PPO(M s, M a)) / 2                    data augmentation
    L = L + mirror_loss_coef mean (mu(M s) - sg[M mu(s)])^2    mirror loss; mu: mean of the normal policy

A mirrored row has the advantage, the value target and the old log-probability of the original row. `target_kl` and
KL-adaptive learning rates use the original rows only.

Mittal et al., 2024, https://arxiv.org/abs/2403.04359; Yu et al., 2018, https://arxiv.org/abs/1801.08093 (mirror loss).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.ppo import PPO
from alfish.data import AlgStep, Experience, LossInfo
from alfish.errors import UsageError
from alfish.functional.distributions import Joint, is_distribution
from alfish.nest import Nest
from alfish.networks import PolicyValue
from alfish.parameters import NonNegativeFloat, NonNegativeInt, Range, checked
from alfish.runs import random_state


@gin.configurable(module="alfish.algorithms")
@checked
class Mirror(nn.Module):
    """Mirrors a vector: entry i of the result is `signs[i]` times entry `indices[i]`.

    Args:
      indices: for each entry, index of its opposite entry; an entry without an opposite has its own index. None means
        that no entry has an opposite.
      signs: sign of each entry: -1 where the quantity changes its sign (a lateral speed, a roll), else 1; None means
        all 1.

    Raises:
      UsageError: mirroring twice is not the identity, or there is no entry.
    """

    _indices: torch.Tensor
    _signs: torch.Tensor

    def __init__(
        self,
        indices: Sequence[NonNegativeInt] | None = None,
        signs: Sequence[Annotated[int, Range(-1, 1)]] | None = None,
    ):
        super().__init__()
        given = signs if indices is None else indices
        if not given:
            raise UsageError("Mirror has neither indices nor signs; set one of them, or both")
        indices = list(range(len(given)) if indices is None else indices)
        signs = [1] * len(given) if signs is None else list(signs)
        if sorted(indices) != list(range(len(indices))) or len(signs) != len(indices) or {*signs} - {1, -1}:
            raise UsageError(
                f"Mirror takes each index from 0 to {len(indices) - 1} once, and a sign of 1 or -1 for each; got "
                f"indices {indices} and signs {signs}"
            )
        for entry, other in enumerate(indices):
            if indices[other] != entry or signs[other] != signs[entry]:
                raise UsageError(
                    f"Mirror.indices has {other} for entry {entry}, so it must have {entry} for entry {other}, with "
                    "the same sign in Mirror.signs, because mirroring twice must change nothing"
                )
        self.register_buffer("_indices", torch.tensor(indices), persistent=False)
        self.register_buffer("_signs", torch.tensor(signs), persistent=False)

    def forward(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns the image of vectors `[..., n]`."""
        if leaf.shape[-1] != len(self._indices):
            raise UsageError(
                f"a Mirror for vectors of {len(self._indices)} entries got a vector of {leaf.shape[-1]}; set "
                "Mirror.indices or Mirror.signs to a list with an item for each entry"
            )
        return leaf.index_select(-1, self._indices) * self._signs.to(leaf.dtype)


class SymmetricTrain(NamedTuple):
    own: Nest  # info of the rows, from PPO's train_step
    mirrored: Experience  # the mirrored rows
    image: Nest  # info of the mirrored rows


@gin.configurable(module="alfish.algorithms")
@checked
class SymmetricPPO(PPO):
    """PPO on rows and their mirror images; see the module's docstring for the losses.

    A mirror is a function of tensors `[..., *shape]`, such as `@left_right/Mirror()`. For a Dict or Tuple space, it is
    a dict of such functions by the path of a leaf, or a function of the whole nest; leaves that the dict does not name
    do not change.

    Args:
      mirror_observation: mirror of the observations that the networks see, after transforms.
      mirror_action: mirror of the actions, in the algorithm's units: bounds are -1 and 1.
      augments: whether the policy and the value also train on mirrored rows.
      mirror_loss_coef: weight of the mirror loss, which is for Box actions; 0 means no mirror loss.
      ppo_arguments: settings of `PPO`.

    Raises:
      UsageError: mirroring an observation or an action twice is not the identity, or the policy has a memory.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        mirror_observation: Callable[..., Any] | Mapping[str, Callable[..., Any]] = gin.REQUIRED,
        mirror_action: Callable[..., Any] | Mapping[str, Callable[..., Any]] = gin.REQUIRED,
        augments: bool = True,
        mirror_loss_coef: NonNegativeFloat = 0.0,
        **ppo_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        name = type(self).__name__
        if self.has_state:
            raise UsageError(f"{name} mirrors single rows, and the policy has a memory; leave the memory out")
        if not augments and mirror_loss_coef == 0:
            raise UsageError(
                f"{name} with augments = False and mirror_loss_coef = 0 is the same as PPO; set augments = True, or "
                "mirror_loss_coef above 0"
            )
        if mirror_loss_coef and not all(isinstance(leaf, spaces.Box) for leaf in nest.leaves(action_spec)):
            raise UsageError(f"{name}.mirror_loss_coef is for Box actions, not {action_spec}; set it to 0")
        self._mirror_observation = _mirror_of(f"{name}.mirror_observation", mirror_observation, observation_spec)
        self._mirror_action = _mirror_of(f"{name}.mirror_action", mirror_action, action_spec)
        self._augments, self._mirror_loss_coef = augments, mirror_loss_coef

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        time_step = experience.time_step
        mirrored = experience._replace(
            time_step=time_step._replace(observation=self._mirror_observation(time_step.observation)),
            action=self._mirror_action(experience.action),
        )
        own, image = (super(SymmetricPPO, self).train_step(rows, state).info for rows in (experience, mirrored))
        return AlgStep(info=SymmetricTrain(own, mirrored, image))

    def calc_loss(self, experience: Experience, info: Any) -> LossInfo:
        result = super().calc_loss(experience, info.own)
        loss: Any = result.loss
        if self._augments:
            image = super().calc_loss(info.mirrored, info.image).loss
            loss = nest.map(lambda one, other: 0.5 * (one + other), loss, image)
        extra = dict(result.extra or {})
        if self._mirror_loss_coef:
            mirror_loss = extra["mirror_loss"] = self.mirror_loss(info.own, info.image)
            loss = nest.map(lambda one: one + self._mirror_loss_coef * mirror_loss, loss)
        return result._replace(loss=loss, extra=extra)

    def mirror_loss(self, own: PolicyValue, image: PolicyValue) -> torch.Tensor:
        """Returns the squared distance `[...]` between the mean at mirrored rows and the mirrored mean.

        Args:
          own, image: policies at the rows and at the mirrored rows; the mirrored mean has no gradient.
        """
        target = self._mirror_action(_means(own.policy))
        errors = nest.map(lambda mean, to: (mean - to.detach()).square(), _means(image.policy), target)
        return torch.cat(nest.leaves(errors), -1).mean(-1)


class _Mirrors(nn.Module):
    """Mirrors the leaves of a nest, each by its own mirror; None means no change."""

    def __init__(self, mirrors: Sequence[Callable[..., Any] | None]):
        super().__init__()
        self._mirrors = mirrors
        self._parts = nn.ModuleList([mirror for mirror in mirrors if isinstance(mirror, nn.Module)])

    def forward(self, value: Nest) -> Nest:
        leaves = zip(self._mirrors, nest.leaves(value), strict=True)
        return nest.like(value, [leaf if mirror is None else mirror(leaf) for mirror, leaf in leaves])


def _means(policy: Any) -> Nest:
    """Returns the means of distributions of Box actions, with gradients."""
    parts = policy.parts if isinstance(policy, Joint) else policy
    return nest.map(lambda part: part.mean, parts, is_leaf=is_distribution)


def _mirror_of(
    name: str, mirror: Callable[..., Any] | Mapping[str, Callable[..., Any]], spec: Nest
) -> Callable[[Nest], Nest]:
    """Returns the mirror of a nest.

    Raises:
      UsageError: a path in `mirror` is not in the spec, there are several leaves and one `Mirror`, mirroring a random
        nest twice is not the identity, or an image is not a choice of its Discrete or MultiDiscrete space.
    """
    paths = nest.paths(spec)
    given = list(mirror.values()) if isinstance(mirror, Mapping) else [mirror]
    if any(inspect.isclass(one) for one in given):
        raise UsageError(f"{name} has a class, but it must be an object, such as @left_right/Mirror() with parentheses")
    if isinstance(mirror, Mapping):
        if unknown := sorted(set(mirror) - set(paths)):
            raise UsageError(f"{name} names {unknown[0]!r}; {specs.leaves_in_words('the space', spec)}")
        mirrored: Callable[[Nest], Nest] = _Mirrors([mirror.get(path) for path in paths])
    elif isinstance(mirror, Mirror) and not isinstance(spec, spaces.Space):
        raise UsageError(
            f"{name} is one Mirror, but it must be a dict of mirrors by the path of a leaf; the leaves are "
            f"{sorted(paths)}"
        )
    else:
        mirrored = mirror
    with random_state.preserved():
        sample = specs.sample(spec, 4)
    try:
        mirrored(nest.at(sample, slice(1)))  # raises if the mirror takes the rows for the entries of a vector
        image = mirrored(sample)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    same = nest.paths(image) == paths and all(
        one.shape == other.shape and one.dtype == other.dtype
        for one, other in zip(nest.leaves(image), nest.leaves(sample))
    )
    if not same or not all(map(torch.equal, nest.leaves(mirrored(image)), nest.leaves(sample))):
        raise UsageError(
            f"{name} does not mirror: applied twice, it must return the same values, with the same shapes and dtypes"
        )
    for leaf, space in zip(nest.leaves(image), nest.leaves(spec)):
        # Bounds of a Box may be wide on one side only, which does no harm.
        if not isinstance(space, spaces.Box) and not all(each.numpy() in space for each in leaf):
            raise UsageError(f"{name} does not mirror: it leads out of {space}")
    return mirrored
