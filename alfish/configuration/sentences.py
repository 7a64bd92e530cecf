"""Replaces gin's exceptions with clear sentences, while a configuration is read and a Trainer is built from it."""

import contextlib
import difflib
import inspect
import re
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import gin

import alfish
from alfish import errors
from alfish.configuration import moved_settings
from alfish.configuration.bindings import Reading
from alfish.errors import UsageError
from alfish.parameters import gin_internals
from alfish.parameters.parts import undefined_methods

# Remedies for required parameters that no shipped conf binds.
REMEDIES = {"OfflineBuffer.sources": "give the data, as in OfflineBuffer.sources = ['alfish:DIR'] (docs/offline.md)"}
# Names of parameters in other libraries (stable-baselines3, CleanRL, RLlib, Tianshou) or in general use, with the names
# in alfish, with their class if several classes have them; docs/from_*.md have more.
NAMES_ELSEWHERE = {
    "action_noise": "noise_std",
    "activation_fn": "activation",
    "batchsize": "batch_size",
    "callback": "extra_listeners",
    "callbacks": "extra_listeners",
    "buffer_size": "capacity",
    "clip_coef": "clip_range",
    "clip_param": "clip_range",
    "clip_range_vf": "value_clip_range",
    "discount": "gamma",
    "ent_coef": "entropy_coef",
    "entropy_coeff": "entropy_coef",
    "eps_clip": "clip_range",
    "env_wrapper": "make_environment.wrappers",
    "epochs": "num_epochs",
    "eval_freq": "Evaluate.period",
    "exploration_noise": "noise_std",
    "gae_lambda": "lambda_",
    "grad_clip": "max_grad_norm",
    "goal_selection_strategy": "HindsightReplay.strategy",
    "gradient_steps": "updates_per_env_step",
    "hidden_size": "layers",
    "hidden_sizes": "layers",
    "iql_tau": "expectile",
    "learning_starts": "warmup_env_steps",
    "log_interval": "summary_period",
    "log_std_init": "initial_log_std",
    "lr": "learning_rate",
    "n_envs": "num_envs",
    "n_epochs": "num_epochs",
    "n_eval_episodes": "Evaluate.num_episodes",
    "n_sampled_goal": "HindsightReplay.fraction",
    "n_steps": "unroll_length",
    "net_arch": "layers",
    "noise_clip": "smoothing_clip",
    "norm_adv": "normalize_advantage",
    "num_minibatches": "minibatch_size",
    "num_sgd_iter": "num_epochs",
    "num_steps": "unroll_length",
    "num_timesteps": "num_env_steps",
    "policy_delay": "actor_period",
    "policy_frequency": "actor_period",
    "policy_kwargs": "layers",
    "policy_noise": "smoothing_std",
    "repeat_per_collect": "num_epochs",
    "replay_buffer_class": "ReplayBatches.hindsight",
    "rollout_fragment_length": "unroll_length",
    "save_freq": "CheckpointSaver.period",
    "sgd_minibatch_size": "minibatch_size",
    "target_entropy": "box_target_entropy",
    "target_network_frequency": "target_period",
    "target_update_interval": "target_period",
    "tau": "target_rate",
    "total_timesteps": "num_env_steps",
    "train_freq": "updates_per_env_step",
    "train_frequency": "updates_per_env_step",
    "update_epochs": "num_epochs",
    "vf_coef": "value_coef",
    "vf_loss_coeff": "value_coef",
    "wrapper_class": "make_environment.wrappers",
}
# The same, for classes that have the second parameter: a memory has a `size`, not `layers`.
NAMES_IN_CLASSES = {"ent_coef": "initial_alpha", "hidden_dim": "size", "hidden_size": "size", "sigma": "noise_std"}
# Parameters with the same meaning for unrolls and for replay.
TWINS = {"batch_size": "minibatch_size", "minibatch_size": "batch_size"}
UNKNOWN_PARAMETER = re.compile(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'")
_NESTED = "its values are nested too deeply"
# Exceptions of gin's parser.
PARSING_ERRORS = (
    *(AttributeError, KeyError, NameError, OSError, SyntaxError, TypeError, ValueError),
    tokenize.TokenError,
)


@contextlib.contextmanager
def named(origin: str) -> Iterator[None]:
    """Turns an exception of gin's parser into a UsageError that names `origin`."""
    try:
        yield
    except UsageError:
        raise
    except RecursionError:
        raise UsageError(f"{origin}: {_NESTED}") from None
    except PARSING_ERRORS as error:
        raise UsageError(f"{origin}: {_first_sentence(error)}{_suggestion(error)}") from None


def _unbound(name: str) -> str:
    """Returns a sentence about a parameter `Class.name` that has no value."""
    owner, _, parameter = name.partition(".")
    if errors.is_command():
        return f"@{owner}() requires a value for {name}; bind {name}"
    return f'{owner} requires a value for {parameter}; give **{{"{name}": ...}}'


@contextlib.contextmanager
def complete(reading: Reading) -> Iterator[None]:
    """Turns three kinds of errors of gin's calls into UsageErrors.

    First, a required parameter, or a parameter without default, that is not bound. Second, a bound parameter that a
    class passes to its base class by **keywords, although the base class does not take it. Third, an abstract method
    that a class of the user does not define.
    """
    try:
        yield
    except TypeError as error:
        if words := undefined_methods(error):
            raise UsageError(words) from None
        unexpected = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
        passed_on = [
            one
            for one in reading.bindings
            if unexpected and one.parameter == unexpected[1] and _takes_any_keyword(one.key[1])
        ]
        unsupplied = re.search(r"No values supplied by Gin or caller for arguments: \['(\w+)'", str(error))
        owner = re.search(r"In call to configurable '([\w.]+)'", str(error))
        if unsupplied and owner:
            name = f"{owner[1].rpartition('.')[2]}.{unsupplied[1]}"
            raise UsageError(_unbound(name)) from None
        if not passed_on:
            raise
        one = passed_on[-1]
        known = _settable(_all_parameters(one.key[1]))
        own = _own_name(one.name.rpartition(".")[0], one.parameter, known)
        raise UsageError(
            f"{one.name}, bound in {one.layer}, is a parameter neither of that class nor of its base classes"
            f"{own or close_names(one.parameter, known) or parameter_meant(one.parameter)}"
        ) from None
    except RuntimeError as error:
        missing = re.search(r"Required bindings for `([\w.]+)` not provided in config: \[(.*)\]", str(error))
        if missing is None:
            raise
        absent = [f"{missing[1]}.{name}" for name in re.findall(r"\w+", missing[2])]
        names = " and ".join(absent)
        how = "bind it" if errors.is_command() else f"give it, as in alfish.train({', '.join(map(setting, absent))})"
        remedy = REMEDIES.get(names, f"{how}, or use a conf that does (`alfish confs` lists them)")
        raise UsageError(f"nothing binds {names}; {remedy}") from None


def setting(name: str) -> str:
    """Returns a setting as the user writes it: by gin's name, or as an argument of `alfish.train`."""
    if errors.is_command():
        return name
    owner, _, parameter = name.rpartition(".")
    if name == "make_environment.env_id":
        return "environment=..."
    return f"{parameter}=..." if owner == "Trainer" else f'**{{"{name}": ...}}'


def given(binding: str) -> str:
    """Returns a binding as the user wrote it: a flag, or an argument of `alfish.train`."""
    if errors.is_command():
        return f"--gin_param={binding}"
    return re.split(r"^(?=[\w/.]+ = )", binding, maxsplit=1, flags=re.MULTILINE)[-1].removeprefix("Trainer.")


def close_names(name: str, names: Iterable[str]) -> str:
    """Returns '; did you mean ...?' with names close to `name`; '' if there are none."""
    plain = {one.lower(): one for one in names}
    close = [plain[one] for one in difflib.get_close_matches(name.lower(), plain, 3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def parameter_meant(name: str) -> str:
    """Returns a hint with parameters of the same name or meaning, or a similar name; configured classes come first."""
    configured = {selector for _, selector in gin_internals.bindings()}
    known = list(gin_internals.configurables())
    found, in_force = _parameters(known), _parameters([one for one in known if one in configured])
    same = NAMES_ELSEWHERE.get(name, name)
    if "." in same:
        return f"; did you mean {setting(same)}?"
    for other in (TWINS.get(same, ""), NAMES_IN_CLASSES.get(name, "")):
        if other in in_force and same not in in_force:
            same = other
    close = [same] if same in found else []
    if name not in NAMES_ELSEWHERE:
        close = close or difflib.get_close_matches(name, _settable(found), 1)
    if not close:
        return "; remove it"
    names = dict.fromkeys([*in_force.get(close[0], ()), *found[close[0]]])
    return f"; did you mean {' or '.join(map(setting, [*names][:3]))}?"


def parameter_read(name: str, selectors: Iterable[str]) -> str:
    """Returns a hint with the parameters of `selectors` that have the name or meaning of `name`, a `Class.parameter`.

    Returns '' if there are none.
    """
    own, _, parameter = name.rpartition("/")[2].rpartition(".")
    found = _parameters(selectors)
    names = found.get(parameter) or found.get(TWINS.get(parameter, ""), [])
    names = [one for one in names if one != f"{own}.{parameter}"]
    return f"; did you mean {' or '.join(map(setting, names[:3]))}?" if names else ""


def scope_meant(name: str, reached: Iterable[gin_internals.Key]) -> str:
    """Returns a hint with the scopes in which a parameter `scope/Class.parameter` is read; '' if there are none.

    Args:
      name: name of the parameter.
      reached: pairs of a scope and the selector of a class or function that was called in it.
    """
    scope, _, parameter = name.rpartition("/")
    owner = parameter.rpartition(".")[0]
    scopes = {one for one, selector in reached if one and f".{selector}".endswith(f".{owner}")}
    if not scope or not scopes:
        return ""
    close = difflib.get_close_matches(scope, scopes, 3) or sorted(scopes)[:3]
    return f"; did you mean {' or '.join(setting(f'{one}/{parameter}') for one in close)}?"


def _parameters(selectors: Iterable[str]) -> dict[str, list[str]]:
    """Returns, for each parameter's name, the `Class.parameter` of all classes and functions that have it."""
    found: dict[str, list[str]] = {}
    for selector in selectors:
        for parameter in inspect.signature(gin_internals.configurable(selector)).parameters:
            found.setdefault(parameter, []).append(f"{selector.rpartition('.')[2]}.{parameter}")
    return found


def _takes_any_keyword(selector: str) -> bool:
    parameters = inspect.signature(gin_internals.configurable(selector)).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _own_name(owner: str, name: str, known: Collection[str]) -> str:
    """Returns a hint with the parameter of a class that another library calls `name`; '' if there is none.

    Args:
      owner: name of the class.
      name: name of the parameter elsewhere.
      known: parameters of the class.
    """
    same = [names[name] for names in (NAMES_IN_CLASSES, NAMES_ELSEWHERE) if names.get(name) in known]
    return f"; did you mean {setting(f'{owner}.{same[0]}')}?" if same else ""


def _settable(names: Iterable[str]) -> list[str]:
    """Returns the parameters that a user may mean; specs come from the environment."""
    return [name for name in names if not name.endswith("_spec")]


def _all_parameters(selector: str) -> list[str]:
    """Returns the parameters of a class and of its base classes."""
    wrapped = gin_internals.configurable(selector)
    bases = wrapped.__mro__[:-1] if inspect.isclass(wrapped) else [wrapped]
    return [name for base in bases for name in inspect.signature(base).parameters]


def _module_of(name: str) -> str:
    """Returns the module of alfish that registers a class or function of this name in gin; '' if there is none."""
    package = Path(alfish.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if re.search(rf"^@gin\.configurable.*\n(@.*\n)*(class|def) {re.escape(name)}\b", path.read_text("utf-8"), re.M):
            return ".".join(path.relative_to(package.parent).with_suffix("").parts)
    return ""


def _unregistered_in(name: str) -> str | None:
    """Returns the module of the user that defines a class or function of this name; None if there is none."""
    for owner, module in tuple(sys.modules.items()):
        if owner.partition(".")[0] in {"alfish", *sys.stdlib_module_names}:
            continue
        found, file = getattr(module, "__dict__", {}).get(name), getattr(module, "__file__", None)
        is_defined = (inspect.isclass(found) or inspect.isfunction(found)) and found.__module__ == owner
        if is_defined and file and "site-packages" not in file:
            return owner
    return None


def _first_sentence(error: Exception) -> str:
    token = re.search(r"Failed to parse token '-?(\w+)'", str(error))
    if isinstance(error, SyntaxError) and token:
        found = re.search(rf"=.*?(\b{token[1]}\b[^\s,()\[\]{{}}#]*)", error.text or "")
        word = (found[1] if found else token[1]).rstrip(":")  # removes the colon after a dict's key
        if word.lower() in ("inf", "infinity", "nan"):
            return f"line {error.lineno} has {word}, but numbers must be finite: write a finite number"
        if word.capitalize() in ("True", "False", "None"):
            return f"line {error.lineno} has {word}; write {word.capitalize()} instead"
        return (
            f"line {error.lineno} has {word}, which is not a value: write text in quotes ('{word}'), and a class or "
            "function with @"
        )
    ambiguous = re.search(r"Ambiguous selector '([\w.]+)', matches \[(.*?)\]", str(error))
    if ambiguous:
        selectors = [selector.strip("'") for selector in ambiguous[2].split(", ")]
        return f"{ambiguous[1]} is {' or '.join(selectors)}; write which one you mean"
    if isinstance(error, SyntaxError):
        line, why = (error.text or "").strip(), error.msg.rstrip(".")
        return _not_gin(error.lineno, f": {line!r}" if line else "", why)
    if isinstance(error, tokenize.TokenError):
        why, (number, _) = error.args  # from Python 3.12 on, of more errors than the end of the text
        if "EOF" in why:
            return "the text ends within brackets or quotes that are not closed"
        return _NESTED if "nested" in why else _not_gin(number, "", why)
    unknown = UNKNOWN_PARAMETER.search(str(error))
    if unknown:
        return f"{unknown[1]} has no parameter named '{unknown[2]}'"
    return " ".join(str(error).split("\n  In ")[0].split()).rstrip(".")


def _not_gin(number: int | None, quoted: str, why: str) -> str:
    return (
        f"line {number} is not gin{quoted} ({why}); write Class.parameter = value, with text in quotes and lists in "
        "brackets"
    )


def _suggestion(error: Exception) -> str:
    """Returns a hint with names similar to an unknown name or parameter."""
    unknown = re.search(r"No configurable matching (?:reference )?'@?([\w./]+)", str(error))
    if unknown:
        names, name = sorted({one.rpartition(".")[2] for one in gin_internals.configurables()}), unknown[1]
        if module := _module_of(name.rpartition(".")[2]):
            return f"; {name} is in {module}, which nothing imports: import it in a conf, or leave {name} out"
        is_known = name.rpartition(".")[2].lower() in {one.lower() for one in names}
        if not is_known and (owner := _unregistered_in(name.rpartition(".")[2])):
            return f"; {owner} defines it, but gin does not know it: put @gin.configurable before its definition"
        return close_names(name.rpartition(".")[2], names) + (
            "; a conf must import what it configures, as in `import alfish.algorithms.ppo`"
        )
    parameter = UNKNOWN_PARAMETER.search(str(error))
    if parameter:
        if moved := moved_settings.hint(f"{parameter[1].rpartition('.')[2]}.{parameter[2]}"):
            return moved
        known = _settable(inspect.signature(gin.get_configurable(parameter[1])).parameters)
        if own := _own_name(parameter[1].rpartition(".")[2], parameter[2], known):
            return own
        others = (inspect.signature(one).parameters for one in gin_internals.configurables().values())
        if parameter[2] in NAMES_ELSEWHERE or any(parameter[2] in names for names in others):
            return parameter_meant(parameter[2])
        close = close_names(parameter[2], known)
        return close or f"; `alfish params {parameter[1].rpartition('.')[2]}` lists its parameters"
    return ""
