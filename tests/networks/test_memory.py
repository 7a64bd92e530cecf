"""Memory: the same cells as torch's, the same through rows as step by step, and nothing kept across a FIRST row."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.acting import reset_state
from alfish.data import StepType, TimeStep
from alfish.networks import GRU, LSTM, MLP, ActorCritic, QNetwork, Torso, burn_in_state
from alfish.networks.memory import cut

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
T, N, F, H = 9, 5, 3, 4
kinds = pytest.mark.parametrize("kind", [GRU, LSTM])


def make(kind, seed=0):
    torch.manual_seed(seed)
    memory = kind(F, H)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_(std=0.5)
    return memory


def a_state(memory, batch_size=N):
    """Not the initial one."""
    return nest.map(lambda leaf: torch.randn_like(leaf), memory.initial_state(batch_size))


def some_rows(share, seed=0, num_rows=T, num_columns=N):
    """Features and step types, of which about a share is FIRST; also LAST and PAD rows, which change nothing."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(MID, PAD + 1, (num_rows, num_columns), generator=generator)
    kinds[torch.rand(kinds.shape, generator=generator) < share] = FIRST
    return torch.randn(num_rows, num_columns, F, generator=generator), kinds.int()


def step_by_step(memory, features, state, step_type):
    """As an unroller does: reset, one step, carry on."""
    outputs, initial = [], memory.initial_state(features.shape[1])
    for row, kind in zip(features, step_type):
        output, state = memory(row, reset_state(state, initial, kind), kind)
        outputs.append(output)
    return torch.stack(outputs), state


@pytest.mark.parametrize(("kind", "cell"), [(GRU, nn.GRUCell), (LSTM, nn.LSTMCell)])
def test_a_step_equals_torchs_cell(kind, cell):
    memory, reference = make(kind), cell(F, H)
    names = {"weight_ih": "input_weight", "weight_hh": "hidden_weight", "bias_ih": "input_bias",
             "bias_hh": "hidden_bias"}  # fmt: skip
    reference.load_state_dict({theirs: getattr(memory, ours) for theirs, ours in names.items()})
    features, state = torch.randn(N, F), a_state(memory)
    output, after = memory(features, state, torch.full((N,), MID))
    expected = reference(features, state)
    for leaf, other in zip(nest.leaves(after), nest.leaves(expected), strict=True):
        torch.testing.assert_close(leaf, other)
    assert output is nest.leaves(after)[0]


@kinds
def test_a_new_memory_is_orthogonal_and_starts_from_zeros(kind):
    torch.manual_seed(0)
    memory = kind(F, H)
    assert memory.output_size == H and all(not leaf.any() for leaf in nest.leaves(memory.initial_state(2)))
    for gate in memory.hidden_weight.detach().chunk(memory.num_gates):
        torch.testing.assert_close(gate @ gate.T, torch.eye(H), atol=1e-5, rtol=0)
    biases = memory.input_bias.detach() + memory.hidden_bias.detach()
    assert biases.tolist() == ([0.0] * 12 if kind is GRU else [0.0] * 4 + [1.0] * 4 + [0.0] * 8)


