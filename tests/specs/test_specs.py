import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.networks import PolicyHead
from alfish.specs import ActionUnits, ObservationUnits

NESTED = spaces.Dict(
    camera=spaces.Box(0, 255, (4, 4, 3), np.uint8),
    body=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3, start=5)]),
    switches=spaces.MultiBinary(4),
    dials=spaces.MultiDiscrete([2, 3], start=[1, -1]),
)
ACTIONS = {
    "box": spaces.Box(np.float32([-2, 0]), np.float32([6, 10]), dtype=np.float32),
    "float64 box": spaces.Box(-2, 6, (2,), np.float64),
    "0-d box": spaces.Box(0, 4, (), np.float32),
    "2-d box": spaces.Box(-3, 5, (2, 3), np.float32),
    "unbounded box": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "half-bounded box": spaces.Box(0, np.inf, (2,), np.float32),
    "mixed box": spaces.Box(np.float32([-np.inf, -1]), np.float32([3, 1]), dtype=np.float32),
    "discrete": spaces.Discrete(4),
    "discrete with start": spaces.Discrete(4, start=-2),
    "multi-discrete": spaces.MultiDiscrete([2, 5]),
    "multi-discrete with start": spaces.MultiDiscrete([2, 5], start=[10, -3]),
    "2-d multi-discrete": spaces.MultiDiscrete([[2, 5], [3, 4]]),
    "2-d multi-discrete with start": spaces.MultiDiscrete([[2, 5], [3, 4]], start=[[1, 2], [3, 4]]),
    "multi-binary": spaces.MultiBinary(3),
    "2-d multi-binary": spaces.MultiBinary([2, 3]),
    "nested": NESTED,
}


def _sample(space, size=20):
    """A batch of actions of the environment, as numpy arrays."""
    space.seed(0)
    return nest.map(lambda *rows: np.stack([np.asarray(row) for row in rows]), *[space.sample() for _ in range(size)])


