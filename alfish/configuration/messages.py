"""Sentences for the exceptions of gin while it reads a configuration, and while a Trainer is built from it."""

import contextlib
import difflib
import inspect
import re
import tokenize
from collections.abc import Iterable, Iterator

import gin

from alfish.configuration.bindings import Reading
from alfish.errors import RunError, UsageError
from alfish.parameters import gin_internals
from alfish.user_code import CodeError

# For required parameters that no shipped conf binds.
REMEDIES = {"OfflineBuffer.sources": "name the data, as in OfflineBuffer.sources = ['alfish:DIR'] (docs/offline.md)"}
# Parameters by their names in stable-baselines3, CleanRL and common speech; docs/from_*.md have all differences.
NAMES_ELSEWHERE = {
    "activation_fn": "activation",
    "buffer_size": "capacity",
    "clip_coef": "clip_range",
    "clip_range_vf": "value_clip_range",
    "ent_coef": "entropy_coef",
    "epochs": "num_epochs",
    "exploration_noise": "noise_std",
    "gae_lambda": "lambda_",
    "gradient_steps": "updates_per_env_step",
    "hidden_sizes": "layers",
    "learning_starts": "warmup_env_steps",
    "log_std_init": "initial_log_std",
    "lr": "learning_rate",
    "n_envs": "num_envs",
    "n_epochs": "num_epochs",
    "n_steps": "unroll_length",
    "net_arch": "layers",
    "noise_clip": "smoothing_clip",
    "num_minibatches": "minibatch_size",
    "num_steps": "unroll_length",
    "policy_delay": "actor_period",
    "policy_frequency": "actor_period",
    "policy_noise": "smoothing_std",
    "target_entropy": "box_target_entropy",
    "target_network_frequency": "target_period",
    "target_update_interval": "target_period",
    "tau": "target_rate",
    "total_timesteps": "num_env_steps",
    "train_freq": "updates_per_env_step",
    "train_frequency": "updates_per_env_step",
    "update_epochs": "num_epochs",
    "vf_coef": "value_coef",
}
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
    except UsageError as error:
        raise UsageError(str(error).split("\n  In ")[0]) from error  # gin appends the place of an include
    except RecursionError as error:
        raise UsageError(f"{origin}: its values are nested too deeply") from error
    except PARSING_ERRORS as error:
        raise UsageError(f"{origin}: {_first_sentence(error)}{_suggestion(error)}") from error


@contextlib.contextmanager
def complete(reading: Reading) -> Iterator[None]:
    """Turns two errors of calls into UsageErrors.

    The first is a required parameter that nothing binds, marked as required or without a default. The second is a bound
    parameter that a class passes to its base class by **keywords, and that the base class does not take.
    """
    try:
        yield
    except TypeError as error:
        unexpected = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
        passed_on = [
            one
            for one in reading.bindings
            if unexpected and one.parameter == unexpected[1] and _takes_any_keyword(one.key[1])
        ]
        absent = re.search(r"No values supplied by Gin or caller for arguments: \['(\w+)'", str(error))
        owner = re.search(r"In call to configurable '([\w.]+)'", str(error))
        if absent and owner:
            name = f"{owner[1].rpartition('.')[2]}.{absent[1]}"
            raise UsageError(f"{name} has no value; bind it, because @{name.partition('.')[0]}() is bound") from error
        if not passed_on:
            raise
        one = passed_on[-1]
        raise UsageError(
            f"{one.name}, bound in {one.layer}, is a parameter neither of that class nor of its base classes"
            f"{close_names(one.parameter, _all_parameters(one.key[1]))}"
        ) from error
    except RuntimeError as error:
        missing = re.search(r"Required bindings for `([\w.]+)` not provided in config: \[(.*)\]", str(error))
        if missing is None:
            raise
        names = " and ".join(f"{missing[1]}.{name}" for name in re.findall(r"\w+", missing[2]))
        remedy = REMEDIES.get(names, "bind it, or take a conf that does (`alfish confs` lists them)")
        raise UsageError(f"nothing binds {names}; {remedy}") from error


