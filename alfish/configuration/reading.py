"""Reads configurations into gin: the user's files and bindings, or the saved configuration of a run."""

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gin

from alfish.configuration import locating, moved_settings, sentences
from alfish.configuration.bindings import MACRO, Binding, Reading, layer_of_caller, macros
from alfish.configuration.wrong_kinds import refuse_wrong_kinds
from alfish.errors import UsageError
from alfish.parameters import description, differences, exclusive, gin_internals, imports
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.parameters.gin_internals import Key
from alfish.parameters.rebinding import whole_binding
from alfish.runs import trust

Lacking = Literal["parts", "imports"]


def read(files: Sequence[str], bindings: Sequence[str]) -> Reading:
    """Parses gin files, then bindings, into an empty configuration.

    A file is looked up in the working directory, then among the shipped confs; for an included file, see
    `locating.find_include`.

    Raises:
      UsageError: a file, name, parameter or imported module does not exist, a text is not gin, or a value does not fit
        its parameter.
    """
    gin.clear_config()
    _register()
    reader = _Reader([locating.find(file) for file in files])
    for path in reader.named:
        reader.read_file(path)
        if path.name == CONFIG_FILE and path.with_name(OPERATIVE_FILE).is_file():
            reader.reading.saved.add(str(path))
    for binding in bindings:
        reader.read_parameter(binding)
    _refuse_endless_macros(reader.reading)
    _refuse_dynamic_references()
    _refuse_unused_macros(reader.reading)
    refuse_wrong_kinds(reader.reading)
    for one in reader.reading.last():
        if not gin_internals.is_writable(one.value):
            raise UsageError(
                f"{one.layer} binds {one.name} to {one.value!r}, a value that no configuration can save; write a large "
                "finite number instead of inf, and remove nan"
            )
    return reader.reading


@contextlib.contextmanager
def saved(
    path: Path,
    allow_import: Sequence[str] = (),
    may_lack: Collection[Lacking] = (),
    bindings: Sequence[str] = (),
) -> Iterator[Reading]:
    """Parses the saved configuration of a run. The configuration is not trusted, because it may come from another
    person.

    Within the context, the configuration may import modules of alfish, modules that this process has already imported,
    and modules in `allow_import`. If this user trained the run on this machine, all modules that the configuration
    names are allowed. The same rules apply while parts are built, because `make_environment.env_id` also imports
    modules.

    Args:
      path: path of the configuration.
      allow_import: names of further modules that the configuration may import.
      may_lack: kinds of definitions that may be missing or not allowed: 'parts' means parts in lines `# part:`, and
        'imports' means modules in import statements. A reference to a missing definition raises when it is called, and
        bindings of a missing definition are left out. A policy can therefore be opened without the metrics and
        environments of its training.
      bindings: bindings of the caller, which replace bindings of the configuration.

    Raises:
      UsageError: the configuration names a module that is not allowed, registers names dynamically, includes a file, or
        is not gin.
    """
    gin.clear_config()
    _register()
    with trust.restricted(path, allow_import):
        reader = _Reader([path], may_lack)
        with gin_internals.preferring("alfish"):  # gin saved the shortest names that were unique at that time
            reader.read_file(path)
        reader.reading.saved.add(str(path))
        for binding in bindings:
            reader.read_parameter(binding)
        _refuse_endless_macros(reader.reading)
        _refuse_dynamic_references()
        refuse_wrong_kinds(reader.reading)
        yield reader.reading


@contextlib.contextmanager
def preserved(brief: bool = False) -> Iterator[None]:
    """Restores gin's configuration on exit, including values that a text cannot express and gin's lock.

    Within the context, other threads cannot read a configuration; see `exclusive.held` for the argument and the error.
    """
    with exclusive.held(brief), gin_internals.preserved():
        yield


def text() -> str:
    """Returns the configuration that was read, in gin's normal form."""
    found = gin_internals.config_text()
    return description.header(found) + found


