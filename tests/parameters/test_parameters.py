"""Kinds and ranges of parameters: declared beside each, and checked for gin and for plain Python alike."""

import importlib
import inspect
import math
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

import alfish
from alfish.algorithms.ppo import PPO
from alfish.configuration import reading
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, OfflineBatches, ReplayBatches
from alfish.learner.optimizers import Adam
from alfish.metrics import AverageReturn, Metric
from alfish.networks import MLP
from alfish.offline import Spaces
from alfish.parameters import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitInterval,
    checked,
    checking,
)
from alfish.parameters.kinds import SEQUENCES, bare, elements, members, mistake
from alfish.parameters.schedules import Linear, Schedule
from alfish.training.listeners import Evaluate
from alfish.training.trainer import Trainer

SPECS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), spaces.Box(-1, 1, (), np.float32)


def test_a_wrong_value_is_refused_with_the_accepted_values():
    for annotation, taken, refused, words in (
        (
            UnitInterval,
            [0, 1, 0.5, np.float32(0.3), torch.tensor(0.5)],
            [-0.1, 1.1, True, False],
            "it must be a number in [0, 1]",
        ),
        (PositiveFloat, [1, 1e-300], [0, -1, 1e400, math.nan, 10**400, "1", None, 1j], "it must be a positive number"),
        (NonNegativeFloat, [0], [-1e-9, object(), np.zeros(2), np.ones(1)], "it must be a number of at least 0"),
        (PositiveInt, [1, 1e6, np.int64(3)], [0, 2.5, -1, math.nan, True], "it must be an integer of at least 1"),
        (NonNegativeInt | None, [0, None], [-1, "a"], "it must be an integer of at least 0 or None"),
        (float, [-1e9], [math.inf, math.nan], "it must be a number"),
        (Annotated[int, Range(0, 9, below=True)], [8], [9], "it must be an integer in [0, 9)"),
        (Annotated[float, Range(high=3)], [3], [4], "it must be a number of at most 3"),
        (Annotated[float, Range()], [3], [math.inf], "it must be a finite number"),
        (bool, [True, 0, np.True_], [2, "yes"], "it must be True or False"),
        (Literal["a", "b"], ["a"], ["c", None, ["a"], 1], "it must be one of 'a', 'b'"),
        (bool | Literal["auto"], ["auto", False], ["automatic"], "it must be True or False or 'auto'"),
        (
            Sequence[PositiveInt],
            [(), [3], (1e2,), np.array([3, 4]), torch.tensor([3])],
            [[0], [1, "a"], np.array([3, 0]), torch.tensor([2.5]), np.array([[3]])],
            "it must be a list, each entry an integer of at le",
        ),
        (tuple[float, float], [(0.9, 1)], [(0.9,), (0.1, 0.2, 0.3), (1, "a")], "it must be a list of 2, each entry a"),
        (Mapping[str, PositiveInt], [{"a": 1}], [3, {"a": 0}], "it must be a dict"),
        (Callable[[], object], [len, MLP], [3, "len", None], "it must be a class or function"),
        (
            NonNegativeFloat | Schedule,
            [0, Linear(1.0)],
            [-1],
            "it must be a number of at least 0 or a schedule such as Linear(3e-4, 0.0)",
        ),
        (Spaces | None, [Spaces()], [(), Spaces], "it must be an object or None"),
        (Sequence[alfish.Listener], [[Evaluate()]], [[Evaluate], [3]], "it must be a list"),
        (Sequence[Metric], [[AverageReturn()], ()], [[3], [AverageReturn], 3], "it must be a list"),
    ):
        assert [mistake(value, annotation) for value in taken] == [None] * len(taken), annotation
        for value in refused:
            assert (mistake(value, annotation) or "").startswith(words), value


@pytest.mark.parametrize(
    "value, expected",
    [
        (2.0, 2),
        (np.float32(2), 2),
        (torch.tensor(2.0), 2),
        ([1.0, 2], [1, 2]),
        ((1.0,), (1,)),
        (np.array([2.0, 3.0]), [2, 3]),
        (torch.tensor([2.0]), [2]),
        ({"a": 2.0}, {"a": 2}),
        (None, None),
    ],
    ids=str,
)
def test_whole_numbers_become_ints_in_every_form(value, expected):
    @checked
    def function(x: PositiveInt | Sequence[PositiveInt] | Mapping[str, PositiveInt] | None):
        return x

    found = function(value)
    assert found == expected and repr(found) == repr(expected)


def test_numbers_of_another_kind_stay_as_they_are():
    @checked
    def function(x: float | Sequence[float] | Mapping[str, float]):
        return x

    for value in (2.0, [2.0], {"a": 2.0}, array := np.array([2.0])):
        assert function(value) is value or repr(function(value)) == repr(value)
    assert function(array) is array


