"""Policies over actions in two parts, and temperatures, which weigh the entropies of the parts against rewards.

The parts are a vector of all Box leaves, and at most one Discrete leaf. The Box part is squashed into (-1, 1), and is
an input of critics. Critics have one output for each choice of the Discrete part, so that expectations over the choices
are exact.
"""

import math
from typing import Any, Literal, NamedTuple, TypedDict

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.errors import UsageError
from alfish.functional.distributions import Categorical, SquashedNormal, sum_of
from alfish.functional.values import Scalar
from alfish.nest import Nest
from alfish.networks.layers import linear, orthogonal
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval, checked


class HybridAction(NamedTuple):
    """An action in its two parts; None where the space has no such leaf."""

    box: torch.Tensor | None  # [..., A] entries of all Box leaves
    discrete: torch.Tensor | None  # [...] int64

    def select(self, q: torch.Tensor) -> torch.Tensor:
        """Returns q of the chosen action, `[..., T, N]` from `[..., T, N, n]`; q itself without a Discrete leaf."""
        if self.discrete is None:
            return q
        return q.gather(-1, self.discrete.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)


class HybridSpace:
    """An action nest of Box leaves and at most one Discrete leaf; `specs.check_hybrid_action` refuses other nests.

    Args:
      action_spec: canonical spec of the actions, see `alfish.specs`.
    """

    def __init__(self, action_spec: Nest):
        leaves = nest.leaves(action_spec)
        self._action_spec = action_spec
        self._box_sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, spaces.Box)]
        self.box_size = sum(self._box_sizes)  # number of entries of all Box leaves
        self.num_choices = next((int(leaf.n) for leaf in leaves if isinstance(leaf, spaces.Discrete)), 0)
        self.critic_sizes = self.box_size, max(1, self.num_choices)  # numbers of a critic's action inputs and outputs

    def target_entropies(self, box: float | None, discrete_fraction: float) -> dict[str, float]:
        """Returns the target entropy of each part that exists, in nats.

        Args:
          box: target entropy of the Box part in nats; None means minus the number of Box entries.
          discrete_fraction: target entropy of the Discrete part, as a fraction in [0, 1] of the maximum, log n.
        """
        found: dict[str, float] = {}
        if self.box_size:
            found["box"] = -self.box_size if box is None else box
        if self.num_choices:
            found["discrete"] = discrete_fraction * math.log(self.num_choices)
        return found

    def join(self, action: HybridAction) -> Nest:
        """Returns the action nest of an action in two parts."""
        boxes = iter(() if action.box is None else action.box.split(self._box_sizes, -1))
        return nest.map(
            lambda leaf: next(boxes) if isinstance(leaf, spaces.Box) else action.discrete, self._action_spec
        )

    def split(self, action: Nest) -> HybridAction:
        """Returns the parts of an action nest: the inverse of `join`."""
        leaves = list(zip(nest.leaves(action), nest.leaves(self._action_spec)))
        boxes = [leaf for leaf, spec in leaves if isinstance(spec, spaces.Box)]
        discrete = [leaf for leaf, spec in leaves if isinstance(spec, spaces.Discrete)]
        return HybridAction(torch.cat(boxes, -1) if boxes else None, discrete[0] if discrete else None)


