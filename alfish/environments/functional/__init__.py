"""Environments as pure functions of torch tensors, in the interface of `gymnasium.experimental.functional.FuncEnv`.

The docstring of `advance` lists the methods of a class. `FunctionalEnvironment` steps many environments at once.
"""

from alfish.environments.functional.adapter import FunctionalEnvironment
from alfish.environments.functional.advance import (
    Draws,
    Integers,
    Normal,
    Outcome,
    Stepped,
    Uniform,
    advance,
    begin,
    draws,
    num_draws,
    step,
    tensors_of,
    with_tensors,
)
from alfish.environments.functional.single import SingleEnvironment, register
from alfish.environments.functional.tasks import (
    Acrobot,
    CartPole,
    Catch,
    DeepSea,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    Recall,
)

register("alfish/Acrobot-v1", Acrobot)
register("alfish/CartPole-v1", CartPole)
register("alfish/Catch-v0", Catch)
register("alfish/DeepSea-v0", DeepSea)
register("alfish/MountainCar-v0", MountainCar)
register("alfish/MountainCarContinuous-v0", MountainCarContinuous)
register("alfish/Pendulum-v1", Pendulum)
register("alfish/Recall-v0", Recall)

__all__ = [
    "Acrobot",
    "CartPole",
    "Catch",
    "DeepSea",
    "Draws",
    "FunctionalEnvironment",
    "Integers",
    "MountainCar",
    "MountainCarContinuous",
    "Normal",
    "Outcome",
    "Pendulum",
    "Recall",
    "SingleEnvironment",
    "Stepped",
    "Uniform",
    "advance",
    "begin",
    "draws",
    "num_draws",
    "register",
    "step",
    "tensors_of",
    "with_tensors",
]
