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
        "that alfish needs; use the Windows Subsystem for Linux (WSL)"
    )

__version__ = "0.2.0"

# Modules that are imported when a name is first used, so that `import alfish` does not wait for torch.
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
    "evaluate": "alfish.configuration.opening",
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
    from alfish.configuration.opening import evaluate as evaluate
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


# Old and new names of modules that have moved. Programs, gin files and saved runs that import the old names still work.
_MOVED = {
    "alfish.batches": "alfish.learner.batches",
    "alfish.composition": "alfish.algorithms.composition",
    "alfish.corrections": "alfish.functional.targets",
    "alfish.distributions": "alfish.functional.distributions",
    "alfish.environments.random_actions": "alfish.environments.optional_wrappers",
    "alfish.environments.split_observation": "alfish.environments.optional_wrappers",
    "alfish.environments.toy.bandits": "alfish.environments.toy",
    "alfish.environments.toy.chains": "alfish.environments.toy",
    "alfish.environments.toy.motion": "alfish.environments.toy",
    "alfish.functional.corrections": "alfish.functional.targets",
    "alfish.losses": "alfish.functional.losses",
    "alfish.metrics.rows": "alfish.metrics.step_batch",
    "alfish.metrics.simulator_log": "alfish.metrics.env_info",
    "alfish.networks.bodies.linear": "alfish.networks.layers",
    "alfish.networks.hybrid.hybrid_policy": "alfish.networks.hybrid",
    "alfish.networks.hybrid.temperatures": "alfish.networks.hybrid",
    "alfish.networks.min_gru": "alfish.networks.memory",
    "alfish.networks.stacked_memory": "alfish.networks.memory",
    "alfish.policy_losses": "alfish.functional.losses",
    "alfish.processes.heap": "alfish.runs.process_settings",
    "alfish.replicas": "alfish.processes.replicas",
    "alfish.returns": "alfish.functional.returns",
    "alfish.runs.subnormals": "alfish.runs.process_settings",
    "alfish.schedules": "alfish.parameters.schedules",
    "alfish.targets": "alfish.functional.targets",
    "alfish.transfer": "alfish.training.initial_parts",
    "alfish.transforms.frame_stack": "alfish.transforms.history",
    "alfish.transforms.previous_step": "alfish.transforms.history",
    "alfish.values": "alfish.functional.values",
    "alfish.weighting": "alfish.training.reward_weights",
    "alfish.writers": "alfish.runs.writers",
}
# Modules that were packages, whose former modules are in `_MOVED`.
_FORMER_PACKAGES = {"alfish.environments.toy", "alfish.networks.hybrid"}


class _MovedModules:
    """Imports a module under its old name: the same module object as under the new name, not a copy."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("alfish."):
            return None
        import importlib.machinery

        if name in _FORMER_PACKAGES:
            spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
            spec.submodule_search_locations = []  # Python imports submodules only of modules that have such a list
            return spec
        old = next((old for old in _MOVED if name == old or name.startswith(old + ".")), None)
        if old is None:
            return None
        loader: Any = _MovedLoader(_MOVED[old] + name[len(old) :])
        return importlib.machinery.ModuleSpec(name, loader)


class _MovedLoader:
    def __init__(self, name: str):
        self._name = name

    def create_module(self, spec: Any) -> Any:
        import importlib

        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._spec  # `import` has replaced the spec with one of the old name


sys.meta_path.insert(0, _MovedModules)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'alfish' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
