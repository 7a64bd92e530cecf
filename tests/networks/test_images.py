"""The layout of images on their way into convolutions, in operations and bytes."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from alfish import specs
from alfish.networks import Encoder, NatureCNN, SmallCNN
from alfish.networks import images as module
from alfish.transforms import FrameStack

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
def test_images_change_their_memory_layout_only_once(shape, copies):
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


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((10, 10, 12), 12),  # four colour frames of 10 x 10
        ((12, 10, 10), 12),
        ((10, 10, 3), 3),
        ((4, 84, 84), 4),
        ((100, 84, 84), 100),
        ((7, 7, 7), 7),
        ((210, 160, 3), 3),  # not square: the smaller of the first and the last
        ((3, 210, 160), 3),
    ],
)
def test_the_channels_of_a_square_image_are_the_other_dimension(shape, channels):
    assert SmallCNN(spaces.Box(0, 255, shape, np.uint8)).image_shape[0] == channels


def test_a_stack_of_small_colour_frames_is_convolved_over_its_pixels():
    raw = spaces.Box(0, 255, (10, 10, 4), np.uint8)
    stacked = FrameStack(raw, specs.reward_spec(), num_frames=4).observation_spec
    assert SmallCNN(stacked).image_shape == (16, 10, 10)


def test_an_encoder_of_images_without_images_is_mentioned(caplog):
    camera = spaces.Box(0, 1, (24, 24, 3), np.float32)
    Encoder({"camera": camera}, image=SmallCNN)
    assert "Encoder.image is not used: {'camera': Box(0.0, 1.0, (24, 24, 3), float32)} has no image" in caplog.text
    caplog.clear()
    Encoder({"camera": spaces.Box(0, 255, (24, 24, 3), np.float32)}, image=SmallCNN)
    Encoder({"camera": camera}, leaves={"camera": SmallCNN})
    assert caplog.text == ""
