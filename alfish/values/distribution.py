"""Values that are distributions of the return."""

import torch
from torch import nn

from alfish.data import Experience
from alfish.errors import UsageError
from alfish.returns import lambda_return
from alfish.targets import NextValues
from alfish.values.scalar import Scalar, of_choice


class Distribution(nn.Module, Scalar):
    """Base of values that are K numbers for the distribution of a return, of a scalar reward.

    Row 0 of a window trains. Its target is the distribution of the rewards up to the end of the episode or the last
    row, plus the discounted distribution there.

    Args:
      gamma: discount per environment step.
      num_values: K.
    """

    num_values: int

    def __init__(self, gamma: float, num_values: int):
        nn.Module.__init__(self)
        self.gamma, self.num_values = gamma, num_values

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean of distributions, `[...]` from `[..., K]`."""
        raise NotImplementedError

    def shifted(self, values: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor) -> torch.Tensor:
        """Returns the target distributions `[..., J]` of reward + discount Z, for distributions Z `[..., K]`."""
        raise NotImplementedError

    def of_choice(self, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return of_choice(q, choice)

    def target(
        self, experience: Experience, following: NextValues, lambda_: float, lower_bound: bool = False
    ) -> torch.Tensor:
        """Returns the target of row 0, `[1, N, J]`; `lambda_` is 1, or 0 for one step.

        Values are those of `windows.transitions`, `[1, N, K]`.
        """
        step_type = experience.time_step.step_type
        reward, discount = self.rows(experience.time_step)
        zero = torch.zeros_like(reward)
        total = lambda_return(reward, discount, zero[1:], step_type, lambda_)
        remaining = lambda_return(zero, discount, zero[1:] + 1, step_type, lambda_)
        return self.shifted(following.value, total[:1], remaining[:1])

    def return_gamma(self, lower_bound: bool) -> None:
        """Returns None: replay stores no returns.

        Raises:
          UsageError: there is a lower bound.
        """
        if lower_bound:
            raise UsageError(
                f"lower_bound takes values of one number, and {type(self).__name__} are distributions; set lower_bound "
                "to False"
            )

    def check(self, owner: object, lambda_: float, one_critic: bool = False, **uses: bool) -> None:
        name, kind = type(owner).__name__, type(self).__name__
        if lambda_ not in (0, 1):
            raise UsageError(
                f"{name}.lambda_ is {lambda_}, and {kind}, which are distributions, take returns of one length: set it "
                "to 0 for one step, or to 1 for the whole window"
            )
        for use in (use for use, is_used in uses.items() if is_used):
            raise UsageError(
                f"{name} takes no {use.replace('_', ' ')} with {kind}, which are distributions; leave one out"
            )