def _assert_equal(got, expected):
    assert nest.paths(got) == nest.paths(expected)
    for a, b in zip(nest.leaves(got), nest.leaves(expected)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_observations_are_converted_to_the_stream_and_back(device):
    space = spaces.Dict(
        digits=spaces.Tuple([spaces.Discrete(3, start=-2), spaces.MultiDiscrete([2, 2], start=[1, -1])]),
        plain=spaces.MultiDiscrete([3, 2], dtype=np.int32),
        state=spaces.Box(-1, 1, (2,), np.float64),
    )
    own = {
        "digits": (np.array([-2, 0]), np.array([[1, -1], [2, 0]])),
        "plain": np.array([[2, 1], [0, 0]], np.int32),
        "state": np.array([[0.1, 1], [-1, 0]]),
    }
    handed = own if device is None else nest.map(torch.from_numpy, own)
    units, spec = ObservationUnits(space, device), specs.observation_spec(space)
    read = units.from_environment(handed)
    assert read["digits"][0].tolist() == [0, 2] and read["digits"][1].tolist() == [[0, 0], [1, 1]]
    for leaf, of_spec in zip(nest.leaves(read), nest.leaves(spec)):
        assert leaf.dtype == (of_spec.dtype if device is None else specs.torch_dtype(of_spec))
    back = units.to_environment(read)
    assert nest.paths(back) == nest.paths(own)
    assert all(np.allclose(one, other) for one, other in zip(nest.leaves(back), nest.leaves(own)))


def test_observations_are_copies_where_they_are_kept():
    """An environment may write the memory of its observation again."""
    space, own = spaces.Box(-1, 1, (2,), np.float32), np.zeros((3, 2), np.float32)
    kept, seen = (ObservationUnits(space, copies=copies).from_environment(own) for copies in (True, False))
    own[:] = 1
    assert not kept.any() and seen.all()


def test_a_nested_observation_keeps_its_structure_and_dtypes():
    spec = specs.observation_spec(NESTED)
    assert nest.paths(spec) == ["body.0", "body.1", "camera", "dials", "switches"]
    dtypes = [specs.torch_dtype(leaf) for leaf in nest.leaves(spec)]
    assert dtypes == [torch.float32, torch.int64, torch.uint8, torch.int64, torch.int8]


def test_observations_count_from_zero():
    spec = specs.observation_spec(NESTED)
    assert spec["body"][1] == spaces.Discrete(3)
    assert spec["dials"] == spaces.MultiDiscrete([2, 3])


def test_float64_becomes_float32_and_keeps_its_bounds():
    spec = specs.observation_spec(spaces.Box(np.array([-1.5, -np.inf]), np.array([2.5, 7.0]), dtype=np.float64))
    assert spec.dtype == np.float32
    assert spec.low.tolist() == [-1.5, -np.inf]
    assert spec.high.tolist() == [2.5, 7.0]


def test_a_bound_beyond_float32_is_infinite():
    spec = specs.observation_spec(spaces.Box(-1e300, 1e300, (1,), np.float64))
    assert spec.low.tolist() == [-np.inf]
    spec = specs.action_spec(spaces.Box(-np.inf, 1e300, (1,), np.float64))
    assert spec.high.tolist() == [np.inf]


@pytest.mark.parametrize("name", ACTIONS)
def test_canonical_actions_are_flat_and_count_from_zero(name):
    for leaf in nest.leaves(specs.action_spec(ACTIONS[name])):
        if isinstance(leaf, spaces.Discrete):
            assert leaf.start == 0
        else:
            assert len(leaf.shape) == 1
        if isinstance(leaf, spaces.MultiDiscrete):
            assert not leaf.start.any()
        if isinstance(leaf, spaces.Box):
            assert leaf.dtype == np.float32


@pytest.mark.parametrize("name", ["box", "float64 box", "0-d box", "2-d box"])
def test_bounded_boxes_are_scaled_to_minus_1_to_1(name):
    space = ACTIONS[name]
    spec = specs.action_spec(space)
    assert spec.shape == (int(np.prod(space.shape)),)
    assert (spec.low == -1).all()
    assert (spec.high == 1).all()
    size = spec.shape[0]
    units = ActionUnits(space)
    corners = np.stack([np.full(size, x, np.float32) for x in (-1, 0, 1, -7, 7)])
    low, middle, high, below, above = units.to_environment(corners)
    np.testing.assert_allclose(low, space.low)
    np.testing.assert_allclose(middle, (space.low + space.high) / 2)
    np.testing.assert_allclose(high, space.high)
    np.testing.assert_allclose(below, space.low)
    np.testing.assert_allclose(above, space.high)
    assert units.executed(corners)[3].tolist() == [-1] * size


@pytest.mark.parametrize("name", ACTIONS)
def test_environment_actions_survive_a_round_trip(name):
    space = ACTIONS[name]
    units, actions = ActionUnits(space), _sample(space)
    canonical = units.from_environment(actions)
    for leaf, spec in zip(nest.leaves(canonical), nest.leaves(specs.action_spec(space))):
        assert leaf.shape == (20, *spec.shape)
        for row in leaf.astype(spec.dtype):
            assert spec.contains(np.clip(row, -1, 1) if isinstance(spec, spaces.Box) and spec.is_bounded() else row)
    _assert_equal(units.to_environment(canonical), actions)


@pytest.mark.parametrize("name", ACTIONS)
def test_sampled_actions_are_in_the_action_space(name):
    space = ACTIONS[name]
    generator = np.random.default_rng(0)

    def draw(spec):
        if isinstance(spec, spaces.Box):
            return (3 * generator.standard_normal((50, *spec.shape))).astype(np.float32)
        if isinstance(spec, spaces.Discrete):
            return generator.integers(spec.n, size=50)
        if isinstance(spec, spaces.MultiDiscrete):
            return generator.integers(spec.nvec, size=(50, *spec.shape))
        return generator.integers(2, size=(50, *spec.shape)).astype(np.int8)

    actions = ActionUnits(space).to_environment(nest.map(draw, specs.action_spec(space)))
    for i in range(50):
        assert space.contains(nest.map(lambda leaf, i=i: np.asarray(leaf[i]), actions))


@pytest.mark.parametrize("name", ACTIONS)
def test_tensors_and_arrays_are_converted_alike(name):
    space = ACTIONS[name]
    arrays, tensors = ActionUnits(space), ActionUnits(space, torch.device("cpu"))
    actions = _sample(space)
    canonical = arrays.from_environment(actions)
    as_tensors = nest.map(torch.as_tensor, canonical)
    _assert_equal(nest.map(lambda leaf: leaf.numpy(), tensors.to_environment(as_tensors)), actions)
    back = tensors.from_environment(nest.map(torch.as_tensor, actions))
    for got, expected in zip(nest.leaves(back), nest.leaves(as_tensors)):
        torch.testing.assert_close(got, expected, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unbounded box", [[-9.0, 9.0]]),
        ("half-bounded box", [[0.0, 9.0]]),
        ("mixed box", [[-9.0, 1.0]]),
    ],
)
def test_a_half_bounded_box_keeps_its_units_and_is_clipped(name, expected):
    space = ACTIONS[name]
    assert specs.action_spec(space) == space
    assert not specs.is_bounded(space)
    action = np.array([[-9.0, 9.0]], np.float32)
    assert ActionUnits(space).to_environment(action).tolist() == expected
    assert ActionUnits(space).executed(action).tolist() == expected


