"""What holds for every memory, and what only holds for those that are not gated: MinGRU, AttentionWindow, stacks."""

import functools

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.algorithms.acting import reset_state
from alfish.configuration import reading
from alfish.data import StepType
from alfish.errors import UsageError
from alfish.networks import GRU, LSTM, AttentionWindow, MinGRU, StackedMemory, Torso

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
T, N, F, H = 11, 5, 3, 4
WINDOW = functools.partial(AttentionWindow, size=H, length=4, num_heads=2)
KINDS = {
    "GRU": functools.partial(GRU, size=H),
    "LSTM": functools.partial(LSTM, size=H),
    "MinGRU": functools.partial(MinGRU, size=H),
    "AttentionWindow": WINDOW,
    "a window longer than the rows": functools.partial(WINDOW, length=30),
    "two GRUs": functools.partial(StackedMemory, layers=[functools.partial(GRU, size=H)] * 2, residual=True),
    "a stack of all": functools.partial(
        StackedMemory,
        layers=[functools.partial(LSTM, size=3), functools.partial(MinGRU, size=6), WINDOW],
    ),
}
kinds = pytest.mark.parametrize("name", KINDS)


def make(name, seed=0):
    torch.manual_seed(seed)
    memory = KINDS[name](F).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_(std=0.5)
    return memory


def initial(memory, batch_size=N):
    return nest.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, memory.initial_state(batch_size))