def digest() -> str:
    """Returns a hash of the configuration without the budget; the order of entries in dicts is ignored."""
    return differences.digest(gin.config_str())


def operative_text() -> str:
    """Returns the configuration with all defaults in force."""
    with gin_internals.without_inherited_defaults():
        return gin_internals.operative_config_text()


def bind(settings: Mapping[str, Any]) -> None:
    """Binds values that gin's text cannot express; keys are `scope/name.parameter`.

    `text()` leaves these values out. Parts receive the values themselves, where gin would make copies: the caller may
    read an object after the run, and some objects cannot be copied, such as connections.
    """
    for name, value in settings.items():
        gin.bind_parameter(name, _Itself(value))


class _Itself:
    """A value whose deep copy, which gin makes for each call, is the value itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return self._value

    def __repr__(self) -> str:
        return repr(self._value)


def bound(selector: str, *parameters: str) -> dict[str, Any]:
    """Returns the values that are bound to the given parameters, with references resolved."""
    bindings = gin.get_bindings(selector, resolve_references=False)
    # Copied, because gin resolves references when it copies values.
    return {name: copy.deepcopy(bindings[name]) for name in parameters if name in bindings}


class _Reader:
    """Parses gin texts, and records each binding.

    Args:
      named: files that the user named.
      may_lack: kinds of definitions that may be missing, see `saved`.

    Attributes:
      named: files that the user named; included files are looked up beside them first.
      reading: bindings and layers read so far.
    """

    def __init__(self, named: Sequence[Path], may_lack: Collection[Lacking] = ()) -> None:
        self.named, self._may_lack = named, may_lack
        self._absent: dict[str, UsageError] = {}  # errors of modules and parts that could not be imported
        self.reading = Reading()
        self._open: list[Path] = []  # files being parsed; each file is included by the file before it

    def read_file(self, path: Path) -> None:
        with self._opened(path), gin_internals.parsing(self._included, self._note, self._instead):
            text = locating.text_of(path)
            if imports.is_restricted() and moved_settings.has_moved(text):
                text = moved_settings.renewed(text)
                self._absent |= _import_names(text, str(path), self._may_lack)
                gin.parse_config(_without_imports(text, self._absent), skip_unknown=bool(self._absent))
            elif self._absent:
                gin.parse_config(_without_imports(text, self._absent), skip_unknown=True)
            else:  # absolute, because gin searches a relative path `package/file` inside the Python package
                gin.parse_config_file(str(path.resolve()))

    def read_parameter(self, binding: str) -> None:
        """Parses a binding of the caller."""
        origin = sentences.given(binding)
        with sentences.named(origin), gin_internals.parsing(self._included, self._note):
            binding = whole_binding(binding)
            _import_names(binding, origin)
            gin.parse_config(binding)
        self.reading.end(layer_of_caller())

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[None]:
        """Imports the modules that a file names; on exit, ends the file's layer."""
        self._open.append(path)
        try:
            with sentences.named(str(path)):
                self._absent |= _import_names(locating.text_of(path), str(path), self._may_lack)
                yield
        finally:
            self.reading.end(str(self._open.pop()))

    @contextlib.contextmanager
    def _included(self, file: str) -> Iterator[Path]:
        path = locating.find_include(file, self.named)
        if path is None:
            raise UsageError(f"{self._layer} includes {file!r}, which does not exist")
        if path.resolve() in [one.resolve() for one in self._open]:
            chain = [one.name for one in (*self._open, path)]
            raise UsageError(f"{path} includes itself: {' -> '.join(chain)}; remove one of these includes")
        with self._opened(path):
            yield path.resolve()

    def _instead(self, name: str) -> str | None:
        """Returns the name of the placeholder for an unknown reference; None if no definition is missing."""
        if not self._absent:
            return None
        last = name.rpartition(".")[2]
        own = [str(error) for part, error in self._absent.items() if part.rpartition(".")[2] == last]
        reason = own[0] if own else f"{name} is unknown here: {'; '.join(map(str, self._absent.values()))}"
        scope = f"absent_{name.replace('.', '_')}"
        bind({f"{scope}/alfish.absent.reason": reason})
        return f"{scope}/alfish.absent"

    def _note(self, key: Key, parameter: str, value: Any) -> None:
        self.reading.bindings.append(Binding(key, parameter, value, self._layer))

    @property
    def _layer(self) -> str:
        return str(self._open[-1]) if self._open else layer_of_caller()


