"""Residual bodies: values by hand, sizes, and norms of weights."""

import functools

import pytest
import torch

from alfish.networks.bodies.batch_norm import BatchNorm, Moments
from alfish.networks.bodies.residual import Residual
from alfish.networks.layers import Projected, UnitRows, UnitScale


def test_values_equal_hand_computed_values():
    torch.manual_seed(0)
    body = Residual(3, width=4, blocks=2, expansion=2)
    for norm in body.modules():
        if isinstance(norm, BatchNorm):  # running statistics and scales that are not those of the start
            norm.mean.normal_()
            norm.variance.uniform_(0.5, 2)
            norm.weight.data.normal_()
            norm.bias.data.normal_()
    body.output_norm.weight.data.normal_()

    def normed(x, norm):
        return norm.weight * (x - norm.mean) / (norm.variance + 1e-3).sqrt() + norm.bias

    x = torch.randn(5, 7, 3)
    y = normed(x, body.input_norm) @ body.embedding.weight.T
    for first, first_norm, _, second, second_norm, _ in body.blocks:
        assert first.weight.shape == (8, 4) and second.weight.shape == (4, 8)
        inner = normed(y @ first.weight.T, first_norm).clamp(min=0)
        y = y + normed(inner @ second.weight.T, second_norm).clamp(min=0)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * body.output_norm.weight
    torch.testing.assert_close(body(x), y)
    assert body.output_size == 4 and body(x).shape == (5, 7, 4)


@pytest.mark.parametrize("ensemble_size", [None, 3])
def test_it_has_the_parameters_of_its_layers(ensemble_size):
    body = Residual(3, ensemble_size, width=4, blocks=2, expansion=4)
    linear, norms = 3 * 4 + 2 * 2 * 4 * 16, 2 * 3 + 2 * (2 * 16 + 2 * 4) + 4
    assert sum(parameter.numel() for parameter in body.parameters()) == (ensemble_size or 1) * (linear + norms)


def test_ensemble_networks_are_independent():
    torch.manual_seed(0)
    bodies, single = Residual(3, 2, width=4), Residual(3, width=4)
    x, moments = torch.randn(2, 9, 3), Moments()
    y = bodies(x, moments)
    for k in range(2):
        with torch.no_grad():
            for one, each in zip(single.parameters(), bodies.parameters()):
                one.copy_(each[k].T if one.ndim == 2 else each[k, 0])
        torch.testing.assert_close(y[k], single(x[k], Moments()))
    torch.testing.assert_close(bodies(x[:1], None, 1), bodies(x)[:1])
    assert len(moments) == 2 * len([layer for layer in bodies.modules() if isinstance(layer, BatchNorm)])


@pytest.mark.parametrize("ensemble_size", [None, 2])
def test_projection_sets_row_norms_to_1_and_norm_layers_to_their_size(ensemble_size):
    torch.manual_seed(0)
    body = Residual(3, ensemble_size, width=4)
    for again in (False, True):
        layers = [layer for layer in body.modules() if isinstance(layer, Projected)]
        assert len(layers) == 5 + 6  # linear layers and norms
        for layer in layers:
            if again:
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.add_(torch.randn_like(parameter))
                before = [parameter.clone() for parameter in layer.parameters()]
                layer.project()
                for old, new in zip(before, layer.parameters()):  # directions stay
                    assert (old * new >= 0).all()
            if isinstance(layer, UnitRows):
                norms = layer.weight.norm(dim=layer.input_dim)
                torch.testing.assert_close(norms, torch.ones_like(norms))
            else:
                assert isinstance(layer, UnitScale)
                square = sum(parameter.square().sum(-1) for parameter in layer.parameters())
                torch.testing.assert_close(square, torch.full_like(square, layer.weight.shape[-1]))


def test_without_unit_rows_no_layer_is_projected():
    assert not [layer for layer in Residual(3, unit_rows=False).modules() if isinstance(layer, Projected)]


def test_no_blocks_leave_embedding_and_norm():
    body = functools.partial(Residual, width=4, blocks=0)(3)
    root = body(torch.randn(6, 3)).square().mean(-1).sqrt()
    torch.testing.assert_close(root, torch.ones(6), atol=1e-3, rtol=1e-3)
