"""Imports of modules that a configuration names, and the import policy for other people's configurations."""

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from alfish.errors import UsageError, first_line, is_command

# Packages whose classes and functions a run's configuration may name even if they are not registered in gin. They
# contain parts of Trainers, and nothing that writes files, imports modules or starts programs.
PART_PACKAGES = (
    "alfish.algorithms",
    "alfish.environments",
    "alfish.functional.losses",
    "alfish.functional.returns",
    "alfish.learner.batches",
    "alfish.learner.learner",
    "alfish.learner.optimizers",
    "alfish.metrics",
    "alfish.networks",
    "alfish.parameters.schedules",
    "alfish.replay",
    "alfish.training.listeners",
    "alfish.transforms",
    "gymnasium.wrappers",
    "torch.nn",
    "torch.optim",
)

# Environment variable with the comma-separated names of modules that saved configurations may import.
VARIABLE = "ALFISH_ALLOW_IMPORT"


class ImportPolicy(NamedTuple):
    """Policy that says which modules outside of alfish the current saved configuration may import.

    Attributes:
      allowed: names of modules that the user allows.
      own: names of modules that the run may import because this user has trained it; None if this user has not trained
        it.
      remark: reason why configurations trained by this user are not recorded; '' if they are recorded.
    """

    allowed: tuple[str, ...]
    own: tuple[str, ...] | None
    remark: str

    def admits(self, module: str, others: Sequence[str]) -> bool:
        """Returns True if a module is in a package of `allowed`, `own` or `others`."""
        return _is_in(module, (*others, *self.allowed, *(self.own or ())))


# None means that any module may be imported, because the user wrote the configuration.
_POLICY: ContextVar[ImportPolicy | None] = ContextVar("policy", default=None)


@contextlib.contextmanager
def restricted(allowed: Sequence[str], own: Sequence[str] | None = None, remark: str = "") -> Iterator[None]:
    """Within the context, configurations may import only alfish, modules already imported, and allowed modules.

    The environment variable ALFISH_ALLOW_IMPORT names further allowed modules.

    Args:
      allowed: names of modules or packages, or one name. Submodules of an allowed package are allowed.
      own: names of modules that the run may import, see `ImportPolicy`.
      remark: reason why trained configurations are not recorded, see `ImportPolicy`.
    """
    everywhere = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    named = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    token = _POLICY.set(ImportPolicy((*named, *everywhere), None if own is None else tuple(own), remark))
    try:
        yield
    finally:
        _POLICY.reset(token)


def is_restricted() -> bool:
    """Returns True if the current configuration was saved, perhaps by another person."""
    return _POLICY.get() is not None


def is_own() -> bool:
    """Returns True if this user wrote the current configuration, or trained it on this machine."""
    policy = _POLICY.get()
    return policy is None or policy.own is not None


def allowed() -> tuple[str, ...] | None:
    """Returns the modules that the user allows; None if the current configuration is the user's own."""
    policy = _POLICY.get()
    return None if policy is None or policy.own is not None else policy.allowed


def admit(module: str, where: str) -> None:
    """Checks that a configuration may import `module`; makes modules in the working directory importable.

    Args:
      module: dotted name of the module.
      where: file or parameter that names the module.

    Raises:
      UsageError: the current policy forbids the import. The message contains `where`, and names the flag that allows
        the import, or says that the module does not exist here.
    """
    policy = _POLICY.get()
    if policy is not None and module not in sys.modules and not policy.admits(module, ["alfish"]):
        if not _is_found(module):
            raise _absent(module, where)
        raise _refusal(module, where, "imports")
    # The working directory is added only if the configuration names a module there. It is added at the end of sys.path,
    # so that its files do not replace installed modules.
    if _lies_here(module) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def admit_functions(module: str, where: str) -> None:
    """Checks that a configuration may call any function of `module`.

    Functions of alfish's environments and of allowed modules may be called.

    Raises:
      UsageError: the policy does not allow the module, even if the module is already imported.
    """
    policy = _POLICY.get()
    if policy is not None and not policy.admits(module, ["alfish.environments"]):
        raise _refusal(module, where, "calls a function of")


def import_named(module: str, where: str) -> ModuleType:
    """Imports a module that a configuration names; `where` is the file or parameter that names it.

    Raises:
      UsageError: the import is forbidden, the module does not exist, or it raises an exception.
    """
    admit(module, where)
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and _is_in(module, (missing,)):
            raise _absent(module, where) from None
        raise UsageError(
            f"{where} imports {module!r}, which raises {type(error).__name__}: {first_line(error)}; `python -c 'import "
            f"{module}'` shows where"
        ) from error


def import_part(module: str, name: str, where: str) -> None:
    """Imports the module of a class or function that a configuration names and that is not registered in gin.

    In other people's configurations, parts from Python's library, installed packages and other modules of alfish are
    refused even if they are already imported: some of them can run any program or write any file.

    Raises:
      UsageError: the module cannot be imported, or the current policy forbids the name.
    """
    policy = _POLICY.get()
    if _is_in(module, ["alfish"]):
        module = import_named(module, where).__name__  # the present name, if the module has moved
    if policy is not None and module in sys.modules and not policy.admits(module, PART_PACKAGES):
        file = getattr(sys.modules.get(module), "__file__", None)
        is_own = module == "__main__" or (
            file is not None and not _is_installed(file) and not _is_in(module, ["alfish"])
        )
        if not is_own:
            raise _refusal(module, where, f"names {name!r} of")
    import_named(module, where)


def _is_installed(file: str) -> bool:
    """Returns True if a module's file belongs to Python or to an installed package."""
    return any(Path(file).is_relative_to(root) for root in set(sysconfig.get_paths().values()))


def _absent(module: str, where: str) -> UsageError:
    if module.endswith(".py"):
        name = os.path.basename(module).removesuffix(".py")
        return UsageError(
            f"{where} imports {module!r}, which is a file and not a module; write {name!r} before the colon, and start "
            "in the directory that has it"
        )
    return UsageError(
        f"{where} imports {module!r}, which is not installed or not on PYTHONPATH; install it, or start in the "
        "directory that has it"
    )


def _is_found(module: str) -> bool:
    """Returns True if the package of a module can be imported; imports nothing."""
    package = module.partition(".")[0]
    with contextlib.suppress(ImportError, ValueError):
        return _lies_here(module) or importlib.util.find_spec(package) is not None
    return True


def _refusal(module: str, where: str, verb: str) -> UsageError:
    package = module.partition(".")[0]
    if package == "alfish":
        return UsageError(
            f"{where} {verb} {module!r}, which has no configurable classes or functions; remove that line"
        )
    policy = _POLICY.get()
    remark = f"; {policy.remark}" if policy is not None and policy.remark else ""
    allowed_by = f"--allow_import={package}" if is_command() else f"allow_import=[{package!r}]"
    return UsageError(
        f"{where} {verb} {module!r}, which is not part of alfish; if you trust that module, add "
        f"{allowed_by}, or set {VARIABLE}={package}{remark}"
    )


def _is_in(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _lies_here(module: str) -> bool:
    top = Path(module.partition(".")[0])
    return top.is_dir() or top.with_suffix(".py").is_file()