def test_a_plain_call_reports_the_accepted_values(tmp_path):
    for build, words in (
        (lambda: PPO(*SPECS, gamma=None), "PPO.gamma is None; it must be a number in [0, 1]"),
        (
            lambda: PPO(*SPECS, clip_range=-1),
            "PPO.clip_range is -1; it must be a positive number or a schedule such as Linear(3e-4, 0.0)",
        ),
        (lambda: PPO(*SPECS, clip_range=Linear), "it requires an object: write Linear(...)"),
        (lambda: PPO(*SPECS, clip_range=lambda: 0.2), "it must be a positive number, or a function of progress"),
        (
            lambda: PPO(*SPECS, clip_range=lambda progress: 0.2 if progress in (0, 1) else None),
            "0.1 it is None, but",
        ),
        (lambda: PPO(*SPECS, clip_range=Linear(-0.1)), "PPO.clip_range is Linear(-0.1 -> 0.0); at progress 0 it"),
        (lambda: PPO(*SPECS, clip_range=Linear(0.1, -0.2)), "PPO.clip_range is Linear(0.1 -> -0.2); at progress 1 it"),
        (lambda: alfish.Learner(PPO(*SPECS), learning_rate=1e400), "Learner.learning_rate is inf; it must be a number"),
        (lambda: alfish.Learner(PPO(*SPECS), learning_rate={"critic": -1}), "Learner.learning_rate is {'critic': -1}"),
        (lambda: ReplayBatches(max_chunk_size=0), "ReplayBatches.max_chunk_size is 0; it must be an integer"),
        (lambda: ReplayBatches(batch_size=0), "ReplayBatches.batch_size is 0; it must be an integer of at least 1"),
        (lambda: OfflineBatches(batch_size=2.5), "OfflineBatches.batch_size is 2.5; it must be an integer"),
        (lambda: EpochBatches(0), "EpochBatches.num_epochs is 0; it must be an integer of at least 1 or None"),
        (lambda: Trainer("x", algorithm=PPO, seed=None), "Trainer.seed is None; it must be an integer in [0, 922"),
        (lambda: Trainer("x", algorithm=PPO, wall_seconds=-1), "Trainer.wall_seconds is -1; it must be a positive"),
        (lambda: Trainer("x", algorithm=PPO, summary_period=-5), "Trainer.summary_period is -5; it must be an integer"),
        (
            lambda: make_environment("CartPole-v1", num_envs=2.5),
            "make_environment.num_envs is 2.5; it must be an integer",
        ),
        (
            lambda: make_environment("CartPole-v1", vectorization="x"),
            "make_environment.vectorization is 'x'; it must be",
        ),
        (lambda: alfish.train("PPO", "x", root_dir=None), "train.root_dir is None; it must be a text"),
        (lambda: alfish.train(conf=3, root_dir="x"), "train.conf is 3; it must be a text or None"),
        (lambda: alfish.load(None), "load.root_dir is None; it must be a text"),
        (lambda: alfish.load("x", 1.5), "load.checkpoint is 1.5; it must be a text or an integer"),
        (
            lambda: alfish.train(torch.nn.Bilinear, "CartPole-v1", num_env_steps=8, root_dir=tmp_path / "x"),
            "Trainer.algorithm is Bilinear, which is not derived from RLAlgorithm",
        ),
        (lambda: Evaluate(period=-1), "Evaluate.period is -1; it must be an integer of at least 0"),
        (lambda: Adam([], betas=(0.9, 1.0)), "Adam.betas is (0.9, 1.0); it must be a list of 2, each entry a"),
        (
            lambda: MLP(3, (64, 0)),
            "MLP.layers is (64, 0); it must be a list, each entry an integer in [1, 1000000]",
        ),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            pytest.fail(f"{build()} was built, where this is asked for: {words}")


def test_gin_reports_equal_errors_at_reading_and_binding():
    for binding, words in (
        ("PPO.gamma = None", "PPO.gamma is None, bound in this call; it must be a number in [0, 1]"),
        (
            "Learner.learning_rate = 1e400",
            "Learner.learning_rate is inf, bound in this call; it must be a number of at",
        ),
        (
            "Adam.betas = (0.9, 1.5)",
            "Adam.betas is (0.9, 1.5), bound in this call; it must be a list of 2, each entry",
        ),
        ("MLP.activation = 'tahn'", "MLP.activation is 'tahn', bound in this call; it must be one of 'tanh', 'relu'"),
    ):
        with pytest.raises(UsageError) as raised:
            reading.read(["ppo_cartpole.gin"], ["import alfish.learner.optimizers", binding])
        assert str(raised.value).startswith(words)


def test_integral_floats_become_declared_ints():
    @checked
    def call(count: PositiveInt, sizes: Sequence[PositiveInt] = (), share: UnitInterval | int = 1.0, *rest, **more):
        return count, sizes, share, rest, more

    count, sizes, share, rest, more = call(1e6, [2.0, 3], 1.0, 4.0, five=5.0)
    assert [type(one) for one in (count, *sizes, share, *rest, more["five"])] == [int, int, int, float, float, float]
    assert call(count=1) == (1, (), 1.0, (), {})
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call()
    assert list(inspect.signature(call).parameters) == ["count", "sizes", "share", "rest", "more"]


def test_a_subclass_is_checked_by_its_base():
    class Mine(PPO):
        def __init__(self, *specs, **keywords):
            super().__init__(*specs, **keywords)

    with pytest.raises(UsageError, match="PPO.gamma is 2; it must be a number in"):
        Mine(*SPECS, gamma=2)


def configurables():
    for module in pkgutil.walk_packages(alfish.__path__, "alfish."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    for selector, one in gin.config._REGISTRY.items():
        if selector.startswith("alfish."):
            yield selector, one.wrapped.__init__ if inspect.isclass(one.wrapped) else one.wrapped


def numbers_of(annotation):
    """The kinds in an annotation that are numbers without a range."""
    for kind in members(annotation):
        if kind in (int, float):
            yield kind
        elif typing.get_origin(bare(kind)) in (*SEQUENCES, Mapping, typing.get_origin(Mapping[str, int])):
            yield from (one for part in elements(kind) for one in numbers_of(part))


def is_checked(function):
    """Whether `checked` is among the decorators."""
    while function is not None and function.__code__.co_filename != checking.__file__:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def test_each_parameter_of_ours_declares_its_range_and_is_checked():
    missing = [
        f"{selector}.{name}"
        for selector, function in configurables()
        for name, annotation in checking.hints(function).items()
        if list(numbers_of(annotation)) or not is_checked(function)
    ]
    assert not missing, (
        "declare their ranges, as alfish.parameters.kinds says, and put @checked under @gin.configurable"
    )
