"""Modules that tests write into files and import, as users do."""

import sys
from collections.abc import Iterable

import gin

from alfish.parameters import description


def forget(modules: Iterable[str]) -> None:
    """Makes this process one that has imported none of these modules, whose classes gin and alfish no longer name.

    Args:
      modules: names of modules; those that were not imported are passed over.
    """
    for module in modules:
        sys.modules.pop(module, None)
        for selector in [one for one in gin.config._REGISTRY._selector_map if one.startswith(f"{module}.")]:
            gin.config._REGISTRY.pop(selector)
            description._REGISTERED.pop(selector, None)


def imported_below(directory: str) -> set[str]:
    """Returns the names of the imported modules of gin's configurables whose files are below a directory."""
    modules = {configurable.wrapped.__module__ for configurable in gin.config._REGISTRY._selector_map.values()}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in modules}
    return {name for name, file in files.items() if file.startswith(directory)}
