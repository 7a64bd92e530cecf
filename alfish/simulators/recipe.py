"""Translates a runner configuration of rsl_rl to a gin file.

The gin file has a setting for each field, or a comment with the reason why there is no setting. Both forms of fields
are read: rsl_rl 3 has `policy` and 'init_noise_std', rsl_rl 4 and 5 have `actor` and `critic`. Isaac Lab and mjlab
write runner configurations to `params/agent.yaml` of a run.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium

from alfish.errors import UsageError, first_line
from alfish.simulators import isaac_lab, mjlab
from alfish.simulators.libraries import check_task, library

ACTIVATIONS = {"elu": "elu", "relu": "relu", "tanh": "tanh", "silu": "silu", "swish": "silu", "gelu": "gelu"}
# Fields that do not affect training, and what alfish has instead; '' adds no comment to the gin file.
OF_A_RUN = {
    "experiment_name": "the directory is alfish train --root_dir",
    "run_name": "the directory is alfish train --root_dir",
    "logger": "Summaries writes TensorBoard events and metrics.csv; docs/monitoring.md has other trackers",
    "wandb_project": "docs/monitoring.md has WandbWriter",
    "neptune_project": "there is no writer for Neptune",
    "resume": "a run continues in its --root_dir by itself",
    "load_run": "Trainer.initial_parts loads parts of another run",
    "load_checkpoint": "Trainer.initial_parts loads parts of another run",
    "class_name": "",
    "check_for_nan": "updates that are not finite are skipped (Learner.max_nonfinite_updates)",
    "torch_compile_mode": "Learner.compile is 'auto'",
    "upload_model": "",
    "empirical_normalization": "",
}
# Fields without a setting in alfish: the value with which rsl_rl does the same as alfish, and a remark on other values.
WITHOUT_SETTING = {
    "share_cnn_encoders": (False, "ActorCritic.shared_torso shares the whole torso"),
    "use_mixed_precision": (False, "matrix products on a GPU stay in float32"),
    "grad_reduce_bucket_mb": (25, "alfish adds all gradients in one sum"),
    "normalize_advantage_per_mini_batch": (False, "alfish normalizes over the unroll"),
    "rnd_cfg": (None, "docs/algorithms/rnd.md has Composed.rewards = [@RND]; its settings differ"),
    "symmetry_cfg": (None, "docs/algorithms/ppo.md has SymmetricPPO, with mirrors by indices and signs"),
}


def read(path: str) -> dict[str, Any]:
    """Returns the dict of a `.yaml`, `.yml` or `.json` file.

    Raises:
      UsageError: there is no such file, it is not a dict, or yaml is not installed.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read ({first_line(error)}); Isaac Lab and mjlab write agent.yaml to "
            "logs/rsl_rl/EXPERIMENT/RUN/params"
        ) from error
    try:
        found = json.loads(text) if file.suffix == ".json" else _yaml(text, path)
    except ValueError as error:
        raise UsageError(f"{path} has no configuration: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise UsageError(
            f"{path} contains a {type(found).__name__}; a runner's configuration is a dict with the key `algorithm`"
        )
    return found


def of_task(task: str, environment: str) -> dict[str, Any]:
    """Returns the runner configuration of a task of Isaac Lab or mjlab; Isaac Lab 2.3 starts Isaac Sim first.

    Raises:
      UsageError: the library is not installed, or has no such task or no configuration of rsl_rl for it.
    """
    if environment == "Mjlab":
        registry = library("mjlab.tasks.registry", mjlab.COMMAND)
        library("mjlab.tasks", mjlab.COMMAND)  # registers the tasks
        check_task(task, registry.list_tasks(), "mjlab")
        return dataclasses.asdict(registry.load_rl_cfg(task))
    if environment != "IsaacLab":
        raise UsageError(f"{task!r} is not a .yaml or .json file, and {environment} has no tasks with a configuration")
    isaac_lab.launch_for_tasks()
    utilities = library("isaaclab_tasks.utils", isaac_lab.COMMAND)
    check_task(task, gymnasium.registry, "Isaac Lab")
    if "rsl_rl_cfg_entry_point" not in gymnasium.registry[task].kwargs:
        raise UsageError(f"Isaac Lab has no configuration of rsl_rl for {task!r}; give the agent.yaml of a run")
    return utilities.load_cfg_from_registry(task, "rsl_rl_cfg_entry_point").to_dict()


