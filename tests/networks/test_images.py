"""The layout of images on their way into convolutions, in operations and bytes."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from alfish.networks import NatureCNN
from alfish.networks import images as module

aten = torch.ops.aten
ROWS, CHANNELS, SIZE = 8, 4, 84
NUM_BYTES = ROWS * CHANNELS * SIZE * SIZE
CHANNELS_FIRST, CHANNELS_LAST = (CHANNELS, SIZE, SIZE), (SIZE, SIZE, CHANNELS)


class Written(TorchDispatchMode):
    """Lists operations that write images, with their bytes."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if not function.is_view and isinstance(result, torch.Tensor) and result.numel() == NUM_BYTES:
            self.operations.append((str(function), result.nbytes))
        return result


@pytest.mark.parametrize(
    ("shape", "copies"),
    [(CHANNELS_FIRST, [("aten.clone.default", NUM_BYTES)]), (CHANNELS_LAST, [])],
    ids=["chw", "hwc"],
)
def test_images_change_their_layout_once_as_bytes_and_keep_it_through_the_convolutions(shape, copies):
    network = NatureCNN(spaces.Box(0, 255, shape, np.uint8))
    layouts = []
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(
                lambda layer, given, result: layouts.extend(
                    image.is_contiguous(memory_format=torch.channels_last) for image in (*given, result)
                )
            )
    images = torch.randint(256, (ROWS, *shape), dtype=torch.uint8)
    with torch.no_grad(), Written() as written:
        network(images)
    assert layouts == [True] * 6
    # One copy of bytes, if any; then floats, scaled.
    assert written.operations == [*copies, ("aten._to_copy.default", 4 * NUM_BYTES), ("aten.mul.Tensor", 4 * NUM_BYTES)]


def test_many_images_are_encoded_in_blocks_without_gradient(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 3 * NUM_BYTES // ROWS)
    network = NatureCNN(spaces.Box(0, 255, CHANNELS_FIRST, np.uint8))
    images = torch.randint(256, (2, 5, *CHANNELS_FIRST), dtype=torch.uint8)
    sizes = []
    network.body.register_forward_hook(lambda layer, given, result: sizes.append(len(result)))
    with torch.no_grad():
        found = network(images)
    assert sizes == [3, 3, 3, 1]
    torch.testing.assert_close(found, network(images))
    assert sizes[4:] == [10], "a gradient keeps the intermediate tensors anyway"