@kinds
@pytest.mark.parametrize("share", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("way", ["forward", "row_by_row", "in_pieces"])
def test_rows_equal_steps_with_states_reset_at_first_rows(kind, share, way):
    memory = make(kind)
    features, step_type = some_rows(share)
    state = a_state(memory)
    expected = step_by_step(memory, features, state, step_type)
    how = cut(step_type) if way == "in_pieces" else step_type
    found = getattr(memory, way)(features, state, how)
    for a, b in zip(nest.leaves(found), nest.leaves(expected), strict=True):
        torch.testing.assert_close(a, b)
    assert (nest.leaves(expected[1])[0] == expected[0][-1]).all()


@kinds
@pytest.mark.parametrize("share", [0.0, 0.15, 0.6])
def test_both_ways_have_the_same_gradients(kind, share):
    memory = make(kind)
    features, step_type = some_rows(share)
    state = nest.map(lambda leaf: leaf.requires_grad_(), a_state(memory))
    features.requires_grad_()
    wrt = [features, *nest.leaves(state), *memory.parameters()]
    weights = torch.randn(T, N, H)
    gradients = []
    for output, after in (
        memory.row_by_row(features, state, step_type),
        memory.in_pieces(features, state, cut(step_type)),
    ):
        loss = (output * weights).sum() + sum(leaf.square().sum() for leaf in nest.leaves(after))
        gradients.append(torch.autograd.grad(loss, wrt))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@kinds
@pytest.mark.parametrize("enabled", [True, False])
def test_the_fused_kernel_expects_gradients_in_eval_mode(kind, enabled, monkeypatch):
    """cuDNN computes no gradients otherwise; diagnostics take them in eval mode."""
    memory, modes = make(kind).eval(), []
    kernel = kind.fused

    def recorded(*arguments):
        modes.append(arguments[7])
        return kernel(*arguments)

    monkeypatch.setattr(kind, "fused", staticmethod(recorded))
    features, step_type = some_rows(0.15)
    with torch.set_grad_enabled(enabled):
        memory.in_pieces(features, a_state(memory), cut(step_type))
    assert modes == [enabled]


@kinds
@pytest.mark.parametrize("way", ["row_by_row", "in_pieces"])
def test_nothing_and_no_gradient_goes_across_a_first_row(kind, way):
    memory = make(kind)
    features, step_type = some_rows(0.0)
    step_type[4] = FIRST
    features.requires_grad_()
    state = nest.map(lambda leaf: leaf.requires_grad_(), a_state(memory))
    output, _ = getattr(memory, way)(features, state, cut(step_type) if way == "in_pieces" else step_type)
    of_features, *of_state = torch.autograd.grad(output[4:].sum(), [features, *nest.leaves(state)])
    assert not of_features[:4].any() and not any(gradient.any() for gradient in of_state)
    of_features, *of_state = torch.autograd.grad(
        getattr(memory, way)(features, state, cut(step_type) if way == "in_pieces" else step_type)[0][3].sum(),
        [features, *nest.leaves(state)],
    )
    assert of_features[0].all() and not of_features[4:].any() and all(gradient.any() for gradient in of_state)


def test_rows_are_cut_only_before_first_rows():
    rows = [[MID, FIRST], [LAST, MID], [FIRST, LAST], [MID, PAD], [FIRST, PAD]]
    pieces = cut(torch.tensor(rows, dtype=torch.int32))
    assert pieces.column.tolist() == [0, 0, 0, 1] and pieces.row.tolist() == [0, 2, 4, 0]
    assert pieces.length.tolist() == [2, 2, 1, 5] and pieces.begins.tolist() == [False, True, True, True]


def test_the_memory_implementation_depends_on_the_longest_piece():
    def piece_lengths(*lengths):
        step_type = torch.full((12, 2), MID, dtype=torch.int32)
        at = 0
        for length in lengths:
            step_type[at] = FIRST
            at += length
        return cut(step_type)

    for kind, whole in ((GRU, False), (LSTM, True)):
        memory = kind(F, H)
        assert memory.pieces_pay(piece_lengths(12), 12) == whole
        assert not memory.pieces_pay(piece_lengths(7, 5), 12)
        assert memory.pieces_pay(piece_lengths(6, 6), 12)
    assert not GRU(F, 200).pieces_pay(piece_lengths(6, 6), 12)


# Networks that stand on it.

REMEMBERING = functools.partial(Torso, mlp=functools.partial(MLP, layers=(6,)))


def time_steps(seed=0, share=0.2):
    features, step_type = some_rows(share, seed)
    return TimeStep(step_type, None, None, features, None, None)


NETWORKS = {
    "shared": {"shared_torso": True},
    "two": {},
    "actor's alone": {"critic_torso": REMEMBERING},
    "critic's alone": {"actor_torso": REMEMBERING},
}


def actor_critic(name, kind=GRU):
    torch.manual_seed(0)
    memory = functools.partial(REMEMBERING, memory=functools.partial(kind, size=H))
    settings = {"actor_torso": memory, "critic_torso": memory, **NETWORKS[name]}
    network = ActorCritic(OBSERVATION, spaces.Discrete(3), specs.reward_spec(), **settings)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


@kinds
@pytest.mark.parametrize("name", NETWORKS)
def test_acting_carries_what_training_needs(name, kind):
    """Both memories are carried by `policy` alone, and both at once start from what it carried."""
    network, rows = actor_critic(name, kind), time_steps()
    initial = network.initial_state(N)
    state, states, log_p = initial, [], []
    for t in range(T):
        here = nest.at(rows, t)
        state = reset_state(state, initial, here.step_type)
        states.append(state)
        policy, state = network.policy(here, state)
        log_p.append(policy.log_p)
    assert nest.paths(state) == nest.paths(initial)
    (policy, value, _), after = network(rows, initial)
    torch.testing.assert_close(policy.log_p, torch.stack(log_p))
    torch.testing.assert_close(network.value(rows, initial), value)
    for a, b in zip(nest.leaves(after), nest.leaves(state), strict=True):
        torch.testing.assert_close(a, b)
    # From the middle, with the state that acting carried there.
    (later_policy, later_value, _), _ = network(nest.at(rows, slice(4, None)), states[4])
    torch.testing.assert_close(later_policy.log_p, policy.log_p[4:])
    torch.testing.assert_close(later_value, value[4:])
    # And that state does matter.
    (_, forgetful, _), _ = network(nest.at(rows, slice(4, None)), initial)
    assert torch.equal(forgetful, later_value) == (name == "actor's alone")


def test_without_memory_the_state_goes_through_untouched():
    network = ActorCritic(OBSERVATION, spaces.Discrete(3), specs.reward_spec())
    assert network.initial_state(2) is None and QNetwork(OBSERVATION, 3).initial_state(2) is None
    noise = torch.zeros(N)
    assert network.policy(time_steps(), noise)[1] is noise and network(time_steps(), noise)[1] is noise
    assert QNetwork(OBSERVATION, 3)(time_steps(), noise)[1] is noise


def test_rows_that_only_warm_up_change_the_state_without_gradient():
    memory = functools.partial(REMEMBERING, memory=GRU)
    network = QNetwork(OBSERVATION, 3, torso=memory)
    rows, state = time_steps(), a_state(network.torso.memory)
    assert burn_in_state(network, None, state) is state
    warm = burn_in_state(network, nest.at(rows, slice(0, 4)), state)
    assert not warm.requires_grad
    q, _ = network(nest.at(rows, slice(4, None)), warm)
    torch.testing.assert_close(q, network(rows, state)[0][4:])