def gin_file(
    runner: Mapping[str, Any], num_envs: int = 4096, task: str | None = None, environment: str = "IsaacLab"
) -> str:
    """Returns the text of a gin file that trains as rsl_rl does.

    Args:
      runner: rsl_rl's runner configuration, such as `agent.yaml` of a run.
      num_envs: number of environments, which a runner configuration does not contain.
      task: name of the task; None leaves a line to fill in.
      environment: name of the simulator's adapter: 'IsaacLab', 'Mjlab' or 'RslRl'.

    Raises:
      UsageError: the configuration does not belong to a PPO runner, or its minibatches do not divide an unroll.
    """
    return _Translation(runner, num_envs, task, environment).text()


class _Translation:
    """Translates one configuration. Translated fields are removed from a copy; comments list the remaining fields."""

    def __init__(self, runner: Mapping[str, Any], num_envs: int, task: str | None, environment: str):
        self._runner = {name: value for name, value in runner.items() if not _is_missing(value)}
        self._num_envs, self._task, self._environment = num_envs, task, environment
        self._lines: list[str] = []
        self._comments: list[str] = []
        algorithm = self._runner.pop("algorithm", None)
        if not isinstance(algorithm, Mapping):
            raise UsageError("the configuration has no `algorithm`, a dict with the settings of PPO")
        self._algorithm = {name: value for name, value in algorithm.items() if not _is_missing(value)}
        name = str(self._algorithm.pop("class_name", "PPO")).rpartition(":")[2].rpartition(".")[2]
        if name != "PPO":
            raise UsageError(f"the algorithm is {name}; only PPO can be translated")

    def text(self) -> str:
        self._of_environment()
        self._of_runner()
        self._of_algorithm()
        self._of_networks()
        self._left("", self._runner)
        self._left("algorithm.", self._algorithm)
        self._comment(
            "", "", "rsl_rl begins with torch's initial weights; alfish's are orthogonal, and small in the last layer"
        )
        head = [
            "# A recipe of rsl_rl, by `alfish from-rsl-rl`.",
            "",
            "import alfish.algorithms.ppo",
            *([f"import alfish.simulators.{_MODULES[self._environment]}"]),
            "",
        ]
        return "\n".join([*head, *self._lines, "", "# Without a counterpart:", *self._comments, ""])

    def _set(self, name: str, value: Any, remark: str = "") -> None:
        words = value if isinstance(value, _Reference) else repr(value)
        self._lines.append(f"{name} = {words}" + (f"  # {remark}" if remark else ""))

    def _comment(self, field: str, value: Any, reason: str) -> None:
        self._comments.append(f"# {field} = {value!r}: {reason}" if field else f"# {reason}")

    def _need(self, fields: dict[str, Any], name: str, where: str) -> Any:
        if name not in fields:
            raise UsageError(f"the configuration has no {where}{name}, which PPO of rsl_rl needs")
        return fields.pop(name)

    def _of_environment(self) -> None:
        self._set("Trainer.algorithm", _Reference("@PPO"))
        self._set("Trainer.environment", _Reference("@make_environment"))
        self._set("Trainer.batches", _Reference("@EpochBatches"))
        self._set("Trainer.learner", _Reference("@Learner"))
        self._set("make_environment.env_id", _Reference(f"@{self._environment}"))
        self._set("make_environment.num_envs", self._num_envs)
        if self._environment == "RslRl":
            self._lines.append("# RslRl.env = @my_vec_env")
        elif self._task is None:
            self._lines.append(f"# {self._environment}.task = 'NAME'")
        else:
            self._set(f"{self._environment}.task", self._task)
        if "clip_actions" in self._runner:
            self._set("make_environment.action_bounds", float(self._runner["clip_actions"]), "clip_actions")

    def _of_runner(self) -> None:
        runner = self._runner
        self._steps = int(self._need(runner, "num_steps_per_env", ""))
        self._set("Trainer.unroll_length", self._steps, "num_steps_per_env")
        if "max_iterations" in runner:
            self._set("Trainer.num_iterations", int(runner.pop("max_iterations")), "max_iterations")
        if "seed" in runner:
            self._set("Trainer.seed", int(runner.pop("seed")))
        if "device" in runner:
            self._set("Trainer.device", runner.pop("device"))
        if "save_interval" in runner:
            period = int(runner.pop("save_interval")) * self._steps * self._num_envs
            self._set("CheckpointSaver.period", period, "save_interval, in environment steps")
        self._set("Trainer.listeners", _Reference("[@CheckpointSaver(), @Summaries()]"))
        self._set("Trainer.extra_metrics", _Reference("[@SimulatorLog()]"))
        for name, reason in OF_A_RUN.items():
            if name in runner and name != "empirical_normalization":
                value = runner.pop(name)
                if reason and value:
                    self._comment(name, value, reason)

    def _of_algorithm(self) -> None:
        algorithm = self._algorithm
        rows, count = self._steps * self._num_envs, int(self._need(algorithm, "num_mini_batches", "algorithm."))
        if rows % count:
            raise UsageError(
                f"{count} minibatches do not divide {self._steps} steps of {self._num_envs} environments; set "
                "--num_envs"
            )
        self._set("EpochBatches.num_epochs", int(self._need(algorithm, "num_learning_epochs", "algorithm.")))
        self._set("EpochBatches.minibatch_size", rows // count, f"num_mini_batches = {count}")
        self._set("PPO.gamma", float(algorithm.pop("gamma", 0.99)))
        self._set("PPO.lambda_", float(algorithm.pop("lam", 0.95)), "lam")
        clip = float(algorithm.pop("clip_param", 0.2))
        self._set("PPO.clip_range", clip, "clip_param")
        clips_value = bool(algorithm.pop("use_clipped_value_loss", True))
        self._set("PPO.value_clip_range", clip if clips_value else None, "use_clipped_value_loss")
        coef = float(algorithm.pop("value_loss_coef", 1.0))
        self._set("PPO.value_coef", 2 * coef, f"value_loss_coef = {coef}; alfish halves the squared error")
        self._set("PPO.entropy_coef", float(algorithm.pop("entropy_coef", 0.01)))
        self._rate(float(algorithm.pop("learning_rate", 1e-3)))
        self._set("Learner.max_grad_norm", float(algorithm.pop("max_grad_norm", 1.0)))
        if "actor" in self._runner:
            self._comment(
                "", "", "rsl_rl 4 and later clip the gradients of actor and critic apart; alfish clips both together"
            )
        self._optimizer(str(algorithm.pop("optimizer", "adam")).lower())
        for name, (usual, reason) in WITHOUT_SETTING.items():
            value = algorithm.pop(name, usual)
            if value != usual:
                self._comment(f"algorithm.{name}", value, reason)

    def _rate(self, rate: float) -> None:
        schedule = self._algorithm.pop("schedule", "adaptive")
        target = self._algorithm.pop("desired_kl", 0.01)
        if schedule != "adaptive" or target is None:
            self._set("Learner.learning_rate", rate)
            if schedule not in ("adaptive", "fixed"):
                self._comment("algorithm.schedule", schedule, "rsl_rl has 'adaptive' and 'fixed'")
            return
        self._set("Learner.learning_rate", _Reference("@KLAdaptive()"), "schedule = 'adaptive'")
        self._set("KLAdaptive.initial", rate, "learning_rate")
        self._set("KLAdaptive.target", float(target), "desired_kl")
        for name, value in (("factor", 1.5), ("lowest", min(1e-5, rate)), ("highest", max(1e-2, rate))):
            self._set(f"KLAdaptive.{name}", value)

    def _optimizer(self, name: str) -> None:
        if name in ("adam", "adamw"):
            self._set("Learner.optimizer", _Reference("@optimizers.Adam"), f"optimizer = {name!r}")
            self._set("optimizers.Adam.eps", 1e-8)
            if name == "adamw":
                self._set("optimizers.Adam.weight_decay", 0.01)
        elif name == "rmsprop":
            self._set("Learner.optimizer", _Reference("@optimizers.RMSprop"), "optimizer = 'rmsprop'")
            self._set("optimizers.RMSprop.eps", 1e-8)
        elif name == "sgd":
            self._set("Learner.optimizer", _Reference("@optimizers.TorchOptimizer"), "optimizer = 'sgd'")
            self._set("optimizers.TorchOptimizer.optimizer", "SGD")
        else:
            self._comment("algorithm.optimizer", name, "this file keeps alfish's default, Adam")

    def _of_networks(self) -> None:
        networks = self._networks()
        self._set("ActorCritic.actor_torso", _Reference("@actor/Torso"))
        self._set("ActorCritic.critic_torso", _Reference("@critic/Torso"))
        for name, own in networks.items():
            self._set(f"{name}/MLP.layers", tuple(int(size) for size in own.pop("hidden_dims", (256, 256, 256))))
            activation = str(own.pop("activation", "elu")).lower()
            if activation not in ACTIVATIONS:
                self._comment(f"{name}.activation", activation, "this file sets 'elu' instead")
            self._set(f"{name}/MLP.activation", ACTIVATIONS.get(activation, "elu"))
            self._memory(name, own)
        self._deviation(networks["actor"])
        self._groups(networks)
        for name, own in networks.items():
            self._left(f"{name}.", own)

    def _networks(self) -> dict[str, dict[str, Any]]:
        """Returns the fields of actor and critic by their names in rsl_rl 5."""
        runner = self._runner
        normalizes = bool(runner.pop("empirical_normalization", False))
        if isinstance(runner.get("actor"), Mapping) and isinstance(runner.get("critic"), Mapping):
            runner.pop("policy", None)
            given = {name: dict(runner.pop(name)) for name in ("actor", "critic")}
        else:
            policy = dict(self._need(runner, "policy", ""))
            given = {"actor": {}, "critic": {}}
            for field, value in policy.items():
                owner, _, rest = field.partition("_")
                if owner in given and rest:
                    given[owner][rest] = value
                elif field in (
                    "activation",
                    "class_name",
                    "rnn_type",
                    "rnn_hidden_dim",
                    "rnn_hidden_size",
                    "rnn_num_layers",
                ):
                    given["actor"][field] = given["critic"][field] = value
                else:
                    given["actor"][field] = value
        result = {}
        for name, fields in given.items():
            own = {field: value for field, value in fields.items() if not _is_missing(value)}
            own.setdefault("obs_normalization", normalizes)
            own.pop("stochastic", None)
            result[name] = own
        return result

    def _memory(self, name: str, own: dict[str, Any]) -> None:
        kind = str(own.pop("class_name", "MLPModel"))
        rnn = str(own.pop("rnn_type", "lstm")).lower()
        size = own.pop("rnn_hidden_dim", own.pop("rnn_hidden_size", 256))
        layers = own.pop("rnn_num_layers", 1)
        if "RNN" in kind or "Recurrent" in kind:
            memory = f"@{rnn.upper()}" if layers == 1 else "@StackedMemory"
            self._set(f"{name}/Torso.memory", _Reference(memory), f"{kind}; rsl_rl puts it before the layers")
            self._set(f"{name}/{rnn.upper()}.size", int(size))
            if layers != 1:
                each = ", ".join([f"@{rnn.upper()}"] * int(layers))
                self._set(f"{name}/StackedMemory.layers", _Reference(f"[{each}]"))
        elif "CNN" in kind:
            self._comment(f"{name}.class_name", kind, "Encoder.image sets the encoder of images")

    def _deviation(self, actor: dict[str, Any]) -> None:
        distribution = dict(actor.pop("distribution_cfg", None) or {})
        deviation = float(distribution.pop("init_std", actor.pop("init_noise_std", 1.0)))
        if deviation <= 0:
            raise UsageError(f"the recipe's init_std is {deviation}; a standard deviation must be positive")
        kind = distribution.pop("std_type", actor.pop("noise_std_type", "scalar"))
        name = str(distribution.pop("class_name", "GaussianDistribution"))
        if actor.pop("state_dependent_std", False) or not name.endswith("GaussianDistribution") or "Hetero" in name:
            self._comment(
                "actor distribution", name, "PolicyHead has a normal distribution with the same deviation for all rows"
            )
        if not distribution.pop("learn_std", True):
            self._set("PolicyHead.learn_std", False)
        bounds = float(self._runner.pop("clip_actions", 1.0))
        remark = f"the logarithm of init_std = {deviation}" + (f" by clip_actions = {bounds}" if bounds != 1 else "")
        self._set("PolicyHead.initial_log_std", math.log(deviation / bounds), remark)
        if kind != "log":
            self._comment("actor std_type", kind, "PolicyHead learns the logarithm of the deviation")
        self._left("actor.distribution_cfg.", distribution)

    def _groups(self, networks: dict[str, dict[str, Any]]) -> None:
        """Translates the observation groups of actor and critic, and their normalization."""
        sets = {("actor" if name == "policy" else name): list(groups)
                for name, groups in (self._runner.pop("obs_groups", None) or {}).items()}  # fmt: skip
        normalized = {name: own.pop("obs_normalization") for name, own in networks.items()}
        read = {name: sets.get(name) for name in ("actor", "critic")}
        every = list(dict.fromkeys(group for groups in read.values() for group in groups or []))
        if not every:
            self._comment("", "", "no obs_groups: rsl_rl gives the critic the group 'critic' where the task has one")
        elif self._environment != "RslRl":
            self._set(f"{self._environment}.groups", every, "obs_groups")
        for name, groups in read.items():
            left_out = [group for group in every if groups is not None and group not in groups]
            if left_out:
                self._set(f"{name}/Encoder.leaves", dict.fromkeys(left_out))
        for name in sorted(set(sets) - set(read)):
            self._comment(f"obs_groups[{name!r}]", sets[name], "only actor and critic read observations")
        if not any(normalized.values()):
            self._set("Trainer.transforms", [])
            return
        self._set("Trainer.transforms", _Reference("[@ObservationNormalizer]"), "obs_normalization")
        self._set("ObservationNormalizer.clip", None)
        if not all(normalized.values()) and every:
            groups = [group for name, groups in read.items() if normalized[name] for group in groups or []]
            self._set("ObservationNormalizer.leaves", list(dict.fromkeys(groups)))
            self._comment("obs_normalization", normalized, "a group that actor and critic read is normalized for both")
        self._comment(
            "", "", "rsl_rl adds 0.01 to the deviation that divides observations; alfish adds 1e-8 to the variance"
        )

    def _left(self, prefix: str, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            self._comment(prefix + name, value, "alfish knows no such field of rsl_rl")


class _Reference(str):
    """A value that is written to the gin file without quotes, such as `@PPO`."""


_MODULES = {"IsaacLab": "isaac_lab", "Mjlab": "mjlab", "RslRl": "rsl_rl"}


def _is_missing(value: Any) -> bool:
    """Returns whether a dumped value means that no value was set."""
    return value is None or value == {} or (isinstance(value, str) and "MISSING" in value)


def _yaml(text: str, path: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"reading {path} requires yaml: pip install pyyaml, or give a .json file") from error

    class Loader(yaml.SafeLoader):
        """Reads Python tuples as lists and other objects as text; executes nothing."""

    def plain(loader: Any, suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else node.value

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", plain)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(first_line(error)) from error