def test_start_offsets_go_both_ways():
    discrete = ActionUnits(ACTIONS["discrete with start"])
    assert discrete.to_environment(np.array([0, 3])).tolist() == [-2, 1]
    assert discrete.from_environment(np.array([-2, 1])).tolist() == [0, 3]
    multi = ActionUnits(ACTIONS["multi-discrete with start"])
    assert multi.to_environment(np.array([[0, 4]])).tolist() == [[10, 1]]
    assert multi.from_environment(np.array([[10, 1]])).tolist() == [[0, 4]]


def test_a_box_with_equal_bounds_gives_finite_values():
    units = ActionUnits(spaces.Box(2, 2, (1,), np.float32))
    assert units.to_environment(np.array([[0.7]], np.float32)).tolist() == [[2]]
    assert np.isfinite(units.from_environment(np.array([[2.0]], np.float32))).all()


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_box_of_integers_gets_the_nearest_one(device):
    units = ActionUnits(spaces.Box(0, 10, (3,), np.int64), device)
    action = np.array([[-0.1, 0.15, 3.0]], np.float32)
    executed = units.to_environment(action if device is None else torch.from_numpy(action))
    assert executed.tolist() == [[4, 6, 10]] and str(executed.dtype).endswith("int64")


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("name", ACTIONS)
def test_what_is_executed_is_stretched_to_what_the_environment_takes(name, device):
    units, generator = ActionUnits(ACTIONS[name], device), np.random.default_rng(0)

    def draw(spec):
        action = generator.normal(scale=3, size=(20, *spec.shape)) if isinstance(spec, spaces.Box) else spec.sample()
        action = np.broadcast_to(action, (20, *spec.shape)).astype(spec.dtype)
        return action if device is None else torch.from_numpy(action)

    action = nest.map(draw, specs.action_spec(ACTIONS[name]))
    executed = units.executed(action)
    for leaf, spec in zip(nest.leaves(executed), nest.leaves(specs.action_spec(ACTIONS[name]))):
        assert all(spec.contains(row) for row in np.asarray(leaf))
    for found, expected in zip(nest.leaves(units.stretch(executed)), nest.leaves(units.to_environment(action))):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)
    for again, leaf in zip(nest.leaves(units.executed(executed)), nest.leaves(executed)):
        assert np.array_equal(again, leaf)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_box_from_minus_1_to_1_is_clipped_but_not_rescaled(device):
    """Even a scale of 1 and an offset of 0 would make 0 of -0."""
    values = np.array([[-0.0, 0.1, 1e-40], [-7.0, 7.0, -1.0]], np.float32)
    expected = np.array([[-0.0, 0.1, 1e-40], [-1.0, 1.0, -1.0]], np.float32)
    given = values if device is None else torch.from_numpy(values)
    found = ActionUnits(spaces.Box(-1, 1, (3,), np.float32), device).to_environment(given)
    assert np.asarray(found).tobytes() == expected.tobytes()
    one_wider = spaces.Box(np.float32([-1, -1, -2]), np.float32([1, 1, 2]))
    found = ActionUnits(one_wider, device).to_environment(given)
    np.testing.assert_allclose(found, expected * np.float32([1, 1, 2]))