@contextlib.contextmanager
def without_chain() -> Iterator[None]:
    """Removes from a message the chain of constructors that gin appends to it."""
    try:
        yield
    except (UsageError, RunError) as error:
        sentence, _, chain = str(error).partition("\n  In call to configurable")
        if not chain:
            raise
        kind = next(kind for kind in (UsageError, CodeError, RunError) if isinstance(error, kind))
        raise kind(sentence) from error


def close_names(name: str, names: Iterable[str]) -> str:
    """Returns '; did you mean ...?' with close matches, or ''."""
    close = difflib.get_close_matches(name, dict.fromkeys(names), 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def parameter_meant(name: str) -> str:
    """Returns a hint at parameters of this name or meaning, or of a close name; configured classes come first."""
    configured = {selector for _, selector in gin_internals.bindings()}
    found: dict[str, list[str]] = {}
    known = sorted(gin_internals.configurables().items(), key=lambda item: item[0] not in configured)
    for selector, configurable in known:
        for parameter in inspect.signature(configurable).parameters:
            found.setdefault(parameter, []).append(f"{selector.rpartition('.')[2]}.{parameter}")
    same = NAMES_ELSEWHERE.get(name, name)
    close = [same] if same in found else difflib.get_close_matches(name, list(found), 1)
    return f"; did you mean {' or '.join(found[close[0]][:3])}?" if close else "; remove it"


def _takes_any_keyword(selector: str) -> bool:
    parameters = inspect.signature(gin_internals.configurable(selector)).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _all_parameters(selector: str) -> list[str]:
    """Returns the parameters of a class and of its base classes."""
    wrapped = gin_internals.configurable(selector)
    bases = wrapped.__mro__[:-1] if inspect.isclass(wrapped) else [wrapped]
    return [name for base in bases for name in inspect.signature(base).parameters]


def _first_sentence(error: Exception) -> str:
    token = re.search(r"Failed to parse token '(\w+)'", str(error))
    if isinstance(error, SyntaxError) and token:
        found = re.search(rf"=.*?(\b{token[1]}\b[^\s,()\[\]{{}}#]*)", error.text or "")
        word = (found[1] if found else token[1]).rstrip(":")  # a key of a dict
        if word.capitalize() in ("True", "False", "None"):
            return f"line {error.lineno} has {word}, which is written {word.capitalize()}"
        return (
            f"line {error.lineno} has {word}, which is no value: write text in quotes ('{word}'), and a class or "
            "function with @"
        )
    ambiguous = re.search(r"Ambiguous selector '([\w.]+)', matches \[(.*?)\]", str(error))
    if ambiguous:
        selectors = [selector.strip("'") for selector in ambiguous[2].split(", ")]
        return f"{ambiguous[1]} is {' or '.join(selectors)}; write which"
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not gin: {error.msg}"
    if isinstance(error, tokenize.TokenError):
        return f"line {error.args[1][0]} is not gin: {error.args[0]}"
    return " ".join(str(error).split("\n  In ")[0].split()).rstrip(".")


def _suggestion(error: Exception) -> str:
    """Returns close matches of a name or parameter that gin does not know."""
    unknown = re.search(r"No configurable matching (?:reference )?'@?([\w./]+)", str(error))
    if unknown:
        names = sorted({selector.rpartition(".")[2] for selector in gin_internals.configurables()})
        return close_names(unknown[1].rpartition(".")[2], names) + (
            "; a conf imports what it configures, as in `import alfish.algorithms.ppo`"
        )
    parameter = re.search(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", str(error))
    if parameter:
        others = (inspect.signature(one).parameters for one in gin_internals.configurables().values())
        if parameter[2] in NAMES_ELSEWHERE or any(parameter[2] in names for names in others):
            return parameter_meant(parameter[2])
        return close_names(parameter[2], list(inspect.signature(gin.get_configurable(parameter[1])).parameters))
    return ""
