"""gin: finding, reading, checking and writing configurations. Below this folder only a worker's program calls gin."""

import contextlib
import copy
import difflib
import hashlib
import inspect
import logging
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gin

import alfish
from alfish.configuration.kinds import mistake, takes_parts
from alfish.errors import UsageError
from alfish.parameters import description, imports
from alfish.parameters.description import CONFIG_FILE

# The config a run was asked for, and with every default in force.
OPERATIVE_FILE = "operative_config.gin"
PARAMETER = "--gin_param="
# Of required parameters that no shipped conf binds.
REMEDIES = {"OfflineBuffer.sources": "name the data, as in OfflineBuffer.sources = ['alfish:DIR'] (docs/offline.md)"}
BUDGET_LINE = re.compile(r"^Trainer\.(num_env_steps|num_iterations|num_updates|wall_seconds) = .*$", re.MULTILINE)

Key = tuple[str, str]  # scope (`a/b`), selector
Values = Mapping[Key, Mapping[str, Sequence[Any]]]  # those a parameter has had


class Binding(NamedTuple):
    key: Key
    parameter: str
    value: Any
    origin: str  # a file, or `PARAMETER` and the text

    @property
    def layer(self) -> str:
        return _layer_of(self.origin)


# Every line that was read, in order: gin itself keeps the last one of a parameter, and not where it was. And the
# layers in the order in which they ended: a file comes after those that it includes.
_BINDINGS: list[Binding] = []
_LAYERS: list[str] = []


def confs_directory() -> Path:
    """Where the shipped confs are: inside an installed package, or beside it in a checkout."""
    package = Path(alfish.__file__).parent
    return package / "confs" if (package / "confs").is_dir() else package.parent / "confs"


