"""Builds the parts of a run from the classes and factories that the user passed."""

import functools
import inspect
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from alfish.errors import UsageError, first_line
from alfish.errors.user_code import calling, refuse
from alfish.parameters import checking

T = TypeVar("T")
MAX_DEPTH = 50  # maximum depth of nested parts

# Files that call factories. A TypeError raised in these files is about the call, not about the factory's code.
_CALLERS = (__file__, checking.__file__, os.path.join("gin", "config.py"))


# Ends of messages about the result of a factory, by the name of the parameter.
HINTS = {
    "Trainer.environment": "; give functools.partial(make_environment, make_env), where make_env is a class or "
    "function that makes a gymnasium.Env"
}


def build(factory: Callable[..., T], kind: type | tuple[type, ...], name: str, *arguments: Any, **keywords: Any) -> T:
    """Calls a class or factory, and checks the type of its result.

    Args:
      factory: class or function that the user has passed.
      kind: type of the factory's result, or several types; messages name the first.
      name: name of the parameter in messages, such as 'Trainer.algorithm'.
      arguments, keywords: arguments of the call.

    Raises:
      UsageError: the factory does not take these arguments, or returns an object of a type other than `kind`.
    """
    part: T = _call(factory, name, f"as {_article(kind)} is", *arguments, **keywords)
    if hasattr(part, "named_modules") and "_modules" not in vars(part):
        raise UsageError(f"the constructor of {type(part).__name__} does not call super().__init__; call it first")
    if not isinstance(part, kind):
        raise UsageError(
            f"{name} made {_described(part)}; it must be a class, or a function that returns {_article(kind)}"
            f"{HINTS.get(name, '')}"
        )
    return part


_depth = 0  # depth of the parts that are being built


def build_network(
    factory: Callable[..., Any],
    name: str,
    *arguments: Any,
    has: Sequence[str] = ("output_size",),
    takes: int | None = 1,
    **keywords: Any,
) -> Any:
    """Builds a network that the user may replace, and checks the attributes and methods that its caller needs.

    Args:
      factory: class or function that makes the network.
      name: name of the parameter in messages, such as 'Torso.mlp'.
      arguments, keywords: arguments of the call.
      has: attributes and methods that the network needs in addition to `forward`.
      takes: number of arguments that `forward` is called with; None means that no `forward` is needed.

    Raises:
      UsageError: the factory does not take the arguments, or its network lacks what the caller needs.
    """
    from torch import nn

    network = _call(factory, name, "as the shipped network is", *arguments, **keywords)
    has = has if takes is None else ("forward", *has)
    # Each module inherits a `forward` that raises an error.
    lacks_forward = getattr(getattr(network, "forward", None), "__func__", None) is nn.Module.forward
    missing = [one for one in has if not hasattr(network, one) or (one == "forward" and lacks_forward)]
    if missing:
        lacks = f"which has no {' and no '.join(missing)}; it needs {', '.join(has)}"
        raise UsageError(f"{name} made {_described(network)}, {lacks}")
    if takes is not None:
        check_forward(network, name, takes)
    if takes == 1 and [*map(type, arguments)] == [int] and "output_size" in has:
        check_features(network, name, (arguments[0],))
    return network


def check_features(network: Any, name: str, shape: Sequence[int], dtype: Any = None) -> None:
    """Raises UsageError if a network does not return `output_size` features for rows `[B, ...]` and `[T, N, ...]`.

    Calls the network in eval mode, and restores random generators afterwards. Lazy layers get their sizes in this call.

    Args:
      network: network with `output_size`.
      name: name of the parameter in messages.
      shape: shape of one row, without leading dimensions.
      dtype: dtype of the rows; None means float32.
    """
    import torch

    modes = {module: module.training for module in network.modules()}
    network.eval()
    dtype = dtype or torch.float32
    for leading in ([2], [3, 2]):  # as in acting, [B], and as in training, [T, N]
        given, wanted = [*leading, *shape], [*leading, network.output_size]
        words = f"the forward of {name} for {_form(dtype, given)}"
        with torch.random.fork_rng(devices=[]), torch.no_grad(), calling(words):
            made = network(torch.zeros(given, dtype=dtype))
        is_tensor = isinstance(made, torch.Tensor)
        if not (is_tensor and list(made.shape) == wanted and made.dtype == torch.float32):
            found = _form(made.dtype, list(made.shape)) if is_tensor else _described(made)
            raise UsageError(
                f"{name} made {_described(network)}, whose forward returned {found} for {_form(dtype, given)}; it must "
                f"return float32 {wanted}, as its output_size says"
            )
    for module, mode in modes.items():
        module.training = mode


