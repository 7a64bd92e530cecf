"""Auxiliary losses: losses on the features that an algorithm computes in its forward pass over a minibatch.

    loss of the features' group = algorithm's loss + sum over the auxiliary losses of coef * auxiliary loss

An auxiliary loss trains its own networks, and also the algorithm's networks that compute the features. The features are
computed once for all losses. `Composed.auxiliary_losses` adds such losses to any algorithm, without changes to its
class.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish import nest
from alfish.algorithms.composition.part import Part, Transitions
from alfish.algorithms.contract import return_error
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import LossInfo, StepType
from alfish.errors import UsageError
from alfish.functional import losses
from alfish.nest import Nest
from alfish.networks import GRU, MLP, Encoder
from alfish.networks.encoders import Flat
from alfish.networks.layers import orthogonal
from alfish.parameters import FiniteFloat, LayerSize, PositiveInt, checked
from alfish.parameters.parts import build, build_network
from alfish.parameters.schedules import Schedule, as_schedule


class FeatureRows(NamedTuple):
    """Rows of a minibatch that the losses use, `[T', N]`, with their features; T' is 1 without memory."""

    features: torch.Tensor  # [T', N, F] outputs of the features' module, with gradient
    step_type: torch.Tensor  # [T', N] int32
    transitions: Transitions  # [T', N] steps that begin at the rows


class AuxiliaryLoss(Part):
    """A loss on the features of an algorithm.

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      feature_size: number of features, F.
      coef: weight of the loss; a number or a schedule of progress.
    """

    needs_sequences = False  # whether the loss compares rows of a sequence, which requires an algorithm with memory

    def __init__(self, observation_spec: Nest, action_spec: Nest, feature_size: int, coef: float | Schedule = 1.0):
        super().__init__(observation_spec, action_spec)
        self.feature_size, self.coef = feature_size, as_schedule(coef)

    @abc.abstractmethod
    def feature_loss(self, rows: FeatureRows) -> LossInfo:
        """Returns the unweighted loss: one number per row, `[T', N]`, or a mean, 0-d.

        The learner masks, weighs and averages a loss per row like the algorithm's loss. If this method returns a mean,
        it must leave out rows that are not trainable.
        """