class Choice(NamedTuple):
    """A sample of the Box part, and the distribution of the Discrete part; None if the space has no such leaf."""

    box: torch.Tensor | None  # [..., A] in (-1, 1)
    log_density: torch.Tensor | None  # [...] log-probability of `box`
    discrete: Categorical | None

    def expectation(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the expectation of q over the choices, `[...]` from `[..., n]`; q itself without a Discrete leaf."""
        return q if self.discrete is None else (self.discrete.log_p.exp() * q).sum(-1)

    def entropies(self) -> dict[str, torch.Tensor]:
        """Returns the entropy of each part, `[...]` in nats: estimated from the sample for Box, exact for Discrete."""
        found = {} if self.log_density is None else {"box": -self.log_density}
        return found if self.discrete is None else found | {"discrete": self.discrete.entropy()}


class HybridPolicy(NamedTuple):
    """The distributions of the Box part and the Discrete part; None where the space has no such leaf."""

    box: SquashedNormal | None
    discrete: Categorical | None

    def sample(self) -> HybridAction:
        return HybridAction(self.box and self.box.sample(), self.discrete and self.discrete.sample())

    def mode(self) -> HybridAction:
        return HybridAction(self.box and self.box.mode(), self.discrete and self.discrete.mode())

    def log_prob(self, action: HybridAction) -> torch.Tensor:
        """Returns the log-probability `[...]` of an action, both parts together."""
        return sum_of(part.log_prob(leaf) for part, leaf in zip(self, action) if part and leaf is not None)

    def choose(self) -> Choice:
        """Returns a sample of the Box part, differentiable in the parameters, with the Discrete distribution."""
        box, log_density = (None, None) if self.box is None else self.box.sample_with_log_prob()
        return Choice(box, log_density, self.discrete)


@gin.configurable(module="alfish.networks")
@checked
class SquashedNormalHead(nn.Module):
    """Maps features to a tanh-squashed normal with a state-dependent standard deviation.

    Args:
      input_size: number of input features.
      size: number of entries of the action.
      gain: gain of the linear layer's orthogonal weights.
      min_log_std, max_log_std: bounds of the log standard deviation before tanh.
      log_std: way of limiting the log standard deviation. 'clamp' clips it to its bounds, with zero gradient beyond the
        bounds; 'tanh' maps it smoothly: low + (high - low) (1 + tanh x) / 2.
      unit_rows: whether the weights of each output have norm 1, see `UnitRows`.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        size: PositiveInt,
        gain: NonNegativeFloat = 0.01,
        min_log_std: FiniteFloat = -20.0,
        max_log_std: FiniteFloat = 2.0,
        log_std: Literal["clamp", "tanh"] = "clamp",
        unit_rows: bool = False,
    ):
        super().__init__()
        if min_log_std >= max_log_std:
            raise UsageError(f"SquashedNormalHead.min_log_std is {min_log_std:g}; it must be below {max_log_std:g}")
        self.linear = linear(input_size, 2 * size, gain, unit=unit_rows)
        self._min_log_std, self._max_log_std = min_log_std, max_log_std
        self._is_smooth = log_std == "tanh"

    def forward(self, features: torch.Tensor) -> SquashedNormal:
        mean, log_std = self.linear(features).chunk(2, -1)
        low, high = self._min_log_std, self._max_log_std
        if self._is_smooth:
            return SquashedNormal(mean, low + 0.5 * (high - low) * (1 + torch.tanh(log_std)))
        return SquashedNormal(mean, log_std.clamp(low, high))


class HybridHead(nn.Module):
    """Maps features to a HybridPolicy.

    Args:
      input_size: number of input features.
      space: space of the actions.
    """

    def __init__(self, input_size: int, space: HybridSpace):
        super().__init__()
        self.box = SquashedNormalHead(input_size, space.box_size) if space.box_size else None
        self.discrete = orthogonal(nn.Linear(input_size, space.num_choices), 0.01) if space.num_choices else None

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None = None) -> HybridPolicy:
        """Returns the policy; `mask` `[..., n]` bool marks the allowed Discrete choices, and None allows all."""
        box, discrete = self.box, self.discrete  # read once, because looking up a module's attribute is slow
        return HybridPolicy(
            None if box is None else box(features),
            None if discrete is None else Categorical.of(discrete(features), mask),
        )


class Held(TypedDict):
    """Noise of each environment, and the number of remaining steps that use it."""

    noise: torch.Tensor  # [B, A]
    left: torch.Tensor  # [B] int64


