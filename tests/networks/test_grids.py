"""Grids of symbols: one-hot codes, the convolutions after them, and the same numbers in compiled and numpy programs."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.func import functional_call

import alfish
from alfish import nest, specs
from alfish.compiler.numpy_program import NumpyProgram
from alfish.errors import UsageError
from alfish.networks import Encoder, OneHotGrid
from alfish.transforms import FrameStack

slow = pytest.mark.slow
# Where torch's compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
MINIGRID = spaces.Box(0, 255, (7, 7, 3), np.uint8)
SIZES = (11, 6, 4)


def codes_of(encoder, leaf):
    """What the first convolution reads, `[N, codes, H, W]`."""
    seen = []
    encoder.body[0][1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    encoder(leaf)
    return seen[0]


def sampled(number, space=MINIGRID, sizes=SIZES):
    return torch.stack([torch.randint(size, (number, *space.shape[:2])) for size in sizes], -1).to(torch.uint8)


def test_each_channel_has_a_code_of_its_own():
    encoder = OneHotGrid(spaces.Box(0, 255, (3, 3, 2), np.uint8), sizes=(3, 2))
    grid = torch.zeros(1, 3, 3, 2, dtype=torch.uint8)
    grid[0, 1, 2] = torch.tensor([2, 1])
    codes = codes_of(encoder, grid)
    assert codes.dtype == torch.float32 and codes.shape == (1, 5, 3, 3)
    assert codes[0, :, 0, 0].tolist() == [1, 0, 0, 1, 0] and codes[0, :, 1, 2].tolist() == [0, 0, 1, 0, 1]
    assert (codes.sum(1) == 2).all(), "one digit for each channel"


def test_the_space_gives_the_sizes():
    low, high = np.zeros((3, 4, 2), np.int64), np.zeros((3, 4, 2), np.int64)
    low[..., 0], high[..., 0], high[1, 1, 1] = -1, 1, 4
    encoder = OneHotGrid(spaces.Box(low, high, dtype=np.int64))
    codes = codes_of(encoder, torch.full((1, 3, 4, 2), 1))
    assert codes.shape == (1, 3 + 5, 3, 4)
    assert codes[0, :, 2, 3].tolist() == [0, 0, 1] + [0, 1, 0, 0, 0]


def test_an_integer_beyond_its_size_has_a_code_of_zeros():
    encoder = OneHotGrid(spaces.Box(0, 255, (3, 3), np.uint8), sizes=(2,))
    assert codes_of(encoder, torch.full((1, 3, 3), 2, dtype=torch.uint8)).sum() == 0


def test_without_a_lower_bound_integers_are_counted_from_0():
    space = spaces.Box(np.iinfo(np.int32).min, np.iinfo(np.int32).max, (3, 3), np.int32)
    encoder = OneHotGrid(space, sizes=(2,))
    assert codes_of(encoder, torch.ones(1, 3, 3, dtype=torch.int32))[0, :, 0, 0].tolist() == [0, 1]


def test_sizes_repeat_where_frames_are_stacked():
    stacked = FrameStack(MINIGRID, specs.reward_spec(), num_frames=2).observation_spec
    frames = torch.cat([sampled(4), sampled(4)], -1)
    for space, leaf in (
        (stacked, frames),
        (spaces.Box(0, 255, (2, 7, 7, 3), np.uint8), torch.stack([frames[..., :3], frames[..., 3:]], 1)),
    ):
        codes = codes_of(OneHotGrid(space, sizes=SIZES), leaf)
        for k, own in enumerate(codes.split(sum(SIZES), 1)):
            alone = codes_of(OneHotGrid(MINIGRID, sizes=SIZES), frames[..., 3 * k : 3 * k + 3])
            assert torch.equal(own, alone)


def test_channels_may_be_first_and_rows_may_have_several_dimensions():
    torch.manual_seed(0)
    last = OneHotGrid(MINIGRID, sizes=SIZES)
    first = OneHotGrid(spaces.Box(0, 255, (3, 7, 7), np.uint8), sizes=SIZES)
    first.load_state_dict(last.state_dict())
    grids = sampled(6)
    features = last(grids)
    assert features.shape == (6, last.output_size) and features.std() > 0
    torch.testing.assert_close(first(grids.movedim(-1, 1)), features)
    torch.testing.assert_close(last(grids.reshape(2, 3, 7, 7, 3)).flatten(0, 1), features)


@pytest.mark.parametrize("shape", [(3, 3, 1), (1, 1), (21, 79)])
def test_a_grid_may_have_any_height_and_width(shape):
    space = spaces.Box(0, 9, shape, np.int16)
    assert OneHotGrid(space)(torch.zeros(2, *shape, dtype=torch.int16)).shape == (2, 128)


@pytest.mark.parametrize(
    ("space", "settings", "sentence"),
    [
        (
            MINIGRID,
            {},
            r"OneHotGrid.sizes must be set, .*, 255, is only the limit of its dtype uint8; .* 3 channels",
        ),
        (MINIGRID, {"sizes": (11, 6)}, r"OneHotGrid.sizes has 2 entries, \(11, 6\), but the leaf has 3 channels"),
        (MINIGRID, {"sizes": ()}, r"OneHotGrid.sizes has 0 entries, \(\), but the leaf has 3 channels"),
        (spaces.Box(0, 1, (7, 7, 3)), {}, r"OneHotGrid encodes a Box of integers, not Box.*use another encoder"),
        (spaces.Discrete(3), {}, r"OneHotGrid encodes a Box of integers, not Discrete\(3\)"),
        (spaces.Box(0, 3, (7,), np.int64), {}, r"OneHotGrid encodes images \[H, W, C\].*not a leaf of shape \(7,\)"),
    ],
)
def test_what_has_no_codes_is_refused(space, settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        OneHotGrid(space, **settings)


def test_numpy_acts_like_torch():
    torch.manual_seed(0)
    encoder = OneHotGrid(MINIGRID, sizes=SIZES)
    given = dict(encoder.named_parameters()), sampled(5)
    with torch.no_grad():
        program = NumpyProgram(lambda given: functional_call(encoder, given[0], (given[1],)), given)
        leaves = nest.leaves(given)
        found = program([leaves[index].numpy() for index in program.used])
        torch.testing.assert_close(torch.from_numpy(found), encoder(given[1]), rtol=1e-5, atol=1e-6)


class Symbols(gymnasium.Env):
    """A grid of random symbols, 1 for the action that is equal to the first one; episodes of four steps."""

    observation_space, action_space = spaces.Box(0, 2, (3, 4), np.int64), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        return self._draw(), {}

    def step(self, action):
        reward, self._num_steps = float(action == self._grid[0, 0]), self._num_steps + 1
        return self._draw(), reward, self._num_steps == 4, False, {}

    def _draw(self):
        self._grid = self.np_random.integers(3, size=(3, 4))
        return self._grid


@pytest.mark.parametrize("way", ["interpreted", pytest.param("compiled", marks=slow)])
def test_a_compiled_run_is_the_plain_run(way, tmp_path, request):
    if way == "interpreted":
        request.getfixturevalue("interpreted")
    settings = {"Encoder.leaves": {"": OneHotGrid}, "OneHotGrid.channels": (4,), "MLP.layers": (8,)}
    settings |= {"num_iterations": 2, "unroll_length": 8, "EpochBatches.num_epochs": 2, "Evaluate.num_episodes": 1}
    networks = []
    for name, is_compiled in (("plain", False), ("made", True)):
        alfish.train("PPO", Symbols, root_dir=tmp_path / name, **settings, **{"Learner.compile": is_compiled})
        networks.append(alfish.load(tmp_path / name).algorithm.state_dict())
        assert any("encoders.0.body" in key for key in networks[-1])
    plain, made = networks
    assert plain.keys() == made.keys()
    for key, value in plain.items():
        torch.testing.assert_close(made[key], value, rtol=1e-3, atol=1e-4)


def test_it_is_chosen_for_a_leaf():
    space = spaces.Dict(grid=MINIGRID, other=spaces.Box(-1, 1, (2,)))
    encoder = Encoder(specs.observation_spec(space), leaves={"grid": lambda spec: OneHotGrid(spec, sizes=SIZES)})
    assert [type(one).__name__ for one in encoder.encoders] == ["OneHotGrid", "Flat"]
    assert encoder({"grid": sampled(2), "other": torch.zeros(2, 2)}).shape == (2, 128 + 2)