class AuxiliaryLosses(nn.ModuleDict):
    """The auxiliary losses of an algorithm by name, and the module whose outputs are the features.

    Args:
      made: classes or factories of losses; called with (observation_spec, action_spec, feature_size).
      algorithm: algorithm that computes the features.
      path: path of the features' module in the algorithm; None means `algorithm.feature_module`.
      observation_spec, action_spec: specs that the losses take.

    Attributes:
      group: parameter group of the features; '' without losses.

    Raises:
      UsageError: there is no such module; the module has no output size, or its parameters are not in exactly one
        group; or a loss requires a memory that the algorithm lacks, or has the name of another loss.
    """

    def __init__(
        self,
        made: Sequence[Callable[..., AuxiliaryLoss]],
        algorithm: RLAlgorithm,
        path: str | None,
        observation_spec: Nest,
        action_spec: Nest,
    ):
        super().__init__()
        self.path, self.group = path or algorithm.feature_module or "", ""
        if not made:
            return
        module = _module_at(algorithm, self.path)
        self.group = _group_of(algorithm, module, self.path)
        arguments = observation_spec, action_spec, module.output_size
        for part in (build(each, AuxiliaryLoss, "Composed.auxiliary_losses", *arguments) for each in made):
            if part.needs_sequences and not algorithm.has_state:
                raise UsageError(
                    f"{type(part).__name__} compares time steps of a sequence, but {type(algorithm).__name__} trains "
                    "on single time steps here; give it a memory (Torso.memory = @GRU), or leave the loss out"
                )
            if part.name in self:
                raise UsageError(
                    f"two entries of Composed.auxiliary_losses are named {part.name!r}; give one of them another "
                    "`name` in a subclass"
                )
            self[part.name] = part

    @contextlib.contextmanager
    def watching(self, algorithm: RLAlgorithm) -> Iterator[list[torch.Tensor]]:
        """Collects the features that the algorithm computes with gradients within the context, one tensor per call."""
        found: list[torch.Tensor] = []
        if not self:
            yield found
            return

        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                found.append(output[0] if isinstance(output, tuple) else output)

        handle = algorithm.get_submodule(self.path).register_forward_hook(keep)
        try:
            yield found
        finally:
            handle.remove()
        if not found:
            raise UsageError(
                f"train_step of {type(algorithm).__name__} does not call {self.path!r} with gradients, so auxiliary "
                "losses have no features; set Composed.feature_module to a module that its loss trains"
            )

    def added(self, loss_info: LossInfo, rows: FeatureRows, progress: torch.Tensor) -> LossInfo:
        """Returns the algorithm's losses and statistics, with the auxiliary losses and their statistics added.

        Args:
          loss_info: losses of the algorithm; `loss` is a dict.
          rows: rows of the minibatch and their features. The losses use the first T' rows, as in `loss_info`.
          progress: progress of training, for schedules of the losses' weights (`coef`).
        """
        assert isinstance(loss_info.loss, dict)
        loss = loss_info.loss.get(self.group)
        if not self or loss is None:  # this update does not train the features
            return loss_info
        shape, extra, scalar = loss.shape, dict(loss_info.extra or {}), dict(loss_info.scalar or {})
        if rows.features.shape[:1] < shape[:1] or rows.features.shape[1 : len(shape)] != shape[1:]:
            raise UsageError(
                f"{self.path!r} returned features of shape {list(rows.features.shape)} for losses of rows "
                f"{list(shape)}; set Composed.feature_module to a module that returns features of each row"
            )
        rows = nest.at(rows, slice(0, shape[0]))
        part: Any
        for name, part in self.items():
            own, own_extra = _checked(part, part.feature_loss(rows), shape)
            weighted = part.coef(progress) * own
            if own.ndim:
                loss = loss + weighted
            else:
                scalar[self.group] = scalar[self.group] + weighted if self.group in scalar else weighted
            extra |= {f"{name}/loss": own} | {f"{name}/{key}": each for key, each in own_extra.items()}
        return loss_info._replace(loss={**loss_info.loss, self.group: loss}, scalar=scalar or None, extra=extra)