def _form(dtype: Any, shape: list[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def check_forward(network: Any, name: str, takes: int, *keywords: str) -> None:
    """Raises UsageError if the signature of a network's `forward` does not accept a call.

    Args:
      network: network with the `forward`.
      name: name of the parameter in messages, as in `build`.
      takes: number of positional arguments of the call.
      keywords: names of the call's keyword arguments.
    """
    parameters = inspect.signature(network.forward)
    try:
        parameters.bind(*range(takes), **dict.fromkeys(keywords))
    except TypeError:
        taken = " and ".join(("one argument" if takes == 1 else f"{takes} arguments", *keywords))
        words = f"whose forward takes ({', '.join(parameters.parameters)}); it is called with {taken}"
        raise UsageError(f"{name} made {_article(type(network))}, {words}") from None


# A network with memory also takes the state, and returns the next state as its last output.
build_policy_value = functools.partial(build_network, has=("policy", "value", "initial_state"), takes=2)
build_torso = functools.partial(build_network, has=("output_size", "initial_state"), takes=2)
build_memory = functools.partial(build_network, has=("output_size", "initial_state"), takes=3)


def parameter_names(factory: Callable[..., Any]) -> set[str]:
    """Returns the parameter names of a function or class, also those of an `__init__` that gin's metaclass hides.

    The result is empty if there is no signature, as for a builtin type, or for a partial with arguments that its
    function does not accept.
    """
    made = getattr(factory, "func", factory)  # function inside a partial
    try:
        found = set(inspect.signature(factory).parameters)
    except ValueError:
        return set()
    return found | set(inspect.signature(made.__init__).parameters) if inspect.isclass(made) else found


def bound(network: Callable[..., Any], values: str, **size: int) -> Callable[..., Any]:
    """Returns a network's factory as a partial that sets the size of the values, such as `num_values=2`.

    Args:
      network: class or function of the network.
      values: name of the representation of values for the message, such as 'Quantiles'.
      size: size of the values, by the name of the network's parameter.

    Raises:
      UsageError: the network is a class without this parameter.
    """
    (name,) = size
    if inspect.isclass(network) and name not in parameter_names(network):
        raise UsageError(
            f"{network.__name__} takes no {name}, so it cannot predict {values}; use another network, or other values"
        )
    return functools.partial(network, **size)


def _call(factory: Callable[..., Any], name: str, how: str, *arguments: Any, **keywords: Any) -> Any:
    """Calls a factory. A TypeError about the call becomes a UsageError; `how` describes the correct call."""
    global _depth
    if _depth >= MAX_DEPTH:
        raise UsageError(f"{name} makes a part that contains itself without end; set another class")
    refusal = f"{name} cannot be called {how}"
    if hasattr(factory, "forward") and not inspect.isclass(factory):
        raise UsageError(
            f"{refusal}: it is already {_article(type(factory))}; give its class, or a function that makes it"
        )
    _depth += 1
    try:
        return factory(*arguments, **keywords)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        given = {*getattr(factory, "keywords", ()), *keywords}  # also names that a partial sets
        is_bound = unexpected is not None and unexpected[1] not in given  # see `sentences.complete`
        if is_bound:
            raise
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith(_CALLERS):
            refuse(error, name)
            raise
        if words := undefined_methods(error):
            raise UsageError(words) from error
        inner = re.match(r"(\w+)\.__init__\(\) missing .* arguments?: '(\w+)'", str(error))
        if inner is not None and inner[1] != getattr(factory, "__name__", inner[1]):  # an argument such as `@Linear()`
            setting = f"{inner[1]}.{inner[2]}"
            raise UsageError(f"@{inner[1]}() requires a value for {setting}; bind {setting}") from error
        hint = "" if arguments or inspect.isclass(factory) else "; give a class, or a function that makes the part"
        hint = HINTS.get(name, hint)
        raise UsageError(f"{refusal}: {first_line(error)}{hint}") from error
    except (Exception, SystemExit) as error:
        refuse(error, name)
        raise
    finally:
        _depth -= 1


def undefined_methods(error: TypeError) -> str | None:
    """Returns a sentence about abstract methods that a class does not define; None if the error has another cause."""
    abstract = re.search(r"abstract class (\w+) .*abstract methods? (.+)", first_line(error))
    if abstract is None:
        return None
    names = abstract[2].replace("'", "")  # in quotes from Python 3.12 on
    return f"{abstract[1]} does not define {names}; define {'them' if ',' in names else 'it'}"


def _described(made: Any) -> str:
    return "None" if made is None else _article(type(made))


def _article(kind: type | tuple[type, ...]) -> str:
    name = (kind if isinstance(kind, type) else kind[0]).__name__
    is_spelled = name[:2].isupper()  # an abbreviation read letter by letter: RLAlgorithm, MLP
    return f"{'an' if name[0].upper() in ('AEFHILMNORSX' if is_spelled else 'AEIOU') else 'a'} {name}"