def test_converting_never_writes_into_the_action():
    action = np.array([[5.0, -5.0]], np.float32)
    ActionUnits(ACTIONS["box"]).to_environment(action)
    assert action.tolist() == [[5, -5]]


@pytest.mark.parametrize(
    ("space", "path"),
    [
        (spaces.Text(5), "observation"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(words=spaces.Text(5))), "observation.b.words"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Graph(spaces.Discrete(2), None)]), "observation.1"),
        (spaces.Sequence(spaces.Discrete(2)), "observation"),
    ],
)
def test_unsupported_spaces_are_refused_with_their_path(space, path):
    kind = path.removeprefix("observation")
    with pytest.raises(UsageError, match=rf"^{path} is a (Text|Graph|Sequence) space"):
        specs.observation_spec(space)
    for function in (specs.action_spec, ActionUnits):
        with pytest.raises(UsageError, match=rf"^action{kind} is a (Text|Graph|Sequence) space"):
            function(space)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (1, 5)])
def test_zeros_have_the_leading_dims_shapes_and_dtypes_of_the_stream(leading):
    spec = specs.observation_spec(NESTED)
    for leaf, zeros in zip(nest.leaves(spec), nest.leaves(specs.zeros(spec, leading))):
        assert zeros.shape == (*leading, *leaf.shape)
        assert zeros.dtype == specs.torch_dtype(leaf)
        assert not zeros.any()


def test_rewards_are_scalars_or_vectors():
    assert specs.reward_spec().shape == ()
    assert specs.reward_spec(3).shape == (3,)
    assert specs.reward_spec(3).dtype == np.float32


def test_describe_names_every_leaf():
    assert specs.describe(spaces.Discrete(3)) == "Discrete(3)"
    text = specs.describe(specs.observation_spec(NESTED))
    assert all(path in text for path in ("body.0: Box", "body.1: Discrete(3)", "camera: Box", "switches: MultiBinary"))


EXTREME = {
    "one decimal": spaces.Box(np.float32([-0.3, 0.1, -0.7]), np.float32([0.9, 0.7, 0.1])),
    "float64": spaces.Box(
        np.array([-0.3, 0.1, -1e300, -1.7e308]), np.array([0.9, 0.7, 1e300, 1.7e308]), dtype=np.float64
    ),
    "float16": spaces.Box(np.float16([-0.3, 0.1]), np.float16([0.9, 0.7]), dtype=np.float16),
    "half-bounded float64": spaces.Box(np.array([0.3, -np.inf]), np.array([np.inf, 0.1]), dtype=np.float64),
    "beyond float32": spaces.Box(np.array([-np.inf]), np.array([1e300]), dtype=np.float64),
    "uint8": spaces.Box(0, 255, (2,), np.uint8),
    "int64": spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
    "half-bounded int64": spaces.Box(2**62 + 1, np.inf, (2,), np.int64),
    "a point": spaces.Box(3, 3, (2,), np.int16),
}


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("name", EXTREME)
def test_no_rounding_leads_beyond_the_bounds(name, device):
    space = EXTREME[name]
    units, size = ActionUnits(space, device), space.shape[0]
    rows = [np.full(size, x, np.float32) for x in (-np.inf, -1e30, -1, -0.999, 0.1, 1, 1e30, np.inf)]
    bounds = space.low.astype(np.float64), space.high.astype(np.float64)
    rows += [np.clip(bound, -3e38, 3e38).astype(np.float32) for bound in bounds]
    given = np.stack(rows)
    taken = units.to_environment(given if device is None else torch.from_numpy(given))
    for row in np.asarray(taken):
        assert row.dtype == space.dtype and space.contains(row), row