@gin.configurable(module="alfish.composition")
@checked
class Reconstruction(AuxiliaryLoss):
    """The squared error of observations that are decoded from their features.

        loss = mean over the entries of (decoded - observation)^2 / 2

    The entries are numbers in vectors, pixels of images divided by their bound, and one-hot codes. Floats keep their
    scale; normalize observations whose entries have different scales (`@ObservationNormalizer`).

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      feature_size: number of features.
      coef: weight of the loss; a number or a schedule of progress.
      decoder: class or factory of the decoder's hidden layers; called with the number of features.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        feature_size: PositiveInt,
        *,
        coef: FiniteFloat | Schedule = 0.1,
        decoder: Callable[[int], Any] = MLP,
    ):
        super().__init__(observation_spec, action_spec, feature_size, coef)
        self.code = Encoder(observation_spec, image=Flat, vector=None, discrete=None, leaves=None, sees_mask=False)
        self.decoder: Any = build_network(decoder, "Reconstruction.decoder", feature_size)
        self.linear = orthogonal(nn.Linear(self.decoder.output_size, self.code.output_size), 1.0)

    def feature_loss(self, rows: FeatureRows) -> LossInfo:
        error = self.linear(self.decoder(rows.features)) - self.code(rows.transitions.observation)
        return LossInfo(losses.half_squared(error).mean(-1))


@gin.configurable(module="alfish.composition")
@checked
class CPCA(AuxiliaryLoss):
    """Contrastive predictive coding with actions: recognizes the observation at row t + j from a memory's output at t.

        h_0 = features at t,    h_j = GRU(h_{j-1}, action at t + j - 1),    j = 1 ... horizon
        loss = -log D(h_j, observation at t + j) - mean over other rows of log (1 - D(h_j, observation of another row))

    D is a classifier with one hidden layer; its inputs are h_j and the encoded observation. The other rows are drawn at
    random from the minibatch. Predictions do not cross ends of episodes. The algorithm must have a memory.

    Guo et al., 2018, https://arxiv.org/abs/1811.06407. Difference from the paper: a separate encoder of observations is
    trained by this loss only, and start rows and predicted rows are drawn at random.

    Args:
      observation_spec, action_spec: specs of the transformed observations and of the actions, see `Part`.
      feature_size: number of features.
      coef: weight of the loss; a number or a schedule of progress.
      encoder: class or factory of the encoder of observations; called with the observation spec.
      horizon: largest number of rows from t to the predicted row, limited by the length of sequences.
      num_starts: number of rows t that are drawn in each sequence.
      num_futures: number of predicted rows for each row t.
      num_negatives: number of other rows for each prediction.
      classifier_size: number of hidden units of the classifier.
    """

    needs_sequences = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        feature_size: PositiveInt,
        *,
        coef: FiniteFloat | Schedule = 0.1,
        encoder: Callable[[Nest], Any] = Encoder,
        horizon: PositiveInt = 20,
        num_starts: PositiveInt = 6,
        num_futures: PositiveInt = 2,
        num_negatives: PositiveInt = 20,
        classifier_size: LayerSize = 32,
    ):
        super().__init__(observation_spec, action_spec, feature_size, coef)
        self.encoder: Any = build_network(encoder, "CPCA.encoder", observation_spec)
        self._action_code = Encoder(action_spec, image=None, vector=None, discrete=None, leaves=None, sees_mask=False)
        self.model = GRU(self._action_code.output_size, size=feature_size)
        size = feature_size + self.encoder.output_size
        self.classifier = nn.Sequential(
            orthogonal(nn.Linear(size, classifier_size)), nn.ReLU(), orthogonal(nn.Linear(classifier_size, 1), 1.0)
        )
        self._horizon, self._num_starts = horizon, num_starts
        self._num_futures, self._num_negatives = num_futures, num_negatives

    def feature_loss(self, rows: FeatureRows) -> LossInfo:
        length, num_columns = rows.step_type.shape
        device, horizon = rows.step_type.device, min(self._horizon, length - 1)
        start = _random_below(length - 1, (self._num_starts, num_columns), device)  # [S, N]
        step = 1 + _random_below(horizon, (self._num_futures, *start.shape), device)  # [K, S, N]
        column = torch.arange(num_columns, device=device)
        predicted = self.predictions(rows, start, horizon)  # [horizon, S, N, F]
        predicted = predicted.gather(0, (step - 1).unsqueeze(-1).expand(*step.shape, predicted.shape[-1]))
        future = (start + step).clamp(max=length - 1)
        valid = self.is_valid(rows.step_type, start, start + step)
        embedding = self.encoder(rows.transitions.observation)  # [T', N, E]
        flat = rows.step_type.flatten()
        other = _random_below(flat.shape[0], (self._num_negatives, *step.shape), device)  # [M, K, S, N]
        is_row = (flat[other] != StepType.PAD) & valid
        positive = self._logits(predicted, embedding[future, column])
        negative = self._logits(predicted.expand(*other.shape, -1), embedding.flatten(0, 1)[other])
        loss = losses.masked_mean(F.softplus(-positive), valid) + losses.masked_mean(F.softplus(negative), is_row)
        accuracy = losses.masked_mean((positive > 0).float(), valid)
        return LossInfo(loss, extra={"true_accuracy": accuracy})

    def predictions(self, rows: FeatureRows, start: torch.Tensor, horizon: int) -> torch.Tensor:
        """Returns h_1 to h_horizon, `[horizon, S, N, F]`, for the start rows `[S, N]` of each sequence."""
        column = torch.arange(start.shape[1], device=start.device)
        code, last = self._action_code(rows.transitions.action), rows.step_type.shape[0] - 1
        state = rows.features[start, column].flatten(0, 1)  # [S * N, F]
        outputs = []
        for step in range(horizon):
            action = code[(start + step).clamp(max=last), column]
            output, state = self.model.step(action.flatten(0, 1), state)
            outputs.append(output)
        return torch.stack(outputs).unflatten(1, start.shape)

    @staticmethod
    def is_valid(step_type: torch.Tensor, start: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        """Returns whether both rows of each pair are in one episode, `[..., S, N]` bool.

        Args:
          step_type: step types of the sequences, `[T', N]`.
          start: earlier rows, `[S, N]` int64.
          future: later rows, `[..., S, N]` int64, which may exceed the length of a sequence.
        """
        episode = (step_type == StepType.FIRST).cumsum(0)
        column, last = torch.arange(step_type.shape[1], device=step_type.device), step_type.shape[0] - 1
        inside, future = future <= last, future.clamp(max=last)
        is_row = (step_type[future, column] != StepType.PAD) & (step_type[start, column] != StepType.PAD)
        return inside & is_row & (episode[future, column] == episode[start, column])

    def _logits(self, predicted: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.cat([predicted, embedding], -1)).squeeze(-1)


def _random_below(count: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns random integers below `count`, int64."""
    return (torch.rand(*shape, device=device) * count).long().clamp(max=count - 1)


