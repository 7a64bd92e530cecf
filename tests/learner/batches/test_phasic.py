from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_batches import _bind, _experience

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import UnrollUse
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, PhasicBatches, take
from alfish.transforms import Transforms


def bound(source, num_rows=5, num_envs=3, has_state=False):
    """Binds a source to an algorithm whose hooks mark their rows."""
    algorithm = SimpleNamespace(
        progress=torch.zeros(()),
        has_state=has_state,
        unroll_use=UnrollUse(single_epoch=False, has_auxiliary_phase=True),
        preprocess_experience=lambda rows: rows._replace(info={"policy": rows.action}),
        preprocess_auxiliary=lambda rows: rows._replace(info={"auxiliary": rows.action}),
    )
    observation_spec = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    source.bind(algorithm, Transforms([], observation_spec, specs.reward_spec()), num_rows - 1, num_envs)
    return source


def numbered(k, **options):
    """The k-th unroll: its rows are numbered from 1000 k on."""
    experience = _experience(**options)
    return experience._replace(action=experience.action + 1000 * k)


def iteration(source, k, **options):
    """Adds the k-th unroll; returns the numbers of the rows of each minibatch, of the policy and of the phase."""
    source.add(numbered(k, **options))
    batches = [take(chunk.source, index) for chunk in source.chunks(0) for index in chunk.minibatches()]
    found = {"policy": [], "auxiliary": []}
    for batch in batches:
        (name,) = batch.experience.info
        found[name].append(batch.experience.action)
    return found


def rows_of(*unrolls):
    return [1000 * k + 10 * t + b for k in unrolls for t in range(4) for b in range(3)]


def sorted_rows(minibatches):
    return sorted(torch.cat([rows.reshape(-1) for rows in minibatches]).tolist())


def test_a_phase_has_every_row_of_the_last_unrolls_once_in_an_epoch():
    torch.manual_seed(0)
    source = bound(
        PhasicBatches(num_epochs=1, minibatch_size=4, num_unrolls=3, num_auxiliary_epochs=2, auxiliary_minibatch_size=6)
    )
    for k in range(1, 7):
        found = iteration(source, k)
        assert sorted_rows(found["policy"]) == rows_of(k)
        if k % 3:
            assert found["auxiliary"] == []
            continue
        assert [rows.shape for rows in found["auxiliary"]] == [(1, 6)] * 12
        for epoch in (found["auxiliary"][:6], found["auxiliary"][6:]):
            assert sorted_rows(epoch) == rows_of(k - 2, k - 1, k)
        assert not torch.equal(*(torch.cat(rows, 1) for rows in (found["auxiliary"][:6], found["auxiliary"][6:])))
    assert source.updates_per_iteration == 3 + 2 * 6 / 3


def test_the_period_may_be_shorter_than_what_is_kept():
    source = bound(PhasicBatches(num_epochs=1, num_unrolls=3, auxiliary_period=2, num_auxiliary_epochs=1))
    found = [iteration(source, k)["auxiliary"] for k in range(1, 8)]
    phases = {k: sorted_rows(phase) for k, phase in enumerate(found, 1) if phase}
    assert phases == {3: rows_of(1, 2, 3), 5: rows_of(3, 4, 5), 7: rows_of(5, 6, 7)}


def test_with_memory_sequences_come_with_their_states():
    source = bound(
        PhasicBatches(num_epochs=1, num_unrolls=2, num_auxiliary_epochs=1, auxiliary_minibatch_size=24), has_state=True
    )
    source.add(numbered(1, has_state=True))
    list(source.chunks(0))
    source.add(numbered(2, has_state=True))
    *_, chunk = source.chunks(0)
    batch = take(chunk.source, chunk.index[0])
    assert batch.experience.action.shape == (4, 6)
    assert batch.experience.state["h"][:, 0].tolist() == (batch.experience.action[0] % 10).tolist()


def test_an_unroller_may_write_into_its_unroll_later():
    source = bound(PhasicBatches(num_epochs=1, num_unrolls=2, num_auxiliary_epochs=1))
    unroll = numbered(1)
    source.add(unroll)
    list(source.chunks(0))
    for leaf in nest.leaves(unroll):
        if leaf.is_contiguous():
            leaf.zero_()
    assert sorted_rows(iteration(source, 2)["auxiliary"]) == rows_of(1, 2)


def test_a_source_that_loads_a_state_makes_the_same_phases():
    def make():
        return bound(PhasicBatches(num_epochs=1, minibatch_size=4, num_unrolls=3, num_auxiliary_epochs=2))

    whole = make()
    for k in (1, 2):
        iteration(whole, k)
    state = nest.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, whole.state_dict())
    resumed = make()
    resumed.load_state_dict(state)
    for k in (3, 4, 5, 6):
        found = []
        for source in (whole, resumed):
            torch.manual_seed(k)
            found.append(iteration(source, k))
        assert nest.paths(found[0]) == nest.paths(found[1])
        assert all(map(torch.equal, nest.leaves(found[0]), nest.leaves(found[1])))
        assert bool(found[0]["auxiliary"]) == (k % 3 == 0)


def test_unrolls_of_another_form_in_a_checkpoint_are_refused():
    whole = bound(PhasicBatches(num_epochs=1, num_unrolls=3))
    iteration(whole, 1)
    resumed = bound(PhasicBatches(num_epochs=1, num_unrolls=3), num_envs=2)
    resumed.load_state_dict(whole.state_dict())
    with pytest.raises(UsageError, match="keeps unrolls of another length, or of another number of environments"):
        resumed.add(numbered(2, num_envs=2))


def test_the_phase_waits_until_updates_begin():
    """During calibration unrolls are added, and nothing is trained."""
    source = bound(PhasicBatches(num_epochs=1, num_unrolls=2, num_auxiliary_epochs=1))
    for k in range(1, 4):
        source.add(numbered(k))
    found = [iteration(source, k)["auxiliary"] for k in range(4, 6)]
    assert found[0] == [] and sorted_rows(found[1]) == rows_of(4, 5)


def test_algorithm_and_source_must_both_have_the_phase():
    with pytest.raises(UsageError, match="has no preprocess_auxiliary; train with PPG, bind Trainer.batches = @Epoch"):
        _bind(PhasicBatches())
    algorithm = SimpleNamespace(unroll_use=UnrollUse(has_auxiliary_phase=True))
    with pytest.raises(UsageError, match="for which EpochBatches has no minibatches; bind Trainer.batches = @Phasic"):
        EpochBatches().bind(algorithm, None, 4, 3)
    with pytest.raises(UsageError, match="it must be a divisor of the 24 rows of 2 unrolls"):
        bound(PhasicBatches(num_unrolls=2, auxiliary_minibatch_size=7))
    gaps = PhasicBatches()
    gaps.expected_rows = 4.0
    with pytest.raises(UsageError, match="whose columns are complete"):
        bound(gaps)


def test_what_the_hook_returns_is_checked():
    source = bound(PhasicBatches(num_epochs=1, num_unrolls=1))
    source.algorithm.preprocess_auxiliary = lambda rows: rows._replace(info=torch.zeros(2))
    source.add(numbered(1))
    with pytest.raises(UsageError, match="preprocess_auxiliary of SimpleNamespace returned info, a tensor of shape"):
        list(source.chunks(0))