def some_rows(share=0.2, seed=0, num_rows=T):
    """Features and step types, of which about a share is FIRST; also LAST and PAD rows, which change nothing."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.randint(MID, PAD + 1, (num_rows, N), generator=generator)
    step_type[torch.rand(step_type.shape, generator=generator) < share] = FIRST
    return torch.randn(num_rows, N, F, generator=generator, dtype=torch.float64), step_type.int()


def step_by_step(memory, features, state, step_type):
    """As an unroller does: reset, one step, carry on."""
    outputs, empty = [], initial(memory)
    for row, kind in zip(features, step_type):
        output, state = memory(row, reset_state(state, empty, kind), kind)
        outputs.append(output)
    return torch.stack(outputs), state


def a_state(memory):
    """The state after some rows, which differ in the number since the episode began."""
    with torch.no_grad():
        return step_by_step(memory, *some_rows(seed=1)[:1], initial(memory), some_rows(seed=1)[1])[1]


def assert_same(found, expected):
    for a, b in zip(nest.leaves(found), nest.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@kinds
@pytest.mark.parametrize("num_rows", [1, 2, T])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_rows_at_once_equal_single_steps_in_outputs_and_gradients(name, share, num_rows):
    memory = make(name)
    features, step_type = some_rows(share, num_rows=num_rows)
    carried = a_state(memory)
    floats = [leaf.requires_grad_() for leaf in nest.leaves(carried) if leaf.is_floating_point()]
    wrt = [features.requires_grad_(), *floats, *memory.parameters()]
    results, gradients = [], []
    for way in (memory, functools.partial(step_by_step, memory)):
        output, after = way(features, carried, step_type)
        torch.manual_seed(0)
        each = [output, *(leaf for leaf in nest.leaves(after) if leaf.is_floating_point())]
        loss = sum((leaf * torch.randn(leaf.shape, dtype=leaf.dtype)).sum() for leaf in each)
        results.append((output, after))
        found = torch.autograd.grad(loss, wrt, allow_unused=True, materialize_grads=True)
        # Zeros of a state stand where a window has no row, and their gradient reaches nothing.
        gradients.append([gradient * (leaf != 0) for gradient, leaf in zip(found, wrt)])
    assert_same(*results)
    assert_same(*gradients)
    with torch.no_grad():  # by another kernel
        assert_same(memory(features, carried, step_type), results[1])


@kinds
@pytest.mark.parametrize("row", [0, 1, T // 2, T - 1])
def test_nothing_and_no_gradient_goes_across_a_first_row(name, row):
    memory = make(name)
    features, step_type = some_rows(0.0)
    step_type[row] = FIRST
    carried = a_state(memory)
    floats = [leaf.requires_grad_() for leaf in nest.leaves(carried) if leaf.is_floating_point()]
    output, after = memory(features.requires_grad_(), carried, step_type)
    of_features, *of_state = torch.autograd.grad(output[row:].sum(), [features, *floats], allow_unused=True)
    assert not of_features[:row].any() and of_features[row:].any()
    assert all(gradient is None or not gradient.any() for gradient in of_state)
    fresh = memory(features[row:], initial(memory), step_type[row:])
    assert_same((output[row:], after), fresh)


@kinds
def test_the_state_matters_until_an_episode_begins(name):
    memory = make(name)
    features, step_type = some_rows(0.0)
    carried = a_state(memory)
    output, forgetful = (memory(features, state, step_type)[0] for state in (carried, initial(memory)))
    assert not torch.allclose(output[0], forgetful[0], atol=1e-3)


@kinds
def test_a_new_memory_starts_from_zeros_and_its_outputs_are_of_order_1(name):
    torch.manual_seed(0)
    memory = KINDS[name](64)
    state = memory.initial_state(100)
    assert all(len(leaf) == 100 and not leaf.any() for leaf in nest.leaves(state))
    features, step_type = torch.randn(20, 100, 64), torch.full((20, 100), MID, dtype=torch.int32)
    output, _ = memory(features, state, step_type)
    assert output.shape == (20, 100, memory.output_size) and 0.1 < output[-1].std() < 3


def test_a_step_of_a_min_gru_is_that_by_hand():
    memory = make("MinGRU")
    features, state = torch.randn(N, F, dtype=torch.float64), torch.randn(N, H, dtype=torch.float64)
    update, candidate = (features @ memory.weight.T + memory.bias).split(H, -1)
    z = 1 / (1 + torch.exp(-update))
    output, after = memory(features, state, torch.full((N,), MID))
    torch.testing.assert_close(output, (1 - z) * state + z * candidate)
    assert after is output


@pytest.mark.parametrize("timescale", [2.0, 32.0])
def test_units_of_a_min_gru_begin_with_evenly_spaced_timescales(timescale):
    memory = MinGRU(F, 5, timescale)
    gate, _ = memory.bias.chunk(2)
    torch.testing.assert_close(1 / torch.sigmoid(gate), torch.linspace(2, timescale, 5))


def test_a_scan_over_many_rows_with_closed_gates_stays_finite():
    memory = make("MinGRU")
    with torch.no_grad():
        memory.weight.mul_(100)
    features, step_type = some_rows(0.01, num_rows=2000)
    output, _ = memory(features.requires_grad_(), a_state(memory), step_type)
    (gradient,) = torch.autograd.grad(output.sum(), features)
    assert output.isfinite().all() and gradient.isfinite().all()


def attention_by_hand(memory, rows, num_heads=2):
    """The last row's output: each head by loops, as the paper has it; `rows` `[W, F]`, the oldest first."""

    def normalized(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def linear(layer, x):
        bias = 0 if layer.bias is None else layer.bias.detach().numpy()
        return x @ layer.weight.detach().numpy().T + bias

    inputs = normalized(rows)
    query, key, value = (linear(layer, inputs) for layer in (memory.query, memory.key, memory.value))
    found, size = [], H // num_heads
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        score = np.array([query[-1, part] @ key[k, part] / np.sqrt(size) for k in range(len(rows))])
        score += memory.position_bias[head].detach().numpy()[-len(rows) :]
        weight = np.exp(score) / np.exp(score).sum()
        found.append(weight @ value[:, part])
    x = linear(memory.skip, rows[-1]) + linear(memory.output, np.concatenate(found))
    return x + linear(memory.down, np.maximum(linear(memory.up, normalized(x)), 0))


def test_attention_equals_a_hand_computed_example():
    memory = make("AttentionWindow")
    features, step_type = some_rows(0.0)
    step_type[3] = FIRST
    output, (kept, count) = memory(features, initial(memory), step_type)
    for row, begin in ((0, 0), (2, 0), (3, 3), (5, 3), (6, 3), (7, 4), (10, 7)):
        expected = attention_by_hand(memory, features[begin : row + 1, 0].numpy())
        np.testing.assert_allclose(output[row, 0].detach().numpy(), expected, atol=1e-10)
    assert kept.shape == (N, 3, F) and count.tolist() == [3] * N


def test_a_window_keeps_zeros_where_its_episode_has_no_row():
    memory = make("AttentionWindow")
    features, step_type = some_rows(0.0)
    step_type[-2] = FIRST
    _, (kept, count) = memory(features, initial(memory), step_type)
    assert count.tolist() == [2] * N and count.dtype == torch.int32
    assert not kept[:, 0].any() and kept[:, 1:].all()


def test_equal_sizes_need_no_interpolation_weights():
    assert isinstance(AttentionWindow(8, 8).skip, nn.Identity)
    assert AttentionWindow(6, 8).skip.weight.shape == (8, 6)


def test_rows_before_the_unroll_train_keys_and_values():
    memory = make("AttentionWindow")
    features, step_type = some_rows(0.0)
    _, state = memory(features, initial(memory), step_type)
    alone = memory(features[:1], nest.map(torch.Tensor.detach, state), step_type[:1])[0]
    gradients = torch.autograd.grad(alone[0, 0].sum(), [memory.key.weight, memory.value.weight])
    with torch.no_grad():
        empty = memory(features[:1], initial(memory), step_type[:1])[0]
    assert all(gradient.any() for gradient in gradients) and not torch.allclose(alone, empty)


def test_stacked_memories_pass_features_and_keep_separate_states():
    first, second = GRU(F, H), LSTM(H, H)
    stack = StackedMemory(F, [lambda size: first, lambda size: second], residual=True)
    assert stack.output_size == H
    features, step_type = some_rows()
    features = features.float()
    between, of_first = first(features, first.initial_state(N), step_type)
    output, of_second = second(between, second.initial_state(N), step_type)
    found, state = stack(features, stack.initial_state(N), step_type)
    torch.testing.assert_close(found, between + output)
    assert_same(state, (of_first, of_second))
    plain = StackedMemory(F, [lambda size: first, lambda size: second])
    torch.testing.assert_close(plain(features, plain.initial_state(N), step_type)[0], output)


def test_layers_of_a_stack_have_settings_of_their_own_in_gin():
    lines = [
        "actor/Torso.memory = @StackedMemory",
        "actor/StackedMemory.layers = [@GRU, @first/GRU, @AttentionWindow]",
        "actor/GRU.size = 8",
        "first/GRU.size = 12",
        "AttentionWindow.size = 6",
        "AttentionWindow.num_heads = 3",
    ]
    with reading.preserved():
        gin.parse_config(lines)
        with gin.config_scope("actor"):
            torso = Torso(spaces.Box(-1, 1, (F,), np.float32))
    assert [layer.output_size for layer in torso.memory.layers] == [8, 12, 6] and torso.output_size == 6


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (
            lambda: AttentionWindow(F, 64, num_heads=5),
            r"size is 64, which is not a multiple of .*num_heads = 5; change",
        ),
        (lambda: AttentionWindow(F, length=1), "AttentionWindow.length is 1; it must be an integer of at least 2"),
        (lambda: MinGRU(F, timescale=1), "MinGRU.timescale is 1; it must be a number of at least 2"),
        (lambda: StackedMemory(F, []), "StackedMemory.layers is empty; name at least one memory"),
        (lambda: StackedMemory(F, GRU), "StackedMemory.layers .* must be a list"),
        (lambda: StackedMemory(F, [GRU, nn.Linear]), r"StackedMemory.layers\[1\] cannot be called as the shipped"),
        (
            lambda: StackedMemory(F, [GRU, functools.partial(GRU, size=H)], residual=True),
            r"residual is True, but StackedMemory.layers\[1\] returns 4 features for 64 inputs; give all layers",
        ),
    ],
)
def test_what_is_no_memory_is_refused_in_one_sentence(factory, words):
    with pytest.raises(UsageError, match=words):
        factory()
