"""An algorithm extended by parts: rewards computed from rows, a representation that replaces observations, and losses.

Rewards and representations change only what the algorithm sees. Replay and metrics keep the environment's rows and
rewards. On-policy, `preprocess_experience` computes rewards once for each unroll, with the parts as they were during
the unroll. Off-policy, `train_step` computes rewards whenever a window is drawn, with the current parts. Auxiliary
losses (`auxiliary`) are added to what `calc_loss` of the algorithm returns.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish import specs
from alfish.algorithms.composition.auxiliary import AuxiliaryLoss, AuxiliaryLosses, FeatureRows
from alfish.algorithms.composition.part import LogProb, Part, Representation, RewardPart, Transitions, transitions_of
from alfish.algorithms.contract import losses_error, return_error
from alfish.algorithms.imitation.external import External
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep, trainable
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import FiniteFloat, checked
from alfish.parameters.parts import build
from alfish.parameters.schedules import Schedule, as_schedule


class ComposedRows(NamedTuple):
    """Rows on which an on-policy algorithm trains, `[T, B]`."""

    algorithm: Nest  # info that the algorithm's preprocess_experience returned
    transitions: Transitions  # `trains` and `observation` are None
    rewards: dict[str, torch.Tensor]  # rewards of each part


class ComposedTrain(NamedTuple):
    experience: Experience  # rows with the observations and rewards that the inner algorithm receives
    algorithm: Nest  # info that the algorithm's train_step returned
    transitions: Transitions  # [T', N]
    rewards: dict[str, torch.Tensor]  # [T', N] rewards of each part
    features: torch.Tensor | None  # [T' or more, N, F] features of the algorithm; None without auxiliary losses


@gin.configurable(module="alfish.composition")
@checked
class Composed(RLAlgorithm):
    """Adds rewards, a learned representation or auxiliary losses to an algorithm.

        reward = extrinsic_coef * environment reward + sum over the parts of coef * part reward

    With `separate_values`, the algorithm receives a vector reward instead: the environment's reward (one or more
    entries), then one entry for each part. The algorithm learns a value for each entry. `Composed` writes the
    coefficients into the algorithm's `reward_weights`, which weigh the values. The algorithm's `gamma` may then be a
    list.

    Each part is a parameter group with the part's name (`rnd`); the algorithm's groups keep their names. Networks of
    auxiliary losses are in the group of the features.

    Args:
      algorithm: class or factory of the algorithm; called with (observation_spec, action_spec, reward_spec).
      rewards: classes or factories of reward parts (`@RND`, `@ICM`); called with (observation_spec, action_spec).
      representation: class or factory of the features that replace the algorithm's observations; called with
        (observation_spec, action_spec). None means no replacement. Other parts always receive the observations.
      extrinsic_coef: weight of the environment's reward; a number or a schedule of progress. With 0, the environment's
        reward is not read.
      separate_values: whether the reward of each part is an entry of a vector reward, with a separate learned value.
      auxiliary_losses: classes or factories of losses on the algorithm's features (`@Reconstruction`, `@CPCA`); called
        with (observation_spec, action_spec, feature_size).
      feature_module: path of the module in the algorithm whose outputs are the features, such as 'q_network.torso';
        None means the algorithm's own `feature_module`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        algorithm: Callable[..., RLAlgorithm] = gin.REQUIRED,
        rewards: Sequence[Callable[..., RewardPart]] = (),
        representation: Callable[..., Representation] | None = None,
        extrinsic_coef: FiniteFloat | Schedule = 1.0,
        separate_values: bool = False,
        auxiliary_losses: Sequence[Callable[..., AuxiliaryLoss]] = (),
        feature_module: str | None = None,
    ):
        encoder, sees, maximized = None, observation_spec, reward_spec
        if representation is not None:
            encoder = build(representation, Representation, "Composed.representation", observation_spec, action_spec)
            sees = _features_spec(observation_spec, encoder)
        if separate_values:
            num_entries = math.prod(reward_spec.shape) + len(rewards)
            maximized = spaces.Box(-np.inf, np.inf, (num_entries,), np.float32)
        inner = build(algorithm, RLAlgorithm, "Composed.algorithm", sees, action_spec, maximized)
        made = [build(part, RewardPart, "Composed.rewards", observation_spec, action_spec) for part in rewards]
        self.on_policy, self.replay_needs, self.unroll_use = inner.on_policy, inner.replay_needs, inner.unroll_use
        super().__init__(observation_spec, action_spec, reward_spec)
        self.algorithm: Any = inner
        self.representation: Any = encoder
        self.rewards: Any = nn.ModuleDict({part.name: part for part in made})
        self.auxiliary = AuxiliaryLosses(auxiliary_losses, inner, feature_module, observation_spec, action_spec)
        self.feature_module = inner.feature_module and f"algorithm.{inner.feature_module}"
        self._extrinsic_coef, self._separates = as_schedule(extrinsic_coef), separate_values
        self._reads_reward = extrinsic_coef != 0  # a reward that is not read may be infinite or nan
        self._weighs_reward = extrinsic_coef != 1
        self._changes_reward = bool(rewards) or separate_values or self._weighs_reward
        self._reads_policy = any(part.reads_policy for part in made)
        self._groups = [name for name, each in inner.parameter_groups().items() if any(p.requires_grad for p in each)]
        self._check(made)
        self.weighted_losses = inner.weighted_losses
        if inner.weighted_losses is None and self._own_groups():
            self.weighted_losses = tuple(self._groups)  # replay's weights apply to the algorithm's losses only
        self._share_progress()
        if separate_values:
            self._separate_values()

    @property
    def reward_weights(self) -> torch.Tensor | None:
        weights = self.algorithm.reward_weights  # with separate values, parts' weights come last
        return None if weights is None or not self.reward_spec.shape else weights[: self.reward_spec.shape[0]]

    @property
    def parts_with_statistics(self) -> list[str]:
        """Class names of the parts whose `after_iteration` reads collected rows."""
        kinds = [type(part) for part in self._parts().values()]
        return [kind.__name__ for kind in kinds if kind.after_iteration is not Part.after_iteration]

    def initial_state(self, batch_size: int) -> Nest:
        return self.algorithm.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return self.algorithm.rollout_step(self._seen(time_step), state)

    def random_action(self, time_step: TimeStep) -> Nest:
        return self.algorithm.random_action(self._seen(time_step))

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return self.algorithm.predict_step(self._seen(time_step), state)

    def preprocess_experience(self, experience: Experience) -> Experience:
        composed, transitions, rewards = self._compose(experience)
        prepared = self.algorithm.preprocess_experience(composed)
        if not isinstance(prepared, Experience):
            raise return_error(prepared, "the experience", self.algorithm, "preprocess_experience")
        if not self.on_policy:  # train_step composes the rows itself
            return experience._replace(info=prepared.info)
        time_step = composed.time_step._replace(observation=experience.time_step.observation)
        info = ComposedRows(prepared.info, transitions._replace(observation=None, trains=None), rewards)
        return experience._replace(time_step=time_step, info=info)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        if self.on_policy:
            rows = experience.info
            transitions = rows.transitions._replace(observation=experience.time_step.observation)
            composed = experience._replace(time_step=self._seen(experience.time_step), info=rows.algorithm)
            rewards = rows.rewards
        else:
            with torch.no_grad():
                composed, transitions, rewards = self._compose(experience)
        with self.auxiliary.watching(self.algorithm) as features:
            step = self.algorithm.train_step(composed, state)
        if not isinstance(step, AlgStep):
            raise return_error(step, "AlgStep(info=...)", self.algorithm, "train_step")
        return AlgStep(info=ComposedTrain(composed, step.info, transitions, rewards, next(iter(features), None)))

    def calc_loss(self, experience: Experience, info: ComposedTrain) -> LossInfo:
        loss_info = self.algorithm.calc_loss(info.experience, info.algorithm)
        if not isinstance(loss_info, LossInfo):
            raise return_error(loss_info, "LossInfo(loss, ...)", self.algorithm, "calc_loss")
        if not isinstance(loss_info.loss, dict):
            if len(self._groups) > 1:
                raise losses_error(self._groups)
            loss_info = loss_info._replace(loss=dict.fromkeys(self._groups, loss_info.loss))
        transitions = info.transitions
        if info.features is not None:
            rows = FeatureRows(info.features, experience.time_step.step_type, transitions)
            loss_info = self.auxiliary.added(loss_info, rows, self.progress)
        loss: Any = loss_info.loss
        extra = dict(loss_info.extra or {})
        if self._reads_policy and experience.trains is not None:
            transitions = transitions._replace(trains=experience.trains[: len(transitions.next_discount)])
        for name, part in self._own_groups().items():
            own = _loss_of(part, transitions, self._log_prob)
            if own is not None:
                loss = {**loss, name: own.loss}
                extra |= {f"{name}/{key}": value for key, value in (own.extra or {}).items()}
        extra |= {f"{name}/reward": reward for name, reward in info.rewards.items()}
        return loss_info._replace(loss=loss, extra=extra)

    def after_update(self) -> None:
        self.algorithm.after_update()
        for part in self._parts().values():
            part.after_update()
        if self._separates and not self.on_policy:  # `after_iteration` is not called if no rows are collected
            self._weigh()

    def after_iteration(self, experience: Experience) -> None:
        if self.algorithm.overrides("after_iteration"):
            if self.on_policy:  # with the composed rewards, which the algorithm maximizes
                self.algorithm.after_iteration(self._compose(experience)[0])
            else:
                self.algorithm.after_iteration(experience._replace(time_step=self._seen(experience.time_step)))
        for part in self._parts().values():
            part.after_iteration(experience, num_seen=1 if self.on_policy else 0)
        if self._separates and self.on_policy:
            self._weigh()

    def graph_key(self) -> Any:
        return self.algorithm.graph_key()

    def overrides(self, hook: str) -> bool:
        by_parts = {"after_iteration": bool(self._parts()), "preprocess_experience": self.on_policy}
        return by_parts.get(hook, False) or self.algorithm.overrides(hook)

    def parameter_groups(self) -> dict[str, Iterable[nn.Parameter]]:
        own = {name: part.parameters() for name, part in self._own_groups().items()}
        groups = {**self.algorithm.parameter_groups(), **own}
        if self.auxiliary:
            groups[self.auxiliary.group] = [*groups[self.auxiliary.group], *self.auxiliary.parameters()]
        return groups

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        return self.algorithm.state_value(self._seen(time_step), state)

    def log_prob(self, time_step: TimeStep, action: Nest) -> torch.Tensor:
        return self.algorithm.log_prob(self._seen(time_step), action)

    @torch.no_grad()
    def _log_prob(self, observation: Nest, action: Nest) -> torch.Tensor:
        """Returns the log-probability `[...]` of actions under the policy; parts receive it as `LogProb`."""
        return self.log_prob(TimeStep(None, None, None, observation, None, None), action)

    def _parts(self) -> dict[str, Any]:
        """Returns all parts by name."""
        return {**self._own_groups(), **self.auxiliary}

    def _own_groups(self) -> dict[str, Any]:
        """Returns the parts that are parameter groups, by name."""
        parts: dict[str, Any] = dict(self.rewards.items())
        return parts if self.representation is None else {**parts, self.representation.name: self.representation}

    def _seen(self, time_step: TimeStep) -> TimeStep:
        """Returns rows with features in place of observations if there is a representation."""
        if self.representation is None:
            return time_step
        with torch.no_grad():
            features = self.representation(time_step.observation)
        if self.action_masks is None:
            return time_step._replace(observation=features)
        return time_step._replace(observation=(features, self.action_masks.mask(time_step.observation)))

    def _compose(self, experience: Experience) -> tuple[Experience, Transitions, dict[str, torch.Tensor]]:
        """Returns the algorithm's rows `[T, N]`, the T - 1 steps between these rows, and the parts' rewards."""
        time_step, burn_in = experience.time_step, experience.burn_in
        transitions = transitions_of(time_step)
        if self._reads_policy:
            transitions = transitions._replace(trains=trainable(time_step.step_type))
        rewards: dict[str, Any] = {name: _reward_of(part, transitions) for name, part in self.rewards.items()}
        if self._changes_reward:
            # The reward of row 0 belongs to an action before row 0, so it is not read.
            joined = [self._join(time_step.reward[1:], rewards)]
            joined.insert(0, torch.zeros_like(joined[0][:1]))
            time_step = time_step._replace(reward=torch.cat(joined))
        seen = experience._replace(
            time_step=self._seen(time_step), burn_in=None if burn_in is None else self._seen(burn_in)
        )
        return seen, transitions, rewards

    def _join(self, reward: torch.Tensor, rewards: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the algorithm's rewards: the weighted sum, or all entries with separate values."""
        if not self._reads_reward:
            reward = torch.zeros_like(reward)
        if self._separates:
            entries = [each.unsqueeze(-1) for each in rewards.values()]
            return torch.cat([reward if self.reward_spec.shape else reward.unsqueeze(-1), *entries], -1)
        total = self._extrinsic_coef(self.progress) * reward
        for name, part in self.rewards.items():
            total = total + part.coef(self.progress) * rewards[name]
        return total

    def _weigh(self) -> None:
        """Writes the current coefficients into `algorithm.reward_weights`."""
        weights = self.algorithm.reward_weights
        coefs = [part.coef(self.progress) for part in self.rewards.values()]
        if not self.reward_spec.shape:
            coefs.insert(0, self._extrinsic_coef(self.progress))
        with torch.no_grad():
            for entry, coef in enumerate(coefs, len(weights) - len(coefs)):
                weights[entry] = coef

    def _separate_values(self) -> None:
        """Prepares the algorithm for a vector reward with an entry for each part.

        Raises:
          UsageError: the algorithm has no `reward_weights`.
        """
        if self.algorithm.reward_weights is None:
            raise UsageError(
                "Composed.separate_values needs an algorithm with reward_weights, such as PPO, DQN, SAC or TD3, but "
                f"{type(self.algorithm).__name__} has none; set separate_values to False"
            )
        if self._weighs_reward and getattr(self.algorithm.values, "scales_bonus", False):
            raise UsageError(
                "Composed.extrinsic_coef would scale not only the reward but also the bonus of "
                f"{type(self.algorithm).__name__}, because Composed.rewards is empty, so the vector reward has only "
                "one entry; set separate_values to False"
            )
        for entry, part in enumerate(self.rewards.values(), math.prod(self.reward_spec.shape)):
            if not part.episodic:
                self.algorithm.values.ignore_ends(entry)
        self._weigh()

    def _check(self, rewards: Sequence[RewardPart]) -> None:
        """Raises UsageError if the parts are incompatible with the algorithm, or with each other."""
        own, name = self.algorithm, type(self.algorithm).__name__
        names = [part.name for part in rewards]
        names += [*self.auxiliary, *([] if self.representation is None else [self.representation.name])]
        for each in names:
            if names.count(each) > 1 or each in self._groups:
                raise UsageError(
                    f"two parts of Composed are named {each!r}, or one has the name of a parameter group of {name}; "
                    "give one of them another `name` in a subclass"
                )
        if self._reads_policy:
            _check_log_prob(own, [part.name for part in rewards if part.reads_policy])
        size = sum(self.reward_spec.shape)
        if rewards and size and not self._separates:
            raise UsageError(
                f"Composed.rewards are added to a scalar reward, but the environment's reward has {size} entries; set "
                "Composed.separate_values = True"
            )
        if size and self._separates and self._extrinsic_coef(0.0) != 1:
            raise UsageError(
                f"Composed.extrinsic_coef weighs a scalar reward, but the environment's reward has {size} entries; "
                f"leave it out, and set {name}.reward_weights"
            )
        if rewards and own.unroll_use.preprocess_each_epoch:
            raise UsageError(
                f"{name}.recompute_advantage would compute the rewards of parts again in each epoch, after the parts "
                "have trained on the same rows; set recompute_advantage to False"
            )
        endless = [part.name for part in rewards if not part.episodic]
        if endless and not self._separates:
            raise UsageError(
                f"returns of {endless[0]} continue after the end of an episode (episodic = False), which requires a "
                "separate value; set Composed.separate_values = True"
            )
        if self._changes_reward and own.replay_needs.return_gamma is not None:
            raise UsageError(
                f"{name} reads returns of the environment's rewards, but Composed changes the rewards; leave out what "
                "reads returns (CalQL, values = @LowerBounded)"
            )
        for part in own.modules():
            if isinstance(part, External) and self._changes_reward:
                part.check_rewards(None, "Composed")

    def _share_progress(self) -> None:
        """Makes the wrapped algorithm use the same tensor `progress`, which the trainer writes."""
        self.algorithm.progress = self.progress
        if isinstance(self.algorithm, Composed):
            self.algorithm._share_progress()

    def _apply(self, *arguments: Any, **keywords: Any) -> "Composed":
        super()._apply(*arguments, **keywords)  # a move to another device can make the two `progress` separate tensors
        self._share_progress()
        return self


def _check_log_prob(algorithm: RLAlgorithm, names: Sequence[str]) -> None:
    """Raises UsageError if an algorithm cannot give the probabilities that the named parts read."""
    if algorithm.has_state or not algorithm.overrides("log_prob"):
        lacks = "a memory or other state" if algorithm.has_state else "no log_prob"
        raise UsageError(
            f"{names[0]} needs the probability of actions at single time steps, but {type(algorithm).__name__} has "
            f"{lacks}; wrap an algorithm with a stochastic policy and without memory, such as PPO or SAC"
        )


def _reward_of(part: RewardPart, transitions: Transitions) -> torch.Tensor:
    """Returns the part's rewards, `[...]`; raises UsageError if the part's result is wrong."""
    reward, shape = part.reward(transitions), transitions.next_discount.shape
    if not isinstance(reward, torch.Tensor) or reward.shape != shape:
        raise return_error(reward, f"a tensor of shape {list(shape)}, one reward for each step", part, "reward")
    return reward


def _loss_of(part: Part, transitions: Transitions, log_prob: LogProb) -> Any:
    """Returns the part's LossInfo, or None; raises UsageError if the part's result is wrong."""
    loss = part.loss_given_policy(transitions, log_prob) if part.reads_policy else part.loss(transitions)
    if loss is not None and not isinstance(loss, LossInfo):
        raise return_error(loss, "LossInfo(loss, ...), or None", part, "loss")
    if loss is None:
        return None
    for name in loss._fields:
        if name not in ("loss", "extra") and getattr(loss, name) is not None:
            raise UsageError(
                f"loss of {type(part).__name__} returned LossInfo.{name}, which only an algorithm may return; leave it "
                "out"
            )
    return loss


def _features_spec(observation_spec: Nest, representation: Representation) -> Nest:
    """Returns the spec of the features, with the action mask's spec if there is a mask."""
    if not hasattr(representation, "output_size"):
        raise UsageError(f"{type(representation).__name__} has no output_size; set it to the number of features")
    features = spaces.Box(-np.inf, np.inf, (representation.output_size,), np.float32)
    path = specs.mask_path(observation_spec)
    if path is None:
        return features
    mask = observation_spec
    for key in path:
        mask = mask[key]
    return features, mask