def read(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Parses gin files, then bindings, into an empty configuration.

    A file is looked for where the user stands, then among the shipped confs; includes, also beside the file itself.

    Raises:
      UsageError: a file, name, parameter or import that does not exist, text that is not gin, or a value of a kind that
        its parameter does not take.
    """
    gin.clear_config()
    _forget()
    paths = [find(file) for file in files]
    # An include is looked for beside its file and among the shipped confs before the place where the user stands.
    # Whole paths: gin takes what begins with a package's name for a file of that package.
    directories = [*(path.resolve().parent for path in paths), confs_directory(), confs_directory().parent, Path.cwd()]
    gin.config._LOCATION_PREFIXES[:] = [*dict.fromkeys(map(str, directories))]
    _register()
    for path in paths:
        with _named_errors(str(path)), _remembered(str(path)):
            _import_modules(path.read_text(), str(path))
            _register_parts(path.read_text(), str(path))
            gin.parse_config_file(str(path.resolve()))
    for binding in bindings:
        with _named_errors(PARAMETER + binding), _remembered(PARAMETER + binding):
            _import_modules(binding, PARAMETER + binding)
            _register_parts(binding, PARAMETER + binding)
            gin.parse_config(binding)
    _refuse_dynamic_references()
    _refuse_unused_macros()
    _refuse_wrong_kinds()


@contextlib.contextmanager
def saved(path: Path, allow_import: Sequence[str] = ()) -> Iterator[None]:
    """Parses the configuration that a run saved. It may come from another person, so it is not trusted.

    In the context it may import modules of alfish, modules that this process has imported already, and those in
    `allow_import`; so may what is built from it, as `make_environment.env_id` imports.

    Raises:
      UsageError: it names another module, registers names dynamically, includes a file, or is not gin.
    """
    gin.clear_config()
    _forget()
    _register()
    with imports.restricted(allow_import):
        with _named_errors(str(path)), _remembered(str(path)):
            text = path.read_text()
            _import_modules(text, str(path))
            _register_parts(text, str(path))
            gin.parse_config(text)
        _refuse_dynamic_references()
        _refuse_wrong_kinds()
        _forget()  # what nothing reads was refused when the run was configured
        yield


def _import_modules(text: str, origin: str) -> None:
    """Imports the modules that a gin text names, so that gin finds them imported."""
    for statement in gin.config_parser.ConfigParser(text, _NoReferences()):
        if isinstance(statement, gin.config_parser.IncludeStatement) and imports.is_restricted():
            raise UsageError(f"{origin} includes {statement.filename!r}; the configuration of a run is one file")
        if not isinstance(statement, gin.config_parser.ImportStatement):
            continue
        if not statement.module.startswith("__gin__."):
            imports.import_named(statement.module, origin)
        elif imports.is_restricted():
            raise UsageError(
                f"{origin} has `{statement.format()}`, with which it could call any function; the configuration of a "
                "run may not: decorate its classes and functions with @gin.configurable, and import their modules"
            )


def _register_parts(text: str, origin: str) -> None:
    """Registers the classes and functions that the description of a Trainer names."""
    for module, name in description.PART.findall(text):
        imports.import_part(module, name, origin)
        description.register(module, name)


class _NoReferences(gin.config_parser.ParserDelegate):
    """Leaves references and macros of a text unresolved."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
        return scoped_configurable_name

    def macro(self, macro_name: str) -> str:
        return macro_name


def _refuse_dynamic_references() -> None:
    """Raises UsageError where a restricted configuration uses what another one has registered dynamically."""
    if not imports.is_restricted():
        return
    references = [reference.config_key for reference in gin.config.iterate_references(gin.config._CONFIG)]
    for _, selector in (*gin.config._CONFIG, *references):
        if gin.config._REGISTRY[selector].import_source is not None:
            raise UsageError(f"{selector} is registered dynamically, and the configuration of a run may not use it")


def _layer_of(origin: str) -> str:
    return PARAMETER if origin.startswith(PARAMETER) else origin


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
    return description.header(gin.config_str()) + gin.config_str()


def bind(settings: Mapping[str, Any]) -> None:
    """Binds values that no text can say, by scope/name.parameter; `text` does not have them."""
    for name, value in settings.items():
        gin.bind_parameter(name, value)


def bound(selector: str, *parameters: str) -> dict[str, Any]:
    """The values that are bound to these parameters, with references resolved; other parameters are not looked at."""
    bindings = gin.get_bindings(selector, resolve_references=False)
    return {name: copy.deepcopy(bindings[name]) for name in parameters if name in bindings}  # which is how gin resolves


def operative_text() -> str:
    """The configuration with every default that was in force."""
    return gin.operative_config_str()


def refuse_unreachable(files: Sequence[str], bindings: Sequence[str]) -> None:
    """To be called when everything is built: raises where a bound parameter cannot have been, or ever be, read.

    Reachable is what was called while building, and what a reachable binding refers to (`@make_environment`). What was
    reachable until a later line, file or --gin_param replaced the reference to it is no mistake.

    Args:
      files, bindings: what the user named. What a run saved was checked then; what a program binds for itself is its
        own business.

    Raises:
      UsageError: names the parameters, and where they were bound.
    """
    reached = _reached({key: {name: [v] for name, v in found.items()} for key, found in gin.config._CONFIG.items()})
    last = {(one.key, one.parameter): index for index, one in enumerate(_BINDINGS)}
    passed = {str(path) for path in map(find, files) if _is_saved(path)}
    unread: dict[str, str] = {}
    for index in last.values():
        one = _BINDINGS[index]
        if one.key[1] == "gin.macro" or one.origin in passed or _reads(reached, one.key):
            continue
        if one.layer == PARAMETER and one.origin.removeprefix(PARAMETER) not in bindings:
            continue
        if not _was_reachable(index, reached):
            unread[_name(one)] = one.layer.rstrip("=")
    if unread:
        raise UsageError(
            f"nothing reads {', '.join(sorted(unread))}, bound in {' and '.join(dict.fromkeys(unread.values()))}: no "
            "part of this Trainer uses it; remove the binding, or refer to what it configures with @"
        )


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Turns two errors of calls into UsageErrors: a required parameter that nothing binds, and a bound one that a class
    with **keywords hands on to a base class that does not take it."""
    try:
        yield
    except TypeError as error:
        unexpected = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
        bound = [one for one in _BINDINGS if unexpected and one.parameter == unexpected[1] and _hands_on(one.key[1])]
        if not bound:
            raise
        one = bound[-1]
        raise UsageError(
            f"{_name(one)}, bound in {one.layer.rstrip('=')}, is a parameter neither of that class nor of its base "
            f"classes{_close(one.parameter, _all_parameters(one.key[1]))}"
        ) from error
    except RuntimeError as error:
        missing = re.search(r"Required bindings for `([\w.]+)` not provided in config: \[(.*)\]", str(error))
        if missing is None:
            raise
        names = " and ".join(f"{missing[1]}.{name}" for name in re.findall(r"\w+", missing[2]))
        remedy = REMEDIES.get(names, "bind it, or take a conf that does (`alfish confs` lists them)")
        raise UsageError(f"nothing binds {names}; {remedy}") from error


def _hands_on(selector: str) -> bool:
    """Returns True if a configurable takes parameters by any name."""
    parameters = inspect.signature(gin.config._REGISTRY[selector].wrapped).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _all_parameters(selector: str) -> list[str]:
    """The parameters of a class and of its base classes."""
    wrapped = gin.config._REGISTRY[selector].wrapped
    bases = wrapped.__mro__[:-1] if inspect.isclass(wrapped) else [wrapped]
    return [name for base in bases for name in inspect.signature(base).parameters]


def difference(before: str, after: str) -> str:
    """The lines that differ, as `- old` and `+ new`; the budget does not count, since a run may be extended."""
    changes = difflib.unified_diff(_settings(before), _settings(after), lineterm="", n=0)
    return "\n".join(line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def digest(config: str) -> str:
    """A hash of the configuration, equal for two where `difference` finds none."""
    return hashlib.sha256("\n".join(_settings(config)).encode()).hexdigest()


def _settings(config: str) -> list[str]:
    """The lines that set something, without the budget."""
    lines = BUDGET_LINE.sub("", config).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _refuse_wrong_kinds() -> None:
    for one in {(one.key, one.parameter): one for one in _BINDINGS}.values():
        words = mistake(one.key[1], one.parameter, _without_macros(one.value, one))
        if words:
            raise UsageError(f"{_name(one)} is {one.value!r}, bound in {one.layer.rstrip('=')}; {words}")


def _refuse_unused_macros() -> None:
    """Raises UsageError where a name is set that no value refers to: as a rule, a parameter without its class."""
    used = {name for one in _BINDINGS for name in _macros(one.value)}
    for one in _BINDINGS:
        name = one.key[0]
        if one.key[1] == "gin.macro" and name not in used:
            raise UsageError(
                f"{one.layer.rstrip('=')} sets {name}, and nothing refers to it as %{name}{_parameter_meant(name)}"
            )


def _parameter_meant(name: str) -> str:
    """The parameters of that name, or of a close one, those of what is configured already first."""
    named = {selector for _, selector in gin.config._CONFIG}
    found: dict[str, list[str]] = {}
    for selector, configurable in sorted(gin.config._REGISTRY.items(), key=lambda item: item[0] not in named):
        for parameter in inspect.signature(configurable.wrapped).parameters:
            found.setdefault(parameter, []).append(f"{selector.rpartition('.')[2]}.{parameter}")
    close = [name] if name in found else difflib.get_close_matches(name, list(found), 1)
    return f"; did you mean {' or '.join(found[close[0]][:3])}?" if close else "; remove it"


def _macros(value: Any) -> Iterator[str]:
    """The names of the macros in a value."""
    if isinstance(value, gin.config.ConfigurableReference) and value.configurable.selector == "gin.macro":
        yield "/".join(value.scopes)
    elif isinstance(value, dict):
        yield from (name for inner in (*value, *value.values()) for name in _macros(inner))
    elif isinstance(value, (list, tuple)):
        yield from (name for inner in value for name in _macros(inner))


def _without_macros(value: Any, binding: Binding, within: tuple[str, ...] = ()) -> Any:
    """A value with macros replaced by what they stand for.

    Raises:
      UsageError: a macro of `binding` is not set, or refers to itself.
    """
    for name in _macros(value) if isinstance(value, gin.config.ConfigurableReference) else ():
        where = f"{_name(binding)} in {binding.layer.rstrip('=')}"
        if name in within:
            raise UsageError(f"{where} refers to %{name}, which refers to itself: {' -> '.join((*within, name))}")
        if (name, "gin.macro") not in gin.config._CONFIG:
            known = [scope for scope, selector in gin.config._CONFIG if selector == "gin.macro"]
            raise UsageError(f"{where} refers to %{name}, which nothing sets{_close(name, known)}")
        return _without_macros(gin.config._CONFIG[name, "gin.macro"]["value"], binding, (*within, name))
    if isinstance(value, (list, tuple)):
        return type(value)(_without_macros(inner, binding, within) for inner in value)
    if isinstance(value, dict):
        return {key: _without_macros(inner, binding, within) for key, inner in value.items()}
    return value


def _reached(values: Values) -> set[Key]:
    """What was called while building, and what its parameters refer to in one of their values."""
    reached = {(scope, selector) for scope, selector in gin.config._OPERATIVE_CONFIG}
    frontier = list(reached)
    while frontier:
        scope, selector = frontier.pop()
        for key in _keys_for(scope, selector):
            for value in (one for had in values.get(key, {}).values() for one in had):
                found = set(_references(value, values)) - reached
                reached |= found
                frontier += found
    return reached


def _reads(reached: set[Key], key: Key) -> bool:
    return any(key in _keys_for(scope, selector) for scope, selector in reached)


def _was_reachable(index: int, reached: set[Key]) -> bool:
    """Whether what this binding configures was, or may have been, reachable at some time since its line.

    Not all can be known: a part that a later layer has put another in the place of was never built, nor what it would
    have built by itself.
    """
    binding = _BINDINGS[index]
    values: dict[Key, dict[str, list[Any]]] = {}
    gone: set[Key] = set()  # what parameters referred to, until later layers bound them
    later = _LAYERS[_LAYERS.index(binding.layer) + 1 :]
    for i, one in enumerate(_BINDINGS):
        had = values.setdefault(one.key, {}).setdefault(one.parameter, [])
        if i > index and one.layer in later and _reads(reached, one.key):
            before = had[-1] if had else _default(one.key[1], one.parameter)
            if before is None and takes_parts(one.key[1], one.parameter):
                return True  # it chose for itself, as Trainer.listeners do
            gone |= set(_references(before, values)) - set(_references(one.value, values))
        if i <= index:
            had.clear()
        had.append(one.value)
    if _reads(_reached(values), binding.key):
        return True
    return any(selector == binding.key[1] or takes_parts(selector) for _, selector in gone)


def _default(selector: str, parameter: str) -> Any:
    """A parameter's default; a reference, where it is a configurable."""
    found = inspect.signature(gin.config._REGISTRY[selector].wrapped).parameters.get(parameter)
    if found is None or not callable(found.default):  # one of **kwargs, or a plain value
        return None if found is None else found.default
    configurable = gin.config._inverse_lookup(found.default)
    return gin.config.ConfigurableReference(configurable.selector, False) if configurable else found.default


def _keys_for(scope: str, selector: str) -> list[Key]:
    """The bindings that a call of `selector` in `scope` (`a/b`) reads: those of '', 'a' and 'a/b'."""
    parts = scope.split("/") if scope else []
    return [("/".join(parts[:i]), selector) for i in range(len(parts) + 1)]


def _references(value: object, values: Values) -> Iterator[Key]:
    if isinstance(value, gin.config.ConfigurableReference):
        scope, selector = "/".join(value.scopes), value.configurable.selector
        if selector == "gin.macro":
            for inner in values.get((scope, selector), {}).get("value", ()):
                yield from _references(inner, values)
        else:
            yield scope, selector
    elif isinstance(value, dict):
        for inner in (*value.keys(), *value.values()):
            yield from _references(inner, values)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _references(inner, values)


def _name(binding: Binding) -> str:
    scope, selector = binding.key
    if selector == "gin.macro":
        return scope
    return "/".join(part for part in (scope, selector.rpartition(".")[2]) if part) + f".{binding.parameter}"


def _is_saved(path: Path) -> bool:
    return path.name == CONFIG_FILE and path.with_name(OPERATIVE_FILE).is_file()


@contextlib.contextmanager
def _remembered(origin: str) -> Iterator[None]:
    """Notes each binding that gin parses, and its file: the named one, or what that includes."""
    parse_file, bind = gin.config.parse_config_file, gin.config.bind_parameter
    origins, open_files = [origin], [Path(origin).resolve()]

    def parse_included(file: str, *arguments: Any) -> Any:
        path = _find_include(file)
        if path is not None and path.resolve() in open_files:
            chain = [one.name for one in (*open_files, path)]
            raise UsageError(f"{path} includes itself: {' -> '.join(chain)}; remove one of these includes")
        origins.append(file)
        open_files.append((path or Path(file)).resolve())
        try:
            if path is not None:
                _import_modules(path.read_text(), str(path))
            return parse_file(file, *arguments)
        finally:
            open_files.pop()
            _end(origins.pop())

    def note(key: Any, value: Any) -> None:
        bind(key, value)
        parsed = gin.config.ParsedBindingKey.parse(key)
        _BINDINGS.append(Binding(parsed.config_key, parsed.arg_name, value, origins[-1]))

    gin.config.parse_config_file, gin.config.bind_parameter = parse_included, note
    try:
        yield
    finally:
        gin.config.parse_config_file, gin.config.bind_parameter = parse_file, bind
        _end(_layer_of(origin))


def _find_include(file: str) -> Path | None:
    """Returns the path at which gin finds a file, or None."""
    found = (Path(prefix, file) for prefix in gin.config._LOCATION_PREFIXES)
    return next((path for path in found if path.is_file()), None)


def _forget() -> None:
    _BINDINGS.clear()
    _LAYERS.clear()


def _end(layer: str) -> None:
    if layer in _LAYERS:
        _LAYERS.remove(layer)
    _LAYERS.append(layer)


def _register() -> None:
    """Registers the names of what every run has; algorithms and toys are imported by the confs that use them."""
    import alfish.networks  # noqa: F401
    import alfish.schedules  # noqa: F401
    import alfish.training.listeners  # noqa: F401
    import alfish.training.trainer  # noqa: F401


@contextlib.contextmanager
def _named_errors(origin: str) -> Iterator[None]:
    """Turns what gin raises into one sentence that names `origin`."""

    def is_about_a_failure(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Path not found")  # gin says so of every place but the right one

    logging.getLogger().addFilter(is_about_a_failure)
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).split("\n  In ")[0]) from error  # gin appends where an include stands
    except RecursionError as error:
        raise UsageError(f"{origin}: its values are nested too deeply") from error
    except (ValueError, SyntaxError, tokenize.TokenError, AttributeError, OSError, TypeError, NameError) as error:
        raise UsageError(f"{origin}: {_first_sentence(error)}{_suggestion(error)}") from error
    finally:
        logging.getLogger().removeFilter(is_about_a_failure)


def _first_sentence(error: Exception) -> str:
    token = re.search(r"Failed to parse token '(\w+)'", str(error))
    if isinstance(error, SyntaxError) and token:
        found = re.search(rf"=.*?(\b{token[1]}\b[^\s,()\[\]{{}}#]*)", error.text or "")
        word = found[1] if found else token[1]
        if word.capitalize() in ("True", "False", "None"):
            return f"line {error.lineno} has {word}, which is written {word.capitalize()}"
        return (
            f"line {error.lineno} has {word}, which is no value: text stands in quotes ('{word}'), a class or function "
            f"behind @"
        )
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
