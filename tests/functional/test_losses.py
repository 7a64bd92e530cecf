import math

import pytest
import torch

from alfish.functional import losses


def _grad(function, *arguments):
    """The gradients of the summed loss with regard to every argument."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    return torch.autograd.grad(function(*leaves).sum(), leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("shape", [(3,), (5, 2), (4, 2, 3)])
@pytest.mark.parametrize("loss", [losses.half_squared, losses.huber])
def test_a_loss_keeps_the_shape_of_its_error(loss, shape):
    assert loss(torch.randn(shape)).shape == shape


def test_huber_is_quadratic_within_delta_and_linear_outside():
    error = torch.tensor([-3.0, -0.5, 0.0, 0.5, 2.0, 7.0])
    assert losses.huber(error, 2.0).tolist() == pytest.approx([4, 0.125, 0, 0.125, 2, 12])
    for delta in (0.5, 1.0, 2.5):
        expected = torch.nn.functional.huber_loss(error, torch.zeros(6), reduction="none", delta=delta)
        torch.testing.assert_close(losses.huber(error, delta), expected)


def test_hubers_slope_is_continuous_and_never_above_delta():
    (slope,) = _grad(lambda error: losses.huber(error, 1.5), torch.tensor([-9.0, -1.5001, -1.4999, 0.0, 1.0, 1e9]))
    assert slope.tolist() == pytest.approx([-1.5, -1.5, -1.4999, 0, 1, 1.5])


def test_squared_is_half_a_square():
    (slope,) = _grad(losses.half_squared, torch.tensor([-2.0, 3.0]))
    assert losses.half_squared(torch.tensor([-2.0, 3.0])).tolist() == [2, 4.5]
    assert slope.tolist() == [-2, 3]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.4, 0.0),  # up, and already rewarded enough
        (0.5, 2.0, -1.0, -1.0),  # moved the wrong way: pulled back
        (1.5, -2.0, 3.0, 3.0),  # the same, down
        (0.5, -2.0, 1.6, 0.0),
        (1.1, -1.0, 1.1, 1.1),
    ],
)
def test_the_surrogate_is_pessimistic(ratio, advantage, expected, slope):
    old = torch.tensor([-1.3])
    new = (old + math.log(ratio)).requires_grad_()
    loss, got = losses.clipped_surrogate(new, old, torch.tensor([advantage]), 0.8, 1.2)
    assert got.item() == pytest.approx(ratio)
    assert loss.item() == pytest.approx(expected)
    loss.sum().backward()
    assert new.grad.item() == pytest.approx(slope)


def test_at_ratio_one_the_surrogates_gradient_is_the_policy_gradient():
    log_prob, advantage = torch.randn(4, 3), torch.randn(4, 3)
    (gradient,) = _grad(lambda new: losses.clipped_surrogate(new, log_prob, advantage, 0.8, 1.2)[0], log_prob)
    torch.testing.assert_close(gradient, -advantage)


def test_the_surrogate_takes_a_schedules_tensor():
    log_prob, old, advantage = torch.randn(3, 50).unbind(0)
    by_float = losses.clipped_surrogate(log_prob, old, advantage, 0.8, 1.2)[0]
    ends = torch.tensor([0.8, 1.2], dtype=torch.float64)
    by_tensor = losses.clipped_surrogate(log_prob, old, advantage, *ends)[0]
    assert by_tensor.dtype == torch.float32
    torch.testing.assert_close(by_float, by_tensor)


@pytest.mark.parametrize(
    ("value", "expected", "slope"),
    [
        (1.1, 0.5 * 0.9**2, -0.9),  # within the range: the plain loss
        (1.5, 0.5 * 0.8**2, 0.0),  # beyond it towards the target: no further reward
        (0.0, 0.5 * 2.0**2, -2.0),  # beyond it away from the target: the plain loss pulls back
        (3.0, 0.5 * 1.0**2, 1.0),  # beyond the target itself
    ],
)
def test_a_clipped_value_loss_does_not_favour_leaving_its_range(value, expected, slope):
    old, target = torch.tensor([1.0]), torch.tensor([2.0])
    value = torch.tensor([value], requires_grad=True)
    loss = losses.clipped_value_loss(value, old, target, 0.2)
    assert loss.item() == pytest.approx(expected)
    loss.sum().backward()
    assert value.grad.item() == pytest.approx(slope)


def test_masked_mean_is_over_trained_rows_only():
    values = torch.tensor([[1.0, 100.0], [3.0, 5.0]])
    assert losses.masked_mean(values, torch.tensor([[True, False], [True, True]])).item() == pytest.approx(3)


def test_masked_mean_of_no_row_is_zero():
    assert losses.masked_mean(torch.full((2, 2), math.nan), torch.zeros(2, 2, dtype=torch.bool)).item() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_masked_row_may_hold_anything(poison):
    values = torch.tensor([[1.0, poison], [3.0, 5.0]], requires_grad=True)
    mean = losses.masked_mean(values, torch.tensor([[True, False], [True, True]]))
    assert mean.item() == pytest.approx(3)
    mean.backward()
    torch.testing.assert_close(values.grad, torch.tensor([[1.0, 0.0], [1.0, 1.0]]) / 3)


def test_masked_mean_counts_every_entry_of_a_vector_row():
    values = torch.arange(12.0).view(2, 2, 3)
    assert losses.masked_mean(values, torch.tensor([[False, True], [False, False]])).item() == pytest.approx(4)


def test_masked_mean_aligns_on_the_left_when_rows_and_entries_are_equally_many():
    values = torch.arange(8.0).view(2, 2, 2)
    mask = torch.tensor([[True, False], [False, False]])
    assert losses.masked_mean(values, mask).item() == pytest.approx(0.5)
