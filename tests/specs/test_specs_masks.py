"""Action masks: their layout for any action, what they forbid, and draws from what they allow."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.specs import ActionMask, MaskLayout

NESTED = specs.action_spec(
    spaces.Dict(
        a=spaces.MultiDiscrete([2, 3]),
        b=spaces.Box(-1, 1, (2,), np.float32),
        c=spaces.MultiBinary(2),
        d=spaces.Discrete(3, start=5),
    )
)
ACTIONS = {
    "discrete": (spaces.Discrete(4), 4),
    "multi_discrete": (spaces.MultiDiscrete([2, 3]), 5),
    "bits": (spaces.MultiBinary(3), 6),
    "bits, one entry each": (spaces.MultiBinary(3), 3),
    "nested": (NESTED, 5 + 4 + 3),
    "nested, one entry a bit": (NESTED, 5 + 2 + 3),
}


def masks(size, count=64, seed=0):
    return np.random.default_rng(seed).integers(2, size=(count, size), dtype=np.int8)


def parts_of(leaf):
    """The sizes of a leaf's entries, by hand."""
    if isinstance(leaf, spaces.Discrete):
        return [int(leaf.n)]
    if isinstance(leaf, spaces.MultiDiscrete):
        return leaf.nvec.tolist()
    return [2] * leaf.shape[0] if isinstance(leaf, spaces.MultiBinary) else []


def allowed_by_hand(spec, row):
    """For each entry of each leaf with choices, the set of allowed ones, read from one mask."""
    leaves, row = nest.leaves(spec), row.tolist()
    is_short = len(row) < sum(sum(parts_of(leaf)) for leaf in leaves)
    entries = []
    for leaf in leaves:
        for n in parts_of(leaf):
            if isinstance(leaf, spaces.MultiBinary) and is_short:
                entries.append({0, 1} if row.pop(0) else {0})
            else:
                entries.append({k for k in range(n) if row.pop(0)})
    return entries


@pytest.mark.parametrize("kind", ACTIONS)
def test_forbids_and_is_empty_agree_with_reading_by_hand(kind):
    spec, size = ACTIONS[kind]
    layout, mask = MaskLayout(spec, size, "m"), masks(size)
    by_hand = [allowed_by_hand(spec, row) for row in mask]
    assert layout.is_empty(mask).tolist() == [not all(entries) for entries in by_hand]
    torch.manual_seed(0)
    for _ in range(20):
        action = nest.arrays(specs.sample(spec, len(mask)))
        flat = [leaf.reshape(len(mask), -1) for leaf in nest.leaves(action) if leaf.dtype != np.float32]
        taken = np.concatenate(flat, 1)
        expected = [any(k not in of for k, of in zip(row, entries)) for row, entries in zip(taken, by_hand)]
        assert layout.forbids(mask, action).tolist() == expected


@pytest.mark.parametrize("kind", ACTIONS)
def test_parts_for_the_leaves_of_an_action_allow_the_same(kind):
    spec, size = ACTIONS[kind]
    layout, mask = MaskLayout(spec, size, "m"), masks(size)
    parts = layout.split(torch.from_numpy(mask))
    assert [part is None for part in parts] == [isinstance(leaf, spaces.Box) for leaf in nest.leaves(spec)]
    joined = torch.cat([part for part in parts if part is not None], -1)
    sizes = list(itertools.chain(*map(parts_of, nest.leaves(spec))))
    for row, entries in zip(joined, [allowed_by_hand(spec, row) for row in mask]):
        assert [set(part.nonzero()[:, 0].tolist()) for part in row.split(sizes)] == entries


@pytest.mark.parametrize("kind", ACTIONS)
def test_random_actions_are_allowed(kind):
    spec, size = ACTIONS[kind]
    layout, mask = MaskLayout(spec, size, "m"), masks(size, 500)
    mask = mask[~layout.is_empty(mask)]
    action = specs.sample(spec, len(mask), layout.split(torch.from_numpy(mask)))
    assert not layout.forbids(mask, nest.arrays(action)).any()
    for leaf, own in zip(nest.leaves(spec), nest.leaves(action)):
        assert own.dtype == specs.torch_dtype(leaf) and own.shape == (len(mask), *leaf.shape)


def test_random_choices_are_uniform_over_allowed_choices():
    torch.manual_seed(0)
    mask = torch.tensor([[True, False, True, True, False], [False] * 5, [False, False, False, True, False]])
    drawn = specs.uniform_choice(mask.expand(100_000, 3, 5))
    for row, expected in enumerate(([1 / 3, 0, 1 / 3, 1 / 3, 0], [1 / 5] * 5, [0.0, 0, 0, 1, 0])):
        found = torch.bincount(drawn[:, row], minlength=5) / len(drawn)
        assert torch.allclose(found, torch.tensor(expected), atol=0.006)
        assert ((found > 0) == (torch.tensor(expected) > 0)).all()


def test_mask_specs_are_marked_by_their_space_at_any_depth():
    space = spaces.Dict(game=spaces.Dict(legal=ActionMask(3)), x=spaces.Box(-1, 1, (2,), np.float32))
    spec = specs.observation_spec(space)
    reader = specs.mask_reader(spec, spaces.Discrete(3))
    assert specs.mask_path(spec) == reader.path == ("game", "legal") and reader.name == "observation.game.legal"
    mask = torch.tensor([[1, 0, 1]], dtype=torch.int8)
    assert reader({"game": {"legal": mask}, "x": torch.zeros(1, 2)})[0].tolist() == [[True, False, True]]
    assert specs.mask_reader(specs.observation_spec(space["x"]), spaces.Discrete(3)) is None
    assert repr(ActionMask(3)) == "ActionMask(3)"


@pytest.mark.parametrize(
    ("space", "action", "sentence"),
    [
        (
            spaces.Dict(m=ActionMask(4)),
            spaces.Discrete(3),
            "observation.m is an action mask of 4 entries, .* 3 choices",
        ),
        (spaces.Dict(m=ActionMask(4)), spaces.MultiBinary(3), "has 6 choices, or 3 with one for each bit"),
        (spaces.Dict(m=ActionMask(1)), spaces.Box(-1, 1, (1,)), "has no choices; leave the mask out"),
        (spaces.Dict(l=ActionMask(3), m=ActionMask(3)), spaces.Discrete(3), "observation.l and observation.m are"),
    ],
)
def test_masks_that_do_not_fit_are_refused(space, action, sentence):
    with pytest.raises(UsageError, match=sentence):
        specs.mask_reader(specs.observation_spec(space), specs.action_spec(action))