@gin.configurable(module="alfish.networks", denylist=["size"])
@checked
class HeldNoise(nn.Module):
    """Noise of a squashed normal that is held for n steps: a = tanh(mean + std eps), P(n) ~ n^-exponent.

    Noise and length differ between environments. Each episode begins with new noise. The action still depends on the
    observation through mean and standard deviation.

    Args:
      size: number of entries of the noise, A.
      longest: largest number of steps n for which noise is held.
      exponent: exponent of the lengths' distribution; with 0 all lengths are equally likely.

    Source: Kim et al., 2026, https://arxiv.org/abs/2604.04539. In the paper, all environments share one length, and an
    episode begins with the noise with which the previous episode ended.
    """

    bounds: torch.Tensor

    def __init__(self, size: PositiveInt, longest: PositiveInt = 16, exponent: NonNegativeFloat = 2.0):
        super().__init__()
        self._size = size
        weights = torch.arange(1, longest + 1, dtype=torch.float64) ** -exponent
        bounds = (weights.cumsum(0) / weights.sum())[:-1]  # P(n <= k) for k < longest
        self.register_buffer("bounds", bounds.float(), persistent=False)

    def initial_state(self, batch_size: int) -> Held:
        """Returns the state before an episode; the next step draws noise."""
        return {"noise": torch.zeros(batch_size, self._size), "left": torch.zeros(batch_size, dtype=torch.int64)}

    def sample(self, policy: HybridPolicy, state: Held) -> tuple[HybridAction, Held]:
        """Returns actions and the next state. Every step draws random numbers, even if it keeps its noise."""
        assert policy.box is not None
        mean, log_std = policy.box
        fresh, draw = torch.randn_like(mean), torch.rand_like(mean[:, :1])
        length = 1 + (draw >= self.bounds).sum(-1)
        is_new = state["left"] == 0
        noise = torch.where(is_new.unsqueeze(-1), fresh, state["noise"])
        left = torch.where(is_new, length, state["left"]) - 1
        box = torch.tanh(mean + log_std.exp() * noise)
        return HybridAction(box, policy.discrete and policy.discrete.sample()), {"noise": noise, "left": left}


@gin.configurable(module="alfish.networks", allowlist=["linear_in"])
@checked
class Temperatures(nn.Module):
    """One temperature alpha for each part of an action, Box and Discrete.

    Args:
      space: space of the actions.
      initial: temperature at the start.
      learned: whether temperatures are learned, so that entropies approach their targets.
      box_target: target entropy of the Box part, in nats; None means minus the number of Box entries.
      discrete_fraction: target entropy of the Discrete part, as a fraction in [0, 1] of the maximum.
      linear_in: variable in which the loss is linear: 'alpha', as in the paper, or 'log_alpha'. With 'alpha', the
        gradient is proportional to alpha, and Adam divides by the root mean square of earlier gradients. Alpha then
        rises faster and falls more slowly.

    Attributes:
      log_alpha: log temperatures by part, 0-d parameters.
    """

    def __init__(
        self,
        space: HybridSpace,
        initial: PositiveFloat,
        learned: bool,
        box_target: FiniteFloat | None,
        discrete_fraction: UnitInterval,
        linear_in: Literal["alpha", "log_alpha"] = "log_alpha",
    ):
        super().__init__()
        self.learned = learned
        self._in_log = linear_in == "log_alpha"
        self._num_choices = space.num_choices
        self._targets: dict[str, Any] = space.target_entropies(box_target, discrete_fraction)
        logs = {kind: torch.tensor(math.log(initial)) for kind in self._targets}
        self.log_alpha = nn.ParameterDict({kind: nn.Parameter(log, learned) for kind, log in logs.items()})

    def soft(self, values: Scalar, q: torch.Tensor, entropies: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the value with a bonus for entropy: V = E[Q] + sum of alpha H over the parts of the action.

        H of the Box part is estimated by -log pi(a) of the drawn action, so V = Q - alpha log pi(a).

        Args:
          values: value representation of the critics.
          q: action value of each row, `[..., K]`.
          entropies: entropy `[...]` of each part.
        """
        for part, entropy in entropies.items():
            alpha = self.log_alpha[part].exp().detach()  # alpha has a separate loss
            q = values.with_bonus(q, alpha * entropy)
        return q

    def loss(self, entropies: dict[str, torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the loss `[...]`: the sum over the parts of w (entropy - target entropy), w = alpha or log alpha.

        Args:
          entropies: entropy `[...]` of each part.
          mask: allowed Discrete choices, `[..., n]` bool; None means all. The target entropy is a fraction of the
            maximal entropy of the allowed choices.
        """
        targets = self._targets
        if mask is not None:
            maximum = mask.sum(-1).clamp(min=1).log() / math.log(self._num_choices)
            targets = targets | {"discrete": targets["discrete"] * maximum}
        weights = {kind: log if self._in_log else log.exp() for kind, log in self.log_alpha.items()}
        return sum_of(weights[kind] * (entropy - targets[kind]).detach() for kind, entropy in entropies.items())

    def shown(self, entropies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns temperatures, and the entropies of the parts that exist, for summaries."""
        found = {f"entropy_{kind}": entropy for kind, entropy in entropies.items()}
        return found | {f"alpha_{kind}": self.log_alpha[kind].exp() for kind in self._targets}
