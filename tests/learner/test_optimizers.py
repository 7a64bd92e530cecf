"""Our optimizers against torch's, on flat vectors."""

import copy
import itertools
from functools import partial

import pytest
import torch

from alfish.errors import UsageError
from alfish.learner.optimizers import Adam, RAdam, RMSprop, TorchOptimizer, make_optimizer

FACTORIES = {
    "torch's by name": (partial(TorchOptimizer, optimizer="NAdam"), torch.optim.NAdam),
    "adam": (Adam, torch.optim.Adam),
    "adam, other betas": (
        partial(Adam, betas=(0.8, 0.95), eps=1e-5),
        partial(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-5),
    ),
    "adam with decay": (partial(Adam, weight_decay=0.1), partial(torch.optim.AdamW, weight_decay=0.1)),
    "radam": (RAdam, torch.optim.RAdam),
    "radam, short": (partial(RAdam, betas=(0.8, 0.95)), partial(torch.optim.RAdam, betas=(0.8, 0.95))),
    "rmsprop": (RMSprop, partial(torch.optim.RMSprop, alpha=0.99, eps=1e-5)),
    "rmsprop, other decay": (partial(RMSprop, decay=0.9, eps=0.1), partial(torch.optim.RMSprop, alpha=0.9, eps=0.1)),
    "sgd": (partial(TorchOptimizer, optimizer=partial(torch.optim.SGD, momentum=0.9)),
            partial(torch.optim.SGD, momentum=0.9)),
    "torch's adam": (partial(TorchOptimizer, optimizer=torch.optim.Adam), torch.optim.Adam),
}  # fmt: skip
OURS = ["adam", "adam with decay", "radam", "rmsprop", "sgd", "torch's adam"]
FLAGS = {"looked at": None, "on the device": torch.ones(())}


