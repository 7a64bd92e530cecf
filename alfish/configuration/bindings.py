"""Bindings of a configuration, each with the file that contains it.

gin itself stores only the last value of each parameter, without the file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from alfish import errors
from alfish.parameters import gin_internals
from alfish.parameters.gin_internals import Key

MACRO = "gin.macro"


def layer_of_caller() -> str:
    """Returns the name of the layer of bindings that are in no file: flags, or arguments of a Python call."""
    return "--gin_param" if errors.is_command() else "this call"


class Binding(NamedTuple):
    """One line of a configuration.

    Attributes:
      key: scope and selector of the configurable.
      parameter: parameter of the configurable.
      value: bound value, which may contain references and macros.
      layer: source of the binding: path of its file, or the result of `layer_of_caller`.
    """

    key: Key
    parameter: str
    value: Any
    layer: str

    @property
    def name(self) -> str:
        """Name of the parameter, `scope/Class.parameter`, or of the macro."""
        scope, selector = self.key
        if selector == MACRO:
            return scope
        return "/".join(part for part in (scope, selector.rpartition(".")[2]) if part) + f".{self.parameter}"


class Reading:
    """The bindings of a configuration that was read.

    Attributes:
      bindings: bindings in the order of their lines.
      layers: files and `layer_of_caller`, in the order in which reading them ended; a file comes after its included
        files.
      saved: layers that are a run's saved configuration; their bindings were checked when that run began.
    """

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self.layers: list[str] = []
        self.saved: set[str] = set()

    def last(self) -> list[Binding]:
        """Returns the last binding of each parameter, which is the one that applies."""
        return list({(one.key, one.parameter): one for one in self.bindings}.values())

    def values(self) -> dict[Key, dict[str, Any]]:
        """Returns the value of each parameter, by the key of its configurable."""
        values: dict[Key, dict[str, Any]] = {}
        for one in self.bindings:
            values.setdefault(one.key, {})[one.parameter] = one.value
        return values

    def end(self, layer: str) -> None:
        """Appends a layer whose last line was read."""
        self.layers = [*(one for one in self.layers if one != layer), layer]

    def later_layers(self, layer: str) -> list[str]:
        """Returns the layers after the given layer."""
        return self.layers[self.layers.index(layer) + 1 :]


def macros(value: Any) -> Iterator[str]:
    """Yields the names of the macros in a value."""
    if gin_internals.is_reference(value):
        if value.configurable.selector == MACRO:
            yield "/".join(value.scopes)
    else:
        for inner in _parts(value):
            yield from macros(inner)


def references(value: Any, values: Mapping[Key, Mapping[str, Any]]) -> Iterator[Key]:
    """Yields the keys of the configurables that a value refers to, directly or through macros defined in `values`."""
    if gin_internals.is_reference(value):
        scope, selector = value.config_key
        if selector == MACRO:
            yield from references(values.get((scope, selector), {}).get("value"), values)
        else:
            yield scope, selector
    else:
        for inner in _parts(value):
            yield from references(inner, values)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (*value, *value.values())
    elif isinstance(value, (list, tuple)):
        yield from value
