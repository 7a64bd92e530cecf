"""An auxiliary loss of your own: from the features of any algorithm, whether the episode terminates after the step.

alfish train --gin_file=examples/end_prediction_cartpole.gin --root_dir=runs/end_prediction
"""

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish import LossInfo
from alfish.algorithms.composition import AuxiliaryLoss


@gin.configurable
class EndPrediction(AuxiliaryLoss):
    def __init__(self, observation_spec, action_spec, feature_size, coef=0.1):
        super().__init__(observation_spec, action_spec, feature_size, coef)
        self.linear = nn.Linear(feature_size, 1)

    def feature_loss(self, rows):  # rows.features [T, N, F], with gradient
        logit = self.linear(rows.features).squeeze(-1)
        terminates = (rows.transitions.next_discount == 0).to(logit.dtype)
        error = F.binary_cross_entropy_with_logits(logit, terminates, reduction="none")
        return LossInfo(error, extra={"probability": torch.sigmoid(logit)})