def _parameters(*sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    for flat in flats:
        flat.grad = torch.zeros_like(flat)
    return flats


def _train(optimizer, flats, steps, seed=0, is_applied=None, learning_rate=lambda t: 0.01 / (1 + t)):
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        for flat in flats:
            flat.grad.copy_(torch.randn(flat.shape, generator=generator) * 10 ** (t % 5 - 3))
        optimizer.step(learning_rate(t), is_applied)


@pytest.mark.parametrize("is_applied", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("name", FACTORIES)
def test_fifty_steps_are_torchs(name, is_applied):
    ours, torchs = FACTORIES[name]
    mine, expected = _parameters(7, 3), [flat.clone().requires_grad_() for flat in _parameters(7, 3)]
    _train(ours(mine), mine, 50, is_applied=is_applied)
    optimizer = torchs(expected, lr=0.0)
    generator = torch.Generator().manual_seed(0)
    for t in range(50):
        for parameter in expected:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10 ** (t % 5 - 3)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + t)
        optimizer.step()
    for got, wanted in zip(mine, expected):
        torch.testing.assert_close(got, wanted.detach(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("is_applied", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("factory", [Adam, RMSprop])
def test_float64_parameters_train_as_float64(factory, is_applied):
    single, double = _parameters(5), _parameters(5, dtype=torch.float64)
    for flats in (single, double):
        _train(factory(flats), flats, 20, is_applied=is_applied)
    assert double[0].dtype == torch.float64
    torch.testing.assert_close(double[0].float(), single[0], atol=1e-5, rtol=1e-5)


def test_the_first_step_of_adam_is_the_learning_rate():
    (flat,) = flats = [torch.zeros(3)]
    flat.grad = torch.tensor([1e-3, -5.0, 0.0])
    Adam(flats).step(0.1)
    torch.testing.assert_close(flat, torch.tensor([-0.1, 0.1, 0.0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OURS)
def test_a_discarded_update_changes_no_parameter_or_moment(name):
    for poison, begun in itertools.product((0.0, 3.0, float("nan"), float("inf")), (0, 5)):
        flats = _parameters(4, 2)
        optimizer = FACTORIES[name][0](flats)
        _train(optimizer, flats, begun)
        before = copy.deepcopy((flats, optimizer.state_dict()))
        for flat in flats:
            flat.grad.fill_(poison)
        for _ in range(3):
            optimizer.step(0.1, torch.zeros(()))
        for was, flat in zip(before[0], flats):
            assert torch.equal(was, flat), (poison, begun)
        for key in ("first", "second"):
            for was, moment in zip(before[1].get(key, ()), optimizer.state_dict().get(key, ())):
                assert torch.equal(was, moment), (poison, begun)


@pytest.mark.parametrize("begun", [0, 5])
@pytest.mark.parametrize("name", OURS)
def test_training_continues_after_a_skipped_update(name, begun):
    flats = _parameters(4)
    optimizer = FACTORIES[name][0](flats)
    _train(optimizer, flats, begun)
    flats[0].grad.fill_(float("nan"))
    optimizer.step(0.1, torch.zeros(()))
    before = flats[0].clone()
    _train(optimizer, flats, 5, is_applied=torch.ones(()))
    assert torch.isfinite(flats[0]).all()
    assert ((flats[0] - before).abs() > 0).all()
    assert (flats[0] - before).abs().max() < 1


@pytest.mark.parametrize("name", OURS)
def test_a_restored_optimizer_continues_bit_for_bit(name):
    make = FACTORIES[name][0]
    flats = _parameters(6, 2)
    optimizer = make(flats)
    _train(optimizer, flats, 7)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [flat.clone() for flat in flats]
    _train(optimizer, flats, 7, seed=1)
    again = _parameters(6, 2, seed=5)
    restored = make(again)
    _train(restored, again, 3, seed=9)
    for flat, weight in zip(again, weights):
        flat.copy_(weight)
    restored.load_state_dict(saved)
    _train(restored, again, 7, seed=1)
    for flat, expected in zip(again, flats):
        assert torch.equal(flat, expected)


@pytest.mark.parametrize("factory", [Adam, RMSprop])
def test_loading_copies_the_state(factory):
    flats, other_flats = _parameters(3), _parameters(3)
    optimizer, other = factory(flats), factory(other_flats)
    _train(optimizer, flats, 3)
    other.load_state_dict(optimizer.state_dict())
    before = optimizer.state_dict()["second"][0].clone()
    _train(other, other_flats, 3)
    assert torch.equal(optimizer.state_dict()["second"][0], before)


@pytest.mark.parametrize("factory", [Adam, RMSprop])
def test_state_of_another_number_of_vectors_is_refused(factory):
    with pytest.raises((ValueError, RuntimeError), match="zip|size of tensor"):
        factory(_parameters(3)).load_state_dict(factory(_parameters(3, 2)).state_dict())


@pytest.mark.parametrize("factory", [Adam, RMSprop])
def test_state_survives_weights_only_loading(factory, tmp_path):
    flats = _parameters(3)
    optimizer = factory(flats)
    _train(optimizer, flats, 2)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = factory(_parameters(3))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other.state_dict()["second"][0], optimizer.state_dict()["second"][0])


def test_an_object_that_is_not_an_optimizer_is_refused_where_it_is_built():
    class Plain:
        def __init__(self, parameters):
            pass

    with pytest.raises(UsageError, match="Learner.optimizer made a Plain, which has no step; derive it from Flat"):
        make_optimizer(Plain, _parameters(4))
    with pytest.raises(UsageError, match="made a SGD of torch; use Learner.optimizer = @TorchOptimizer"):
        make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), _parameters(4))


def test_a_name_that_torch_has_not_is_refused():
    with pytest.raises(UsageError, match="TorchOptimizer.optimizer is 'Adamw', but torch.optim has no such class"):
        TorchOptimizer([torch.zeros(2)], "Adamw")


@pytest.mark.parametrize(
    ("name", "words"),
    [("lr_scheduler", "torch.optim has no such class"), ("LBFGS", "several times"), ("SparseAdam", "rate of 0")],
)
def test_what_cannot_train_flat_vectors_is_refused(name, words):
    with pytest.raises(UsageError, match=f"TorchOptimizer.optimizer is '?{name}'?, .*{words}"):
        TorchOptimizer([torch.zeros(2)], name)


def test_a_restored_torch_optimizer_keeps_its_own_settings_and_takes_the_state():
    def make(weight_decay, size=3):
        flats = _parameters(size)
        return TorchOptimizer(flats, partial(torch.optim.AdamW, weight_decay=weight_decay)), flats

    (old, flats), (new, others) = make(0.1), make(0.2)
    _train(old, flats, 5)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    [settings] = new.state_dict()["param_groups"]
    assert settings["weight_decay"] == 0.2
    assert torch.equal(new.state_dict()["state"][0]["exp_avg_sq"], old.state_dict()["state"][0]["exp_avg_sq"])
    for optimizer, parameters in [(old, flats), (new, others)]:  # and what is done is what is configured
        parameters[0].fill_(1.0)
        parameters[0].grad.zero_()
        optimizer.step(0.5)
    torch.testing.assert_close(flats[0] - others[0], torch.full((3,), 0.5 * (0.2 - 0.1)))
    with pytest.raises(UsageError, match="holds the state of AdamW, but TorchOptimizer.optimizer is SGD; keep"):
        TorchOptimizer(_parameters(3), "SGD").load_state_dict(old.state_dict())


def test_the_state_of_another_class_is_refused():
    made = [factory(_parameters(3)) for factory in (Adam, RMSprop, partial(TorchOptimizer, optimizer="SGD"))]
    for optimizer, other in itertools.permutations(made, 2):
        with pytest.raises(UsageError, match="state of an optimizer other .*; keep Learner.optimizer"):
            optimizer.load_state_dict(other.state_dict())
