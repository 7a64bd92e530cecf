"""alfish: a modular toolkit for on-policy, off-policy, offline and hybrid reinforcement learning in PyTorch.

policy = alfish.train("PPO", "CartPole-v1", num_env_steps=50_000, root_dir="runs/ppo")
policy = alfish.load("runs/ppo")
action = policy.act(observation)
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "alfish runs on Linux and macOS: Windows lacks the file locks, process groups and inherited file descriptors "
        "that run directories and worker processes need; use the Windows Subsystem for Linux (WSL)"
    )

__version__ = "0.2.0"

# Imported when first used: `import alfish` alone should not wait for torch.
_HOME = {
    "AlgStep": "alfish.data",
    "Evaluator": "alfish.training.evaluator",
    "Experience": "alfish.data",
    "Learner": "alfish.learner.learner",
    "Listener": "alfish.training.listener",
    "LossInfo": "alfish.data",
    "Policy": "alfish.training.policy",
    "RLAlgorithm": "alfish.algorithms.rl_algorithm",
    "ReplayNeeds": "alfish.algorithms.rl_algorithm",
    "Report": "alfish.training.listener",
    "Run": "alfish.training.listener",
    "StepType": "alfish.data",
    "StopAt": "alfish.training.listeners",
    "StopWithoutProgress": "alfish.training.listeners",
    "SyncUnroller": "alfish.unrollers",
    "TimeStep": "alfish.data",
    "Trainer": "alfish.training.trainer",
    "Transforms": "alfish.transforms",
    "UnrollUse": "alfish.algorithms.rl_algorithm",
    "load": "alfish.configuration.opening",
    "make_environment": "alfish.environments",
    "make_evaluator": "alfish.training.evaluator",
    "plot": "alfish.analysis.plotting",
    "train": "alfish.configuration.runs",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from alfish.algorithms.rl_algorithm import ReplayNeeds as ReplayNeeds
    from alfish.algorithms.rl_algorithm import RLAlgorithm as RLAlgorithm
    from alfish.algorithms.rl_algorithm import UnrollUse as UnrollUse
    from alfish.analysis.plotting import plot as plot
    from alfish.configuration.opening import load as load
    from alfish.configuration.runs import train as train
    from alfish.data import AlgStep as AlgStep
    from alfish.data import Experience as Experience
    from alfish.data import LossInfo as LossInfo
    from alfish.data import StepType as StepType
    from alfish.data import TimeStep as TimeStep
    from alfish.environments import make_environment as make_environment
    from alfish.learner.learner import Learner as Learner
    from alfish.training.evaluator import Evaluator as Evaluator
    from alfish.training.evaluator import make_evaluator as make_evaluator
    from alfish.training.listener import Listener as Listener
    from alfish.training.listener import Report as Report
    from alfish.training.listener import Run as Run
    from alfish.training.listeners import StopAt as StopAt
    from alfish.training.listeners import StopWithoutProgress as StopWithoutProgress
    from alfish.training.policy import Policy as Policy
    from alfish.training.trainer import Trainer as Trainer
    from alfish.transforms import Transforms as Transforms
    from alfish.unrollers import SyncUnroller as SyncUnroller


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'alfish' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