def _import_names(content: str, origin: str, may_lack: Collection[Lacking] = ()) -> dict[str, UsageError]:
    """Imports the modules that a gin text names, and registers the parts in its lines `# part:`.

    Returns errors by name, for missing modules and parts that `may_lack` accepts.
    """
    absent: dict[str, UsageError] = {}
    for statement in gin_internals.statements(content):
        if gin_internals.is_include(statement) and imports.is_restricted():
            raise UsageError(f"{origin} includes {statement.filename!r}; the configuration of a run is one file")
        if not gin_internals.is_import(statement):
            continue
        if not statement.module.startswith("__gin__."):
            with _noted(absent, statement.module, "imports" in may_lack):
                imports.import_named(statement.module, origin)
        elif imports.is_restricted():
            raise UsageError(
                f"{origin} has `{statement.format()}`, a statement that lets a configuration call any function, so the "
                "configuration of a run must not have it; decorate the classes and functions with @gin.configurable, "
                "and import their modules"
            )
    for module, name in description.PART.findall(content):
        with _noted(absent, f"{module}.{name}", "parts" in may_lack):
            imports.import_part(module, name, origin)
            description.register(module, name)
    return absent


@contextlib.contextmanager
def _noted(absent: dict[str, UsageError], name: str, may_lack: bool) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if not may_lack:
            raise
        absent[name] = error


def _without_imports(content: str, absent: Mapping[str, UsageError]) -> str:
    """Returns a gin text without the import statements of missing modules."""
    lines = content.split("\n")
    for statement in gin_internals.statements(content):
        if gin_internals.is_import(statement) and statement.module in absent:
            lines[statement.location.line_num - 1] = ""
    text = "\n".join(lines)
    for statement in gin_internals.statements(text):
        # An import in an unusual form was not removed above.
        if gin_internals.is_import(statement) and statement.module in absent:
            raise absent[statement.module]
    return text


def _refuse_unused_macros(reading: Reading) -> None:
    """Raises UsageError if no value refers to a macro; such a macro is usually a parameter that lacks its class."""
    used = {name for one in reading.bindings for name in macros(one.value)}
    for one in reading.bindings:
        if one.key[1] == MACRO and one.name not in used:
            remark = sentences.parameter_meant(one.name)
            raise UsageError(f"{one.layer} sets {one.name}, but nothing refers to it as %{one.name}{remark}")


def _refuse_endless_macros(reading: Reading) -> None:
    """Raises UsageError if values with expanded macros are too long: nested macros can grow exponentially."""
    if any(one.key[1] == MACRO for one in reading.bindings):
        differences.check_macros(gin.config_str())


def _refuse_dynamic_references() -> None:
    """Raises UsageError if an untrusted configuration uses a dynamically registered name."""
    if not imports.is_restricted():
        return
    for _, selector in (*gin_internals.bindings(), *gin_internals.referred()):
        if gin_internals.is_registered_dynamically(selector):
            raise UsageError(f"{selector} is registered dynamically, which the configuration of a run may not use")


def _register() -> None:
    """Registers the names that every run may use; confs import algorithms and toy environments themselves."""
    import alfish.networks  # noqa: F401
    import alfish.parameters.measured
    import alfish.parameters.schedules
    import alfish.runs.writers.mlflow_writer
    import alfish.runs.writers.trackio_writer
    import alfish.runs.writers.wandb_writer
    import alfish.training.listeners  # noqa: F401
    import alfish.training.trainer  # noqa: F401
