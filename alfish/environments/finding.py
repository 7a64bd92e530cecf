"""Finds environments by id: in gymnasium's registry, as vector classes, and in packages of extras."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import VectorEnv

from alfish.environments import suites
from alfish.environments.simulator import Simulator
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError, calling, in_words
from alfish.parameters import imports

# For each module that may be missing, the extra that installs it.
EXTRA_OF_MODULE = {
    "mujoco": "mujoco",
    "ale_py": "atari",
    "Box2D": "box2d",
    "envpool": "envpool",
    "mo_gymnasium": "mo",
    "gymnax": "gymnax",
    "brax": "brax",
    "mujoco_playground": "playground",
}
EXTRA_OF_PREFIX = {"ALE/": "atari"}
ENVIRONMENTS = gymnasium.Env, VectorEnv, FuncEnv, Simulator  # base classes


def make_single(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    """Returns an environment of a registered id; call `resolved` first, which imports the id's module."""
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except Exception as error:  # if the installed physics engine is too new, a package may raise any exception
        if cure := suites.conflict(env_id):
            raised = in_words(error, f"the constructor of {env_id}")
            raise CodeError(f"{raised}{cure}").with_traceback(error.__traceback__) from error.__cause__
        if isinstance(error, (gymnasium.error.DependencyNotInstalled, ImportError)):
            raise _missing_extra(env_id, error) from error
        mode, modes = kwargs.get("render_mode"), _render_modes(env_id)
        if mode and modes and mode not in modes:
            needs = f"its render modes are {', '.join(modes)}, but a film needs {mode}"
            raise UsageError(f"{env_id} cannot be filmed: {needs}") from error
        raise


def _render_modes(env_id: str) -> Sequence[str]:
    """Returns the render modes that an environment's class declares; [] if unknown."""
    entry_point: Any = gymnasium.spec(env_id.rpartition(":")[2]).entry_point
    with contextlib.suppress(Exception):  # importing may raise any exception, and the metadata may have any type
        made: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        return [str(mode) for mode in made.metadata["render_modes"]]
    return []


def make_vector_class(env_id: Any, num_envs: int, kwargs: Mapping[str, Any]) -> VectorEnv:
    """Returns a vector environment of the vector class registered for an id."""
    if callable(env_id):
        raise UsageError(
            f"make_environment.vectorization 'vector_entry_point' requires an id, but env_id is {name_of(env_id)}; use "
            "'sync', or a callable with an argument num_envs that makes a VectorEnv"
        )
    if gymnasium.spec(env_id).vector_entry_point is None:
        raise UsageError(f"{env_id} has no vector class for vectorization 'vector_entry_point'; use 'sync'")
    with calling(f"the constructor of {env_id}"), named_kwargs(env_id, kwargs):
        return gymnasium.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **kwargs)


