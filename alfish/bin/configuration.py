"""gin: finding, reading, checking and writing configurations. Nothing below this folder calls it."""

import contextlib
import difflib
import inspect
import logging
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin

import alfish
from alfish.errors import UsageError

# The config a run was asked for, and with every default in force.
CONFIG_FILE, OPERATIVE_FILE = "config.gin", "operative_config.gin"
BUDGET_LINE = re.compile(r"^Trainer\.(num_env_steps|num_iterations|num_updates|wall_seconds) = .*$", re.MULTILINE)


def confs_directory() -> Path:
    """Where the shipped confs are: inside an installed package, or beside it in a checkout."""
    package = Path(alfish.__file__).parent
    return package / "confs" if (package / "confs").is_dir() else package.parent / "confs"


def read(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Parses gin files, then bindings, into an empty configuration.

    A file is looked for where the user stands, then among the shipped confs; includes, also beside the file itself.

    Raises:
      UsageError: a file, name, parameter or import that does not exist, or text that is not gin.
    """
    gin.clear_config()
    paths = [find(file) for file in files]
    # An include is looked for beside its file and among the shipped confs before the place where the user stands.
    directories = [*(path.parent for path in paths), confs_directory(), confs_directory().parent]
    gin.config._LOCATION_PREFIXES[:] = [*dict.fromkeys(map(str, directories)), ""]
    _register()
    for path in paths:
        with _named_errors(str(path)):
            gin.parse_config_file(str(path.resolve()))
    for binding in bindings:
        with _named_errors(f"--gin_param={binding}"):
            gin.parse_config(binding)


def read_text(text: str, origin: str) -> None:
    """Parses a configuration that a run saved."""
    gin.clear_config()
    _register()
    with _named_errors(origin):
        gin.parse_config(text)


def find(file: str) -> Path:
    for path in (Path(file), confs_directory() / file, confs_directory() / Path(file).name):
        if path.is_file():
            return path
    names = sorted(path.name for path in confs_directory().glob("*.gin"))
    close = difflib.get_close_matches(Path(file).name, names, 3, 0.4)
    hint = f"close ones are {', '.join(close)}" if close else "`alfish confs` lists the shipped ones"
    raise UsageError(f"there is no gin file {file!r}, here or among the shipped confs; {hint}")


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Puts the caller's configuration back at the end: values that no text can say, and the lock, included."""
    kept = [gin.config._CONFIG, gin.config._OPERATIVE_CONFIG, gin.config._SINGLETONS, gin.config._IMPORTS]
    before, was_locked = [part.copy() for part in kept], gin.config_is_locked()
    try:
        yield
    finally:
        gin.clear_config()
        for part, content in zip(kept, before):
            part.update(content)
        gin.config._set_config_is_locked(was_locked)


def text() -> str:
    """The configuration as it was asked for, normalised."""
    return gin.config_str()


def operative_text() -> str:
    """The configuration with every default that was in force."""
    return gin.operative_config_str()


def refuse_unreachable(files: Sequence[str], bindings: Sequence[str]) -> None:
    """To be called when everything is built: raises where a bound parameter cannot have been, or ever be, read.

    Reachable is what was called while building, and what a reachable binding refers to (`@make_environment`).

    Raises:
      UsageError: names the parameters, and where they may have been bound.
    """
    config, operative = gin.config._CONFIG, gin.config._OPERATIVE_CONFIG
    reachable = {(scope, selector) for scope, selector in operative}
    frontier = list(reachable)
    while frontier:
        scope, selector = frontier.pop()
        for key in _keys_for(scope, selector, config):
            for value in config[key].values():
                for found in _references(value):
                    if found not in reachable:
                        reachable.add(found)
                        frontier.append(found)
    read_keys = {key for scope, selector in reachable for key in _keys_for(scope, selector, config)}
    unread = []
    for (scope, selector), parameters in config.items():
        if (scope, selector) in read_keys or selector == "gin.macro":
            continue
        name = "/".join(part for part in (scope, selector.rpartition(".")[2]) if part)
        unread += [f"{name}.{parameter}" for parameter in parameters]
    if unread:
        origins = " or ".join([*files, *(["--gin_param"] if bindings else [])])
        raise UsageError(
            f"nothing reads {', '.join(sorted(unread))}, bound in {origins}: no part of this Trainer uses it; "
            "remove the binding, or refer to what it configures with @"
        )


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Turns what gin says of required parameters that nothing binds into a UsageError."""
    try:
        yield
    except RuntimeError as error:
        missing = re.search(r"Required bindings for `([\w.]+)` not provided in config: \[(.*)\]", str(error))
        if missing is None:
            raise
        names = " and ".join(f"{missing[1]}.{name}" for name in re.findall(r"\w+", missing[2]))
        raise UsageError(
            f"nothing binds {names}; bind it, or take a conf that does (`alfish confs` lists them)"
        ) from error


def difference(before: str, after: str) -> str:
    """The lines that differ, as `- old` and `+ new`; the budget does not count, since a run may be extended."""
    then, now = (BUDGET_LINE.sub("", config).splitlines() for config in (before, after))
    changes = difflib.unified_diff(then, now, lineterm="", n=0)
    return "\n".join(
        line
        for line in changes
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip() and not line[1:].startswith("#")
    )


def _keys_for(scope: str, selector: str, config: dict) -> list[tuple[str, str]]:
    """The bindings that a call of `selector` in `scope` (`a/b`) reads: those of '', 'a' and 'a/b'."""
    parts = scope.split("/") if scope else []
    scopes = ["/".join(parts[:i]) for i in range(len(parts) + 1)]
    return [(part, selector) for part in scopes if (part, selector) in config]


def _references(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, gin.config.ConfigurableReference):
        if value.configurable.selector == "gin.macro":
            macro = gin.config._CONFIG.get(("/".join(value.scopes), "gin.macro"), {})
            for inner in macro.values():
                yield from _references(inner)
        else:
            yield "/".join(value.scopes), value.configurable.selector
    elif isinstance(value, dict):
        for inner in (*value.keys(), *value.values()):
            yield from _references(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _references(inner)


def _register() -> None:
    """Registers the names of what every run has; algorithms and toys are imported by the confs that use them."""
    import alfish.listeners  # noqa: F401
    import alfish.networks  # noqa: F401
    import alfish.schedules  # noqa: F401
    import alfish.trainer  # noqa: F401


@contextlib.contextmanager
def _named_errors(origin: str) -> Iterator[None]:
    """Turns what gin raises into one sentence that names `origin`."""

    def is_about_a_failure(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Path not found")  # gin says so of every place but the right one

    logging.getLogger().addFilter(is_about_a_failure)
    try:
        yield
    except ModuleNotFoundError as error:
        name = re.search(r"No module named '([\w.]+)'", str(error))  # gin's copy of the error has lost its `name`
        raise UsageError(
            f"{origin} imports {name[1] if name else error.name!r}, which is not installed or not on PYTHONPATH"
        ) from error
    except (ValueError, SyntaxError, tokenize.TokenError, AttributeError, OSError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{origin}: {_first_sentence(error)}{_suggestion(error)}") from error
    finally:
        logging.getLogger().removeFilter(is_about_a_failure)


def _first_sentence(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not gin: {error.msg}"
    if isinstance(error, tokenize.TokenError):
        return f"line {error.args[1][0]} is not gin: {error.args[0]}"
    return " ".join(str(error).split("\n  In ")[0].split()).rstrip(".")


def _suggestion(error: Exception) -> str:
    """Close matches of a name or parameter that gin does not know."""
    unknown = re.search(r"No configurable matching (?:reference )?'@?([\w./]+)", str(error))
    if unknown:
        names = sorted({selector.rpartition(".")[2] for selector, _ in gin.config._REGISTRY.items()})
        return _close(unknown[1].rpartition(".")[2], names) + (
            "; a conf imports what it configures, as in `import alfish.algorithms.ppo`"
        )
    parameter = re.search(r"Configurable '([\w.]+)' doesn't have a parameter named '(\w+)'", str(error))
    if parameter:
        return _close(parameter[2], list(inspect.signature(gin.get_configurable(parameter[1])).parameters))
    return ""


def _close(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