def test_bounds_of_one_decimal_are_never_left():
    """The ends of [-1, 1] could be rounded to values outside the space."""
    count = 0
    for low in range(-20, 20, 3):
        for high in range(low + 1, 30, 4):
            for dtype in (np.float32, np.float64):
                space = spaces.Box(low / 10, high / 10, (1,), dtype)
                for row in ActionUnits(space).to_environment(np.float32([[-1], [1]])):
                    count += 1
                    assert space.contains(row), (space, row)
    assert count > 300


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_each_integer_has_an_equal_share(device):
    space = spaces.Box(np.array([-1, 0, 7]), np.array([1, 4, 7]), dtype=np.int64)
    grid = np.linspace(-1, 1, 15_001, dtype=np.float32)[:, None].repeat(3, 1)
    taken = np.asarray(ActionUnits(space, device).to_environment(grid if device is None else torch.from_numpy(grid)))
    for column, number in enumerate((3, 5, 1)):
        values, counts = np.unique(taken[:, column], return_counts=True)
        assert len(values) == number and counts.min() >= counts.max() - 2
    units = ActionUnits(space)
    assert np.array_equal(units.to_environment(units.from_environment(taken)), taken)


def test_random_actions_are_within_the_bounds_there_are():
    torch.manual_seed(0)
    low = np.float32([-1, 5, -np.inf, -np.inf, 0.1, -9e29, -np.inf])
    high = np.float32([1, np.inf, -5, np.inf, 0.3, 9e29, 0.5])
    drawn = specs.sample(spaces.Box(low, high), 2000).numpy()
    assert (drawn >= low).all() and (drawn <= high).all() and np.isfinite(drawn).all()
    expected = np.float64([2, 2, 2, 2, 0.2, 1.8e30, 2])
    np.testing.assert_allclose(np.ptp(drawn.astype(np.float64), 0), expected, rtol=0.01)
    torch.manual_seed(3)
    before = -1 + 2 * torch.rand(50, 2)
    torch.manual_seed(3)
    assert torch.equal(specs.sample(spaces.Box(-1, 1, (2,)), 50), before)


NAN_BOUNDS = spaces.Box(-1, 1, (2,), np.float32)
NAN_BOUNDS.low = np.float32([np.nan, -1])


@pytest.mark.parametrize(
    "space, words",
    [
        (
            spaces.Box,
            "the space of action is the class Box; make it an object, such as gymnasium.spaces.Box(-1, 1, (3,))",
        ),
        (3, "the space of action is 3; make it an object, such as gymnasium.spaces.Box(-1, 1, (3,))"),
        (spaces.Dict({}), "the space of action is Dict(), which has no parts; it needs at least one Box or Discrete"),
        (
            spaces.Dict(a=NAN_BOUNDS),
            "the space of action.a has bounds that are nan; write -inf or",
        ),
        (
            spaces.Box(-1, 1, (0,)),
            "the space of action is Box([], [], (0,), float32), which has no entries; leave the leaf out",
        ),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2, 0))]), "the space of action.1 is Box([], [], (2, 0), "),
    ],
)
def test_a_space_without_content_is_refused(space, words):
    with pytest.raises(UsageError) as error:
        specs.action_spec(space)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "value, space, words",
    [
        ([0.5, 2.5, np.nan], spaces.Box(-1, 2, (3,)), "x[1] is 2.5, outside [-1.0, 2.0] (and 1 more)"),
        ([0, np.nan], spaces.Box(-1, 2, (2,)), "x[1] is nan, outside [-1.0, 2.0]"),
        ([0.0] * 3, spaces.Box(-1, 2, (2,)), "x has the shape (3,), but its space has (2,)"),
        (np.float64([0, 0]), spaces.Box(-1, 2, (2,)), "x has dtype float64, but its space has float32"),
        (5, spaces.Discrete(4, start=1), "x is 5, outside [1, 4]"),
        ([0, 3], spaces.MultiDiscrete([2, 3]), "x[1] is 3, outside [0, 2]"),
        ([0, 2], spaces.MultiBinary(2), "x[1] is 2, outside [0, 1]"),
        ({"a": (0, 9)}, spaces.Dict(a=spaces.Tuple([spaces.Discrete(2)] * 2)), "x.a.1 is 9, outside [0, 1]"),
        ([0, 1], spaces.MultiBinary(2), None),
        (np.float64([1 + 2e-16, -1e-9]), spaces.Box(0, 1, (2,), np.float64), None),
        ([-1e4 - 2e-3, 0], spaces.Box(-1e4, np.inf, (2,)), None),
        (np.float64([1 + 1e-5, 0]), spaces.Box(0, 1, (2,), np.float64), "x[0] is 1.00001, outside [0.0, 1.0]"),
    ],
)
def test_values_outside_their_space_are_named(value, space, words):
    value = np.asarray(value, getattr(value, "dtype", space.dtype)) if isinstance(value, list) else value
    assert specs.outside(value, space, "x") == words


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_an_action_of_integers_without_bounds_keeps_its_units(dtype):
    """gymnasium gives such a Box the limits of its dtype, and says that it has no bounds."""
    space = spaces.Box(0, np.inf, (3,), dtype)
    spec, units = specs.action_spec(space), ActionUnits(space)
    assert spec == spaces.Box(0, np.inf, (3,), np.float32)
    recorded = np.array([[7, 3, 0]], dtype)
    np.testing.assert_array_equal(units.from_environment(recorded), [[7, 3, 0]])
    np.testing.assert_array_equal(units.to_environment(np.float32([[7.2, 2.8, -4]])), recorded)
    assert specs.sample(spec, 100).max() <= 2
    with pytest.raises(UsageError, match="requires bounded Box actions"):
        specs.check_box_action("TD3", spec)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_an_action_of_bools_is_true_above_the_middle(device):
    units = ActionUnits(spaces.Box(0, 1, (4,), bool), device)
    action = np.float32([[-0.9, -0.1, 0.1, 0.9]])
    got = units.to_environment(action if device is None else torch.from_numpy(action))
    assert got.tolist() == [[False, False, True, True]]
    assert got.dtype == (bool if device is None else torch.bool)