def _checked(part: AuxiliaryLoss, found: Any, shape: torch.Size) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the loss and `extra` of a result of `feature_loss`; raises UsageError if they are wrong."""
    is_info = isinstance(found, LossInfo) and isinstance(found.loss, torch.Tensor)
    if not is_info or (found.loss.ndim and found.loss.shape != shape):
        asked = f"LossInfo(loss, extra) with a loss of shape {list(shape)}, one number for each row, or 0-d"
        raise return_error(found.loss if is_info else found, asked, part, "feature_loss")
    for name in found._fields:
        if name not in ("loss", "extra") and getattr(found, name) is not None:
            raise UsageError(
                f"feature_loss of {type(part).__name__} returned LossInfo.{name}, which only an algorithm may return; "
                "leave it out"
            )
    return found.loss, found.extra or {}


def _module_at(algorithm: RLAlgorithm, path: str) -> Any:
    """Returns the features' module; raises UsageError if there is none, or if it has no `output_size`."""
    name, modules = type(algorithm).__name__, dict(algorithm.named_modules())
    if not path or not hasattr(modules.get(path), "output_size"):
        sized = [each for each, module in modules.items() if each and hasattr(module, "output_size")]
        problem = f"{path!r} is not a module of it" if path else "it does not declare its features"
        if path in modules:
            problem = f"{path!r} has no output_size"
        raise UsageError(
            f"Composed.auxiliary_losses needs the features of {name}, but {problem}; set Composed.feature_module to "
            f"one of {', '.join(sized) or 'its modules with an output_size'}"
        )
    return modules[path]


def _group_of(algorithm: RLAlgorithm, module: nn.Module, path: str) -> str:
    """Returns the parameter group of a module; raises UsageError if no group trains it, or several do."""
    own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    groups = {name: {id(each) for each in members} for name, members in algorithm.parameter_groups().items()}
    found = [name for name, members in groups.items() if members & own]
    if len(found) == 1:
        return found[0]
    trained = f"is in the groups {found}" if found else "has no parameters that train"
    raise UsageError(
        f"auxiliary losses train the features of {path!r} in {type(algorithm).__name__}, but this module {trained}; "
        "set Composed.feature_module to a module of one parameter group, such as the encoder of an image"
    )