@contextlib.contextmanager
def named_kwargs(env_id: str | Callable[..., Any] | FuncEnv, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turns a constructor's TypeError about an unknown or a missing argument into UsageError."""
    try:
        yield
    except TypeError as error:
        name = re.escape(name_of(env_id))
        if missing := re.match(rf"(?:\S+\.)?{name}(?:\.__init__)?\(\) missing .* arguments?: (.+)", str(error)):
            values = ", ".join(f"{each}: ..." for each in re.findall(r"'\w+'", missing[1]))
            raise UsageError(
                f"{name_of(env_id)} requires {missing[1]}; give make_environment.env_kwargs = {{{values}}}"
            ) from error
        if "unexpected keyword argument" not in str(error):
            raise
        if "'render_mode'" in str(error) and "render_mode" in kwargs:
            raise UsageError(
                f"{name_of(env_id)} cannot be filmed: its constructor takes no render_mode; add that argument, and a "
                "method render"
            ) from error
        raise UsageError(
            f"make_environment: {name_of(env_id)} does not take env_kwargs={dict(kwargs)}: {error}"
        ) from error


def name_of(env_id: str | Callable[..., Any] | FuncEnv) -> str:
    """Returns the name of an environment: the id, or the name of the constructor."""
    is_partial = hasattr(env_id, "func") and not hasattr(env_id, "__name__")
    made = env_id.func if is_partial else env_id  # type: ignore[union-attr]
    return made if isinstance(made, str) else getattr(made, "__name__", type(made).__name__)


def resolved(env_id: str, kwargs: Mapping[str, Any]) -> str | Callable[..., Any] | FuncEnv:
    """Imports the module in an id, and returns the id if it is registered, else the class, function or object it names.

    Args:
      env_id: id of the environment.
      kwargs: arguments of the constructor.

    Raises:
      UsageError: the module, id, class or function does not exist (the message says what to write instead), an extra is
        missing, or the current import policy forbids the import.
    """
    if ":" in str(kwargs.get("env_id")):  # GymV26Environment-v0 imports this module of the old gym
        imports.admit(kwargs["env_id"].partition(":")[0], "make_environment.env_kwargs")
    module, _, name = env_id.rpartition(":")
    imported = None
    if module:
        if module in EXTRA_OF_MODULE and importlib.util.find_spec(module) is None:
            raise _missing_extra(env_id, ImportError(module))
        suites.check_installed(module, env_id)
        if module in suites.ADAPTERS:
            return _adapted(env_id, module, name)
        imported = imports.import_named(module, "make_environment.env_id")
    for prefix, extra in EXTRA_OF_PREFIX.items():
        if name.startswith(prefix):
            of_prefix = {"atari": "ale_py"}[extra]
            if importlib.util.find_spec(of_prefix) is None:
                raise UsageError(f"{name} needs the extra {extra!r}: pip install 'alfish[{extra}]'")
            gymnasium.register_envs(importlib.import_module(of_prefix))
    try:
        gymnasium.spec(name)
        return env_id
    except gymnasium.error.Error:
        made = getattr(imported, name, None)
        if callable(made) or isinstance(made, FuncEnv):
            kind = made if inspect.isclass(made) else type(made)
            if not issubclass(kind, ENVIRONMENTS):
                imports.admit_functions(module, "make_environment.env_id")
            return made
        sentence = f"make_environment.env_id: there is no environment {name!r}"
        if imported is None:
            if found := _classes_of_module(name):
                raise UsageError(f"{sentence}; {name} is a module: write {' or '.join(found)}") from None
            raise UsageError(f"{sentence}{suites.cure(name, gymnasium.registry)}") from None
        raise UsageError(
            f"{sentence} after importing {module}, nor a class or function of that name in "
            f"it{suites.other_interface(name) or suites.close_ids(name, gymnasium.registry)}"
        ) from None


def _adapted(env_id: str, module: str, task: str) -> Callable[..., Any]:
    """Returns the constructor of a task of a package in `suites.ADAPTERS`, whose interface is not gymnasium's."""
    of_alfish, _, kind = suites.ADAPTERS[module].partition(":")
    made = functools.partial(getattr(imports.import_named(of_alfish, "make_environment.env_id"), kind), task)
    made.__name__ = env_id  # type: ignore[attr-defined]
    return made


def _classes_of_module(name: str) -> list[str]:
    """Returns the names of a module's environment classes, such as "'crane:Crane'"; [] if the module is missing."""
    if imports.is_restricted() or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        return []
    try:
        module = imports.import_named(name, "make_environment.env_id")
    except UsageError:
        return []
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__.startswith(name)]
    made = [kind for kind in own if issubclass(kind, FuncEnv) or (hasattr(kind, "reset") and hasattr(kind, "step"))]
    return [f"'{name}:{kind.__name__}'" for kind in made if not issubclass(kind, gymnasium.Wrapper)][:3]


def _missing_extra(env_id: str, error: Exception) -> UsageError:
    words = str(error)
    for module, extra in EXTRA_OF_MODULE.items():
        if module.lower() in words.lower() and importlib.util.find_spec(module) is None:
            return UsageError(f"{env_id} needs the extra {extra!r}: pip install 'alfish[{extra}]'")
    return UsageError(f"{env_id} cannot be built: {words}")