VAST = [
    (np.finfo(dtype).min if low is None else low, np.finfo(dtype).max, dtype)
    for dtype in (np.float16, np.float32, np.float64)
    for low in (None, np.finfo(dtype).tiny)
    if dtype != np.float16 or low is None
] + [(-1e35, 1e30, np.float32), (-1e308, 1e308, np.float64)]


@pytest.mark.parametrize(("low", "high", "dtype"), VAST)
def test_vast_bounds_of_floats_are_none(low, high, dtype):
    """EnvPool declares the smallest and the largest positive number where it has no bounds."""
    space = spaces.Box(low, high, (2,), dtype)
    action = np.float32([[0, -7]])
    assert ActionUnits(space).to_environment(action).tolist() == [[0, -7]]
    assert not specs.is_bounded(space) and specs.missing_bounds(space) == "no bounds"
    for spec in (specs.action_spec(space), specs.observation_spec(space)):
        assert np.isneginf(spec.low).all() and np.isposinf(spec.high).all()
    assert abs(specs.sample(specs.action_spec(space), 100)).max() <= 1
    assert specs.outside(np.array([-0.5, 3], dtype), space, "observation") is None
    for check in (specs.check_box_action, specs.check_hybrid_action):
        with pytest.raises(UsageError, match="the action has no bounds"):
            check("SAC", space)


def test_moderate_bounds_and_integer_bounds_are_kept():
    for space in (spaces.Box(-1e29, 1e29, (1,), np.float32), spaces.Box(1e-38, 5, (1,), np.float32)):
        assert specs.is_bounded(space) and specs.observation_spec(space) is space
    assert specs.is_bounded(spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64))
    # A bound is lacking only where it is vast.
    units = ActionUnits(spaces.Box(np.float64([0, -1]), np.float64([1e308, 1]), dtype=np.float64))
    assert units.to_environment(np.float32([[-3, -3], [9, 9]])).tolist() == [[0, -1], [9, 1]]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ([0, 0], [np.inf, 1e308], "no upper bound"),
        ([-np.inf, -np.inf], [1, 1], "no lower bound"),
        ([0, -1], [1, np.inf], "bounds missing in 1 of 2 entries (first [1])"),
    ],
)
def test_a_half_bounded_box_is_described_by_its_missing_bound(low, high, words, caplog):
    space = spaces.Box(np.float64(low), np.float64(high), dtype=np.float64)
    with pytest.raises(UsageError) as refusal:
        specs.check_box_action("TD3", specs.action_spec(space))
    assert f"TD3 requires bounded Box actions, but the action has {words} (Box" in str(refusal.value)
    PolicyHead(4, specs.action_spec(space))
    assert f"has {words} (Box" in caplog.text
