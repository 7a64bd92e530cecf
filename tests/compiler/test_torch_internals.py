"""Private names of torch are read in one module, and a missing one is reported with its place."""

import functools
import re
from pathlib import Path

import pytest
import torch
from hidden_names import hide

import alfish
from alfish.compiler import torch_internals
from alfish.compiler.torch_internals import HOMES, TorchChanged

# Torch's compiler, at import.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
PRIVATE = re.compile(
    r"torch(\.\w+)*\.(_(?!_|foreach)\w+|fx\.experimental)|from torch[\w.]* import .*\b_\w+|\._cdata|\._schema"
)


def test_private_names_of_torch_are_read_in_one_module():
    """Those of torch.distributed in `replicas`, which is below the compiler."""
    package = Path(alfish.__file__).parent
    found = {
        f"{path.relative_to(package)}: {match.group()}"
        for path in package.rglob("*.py")
        for match in PRIVATE.finditer(path.read_text())
        if path.name not in ("torch_internals.py", "replicas.py")
    }
    assert found == set()


def test_missing_names_are_reported(monkeypatch):
    for name in HOMES:
        assert getattr(torch_internals, name) is not None
        place = hide(monkeypatch, name)
        with pytest.raises(TorchChanged, match=rf"^torch {re.escape(torch.__version__)} has no {re.escape(place)}$"):
            getattr(torch_internals, name)


def test_compiled_files_get_their_name_only_when_complete(tmp_path):
    def build(command, cwd, fails):
        output = Path(command.split()[-1])
        output.write_text("half")
        assert not (tmp_path / "graph.so").exists() and cwd == str(tmp_path)
        if fails:
            raise OSError("killed")
        output.write_text("whole")

    command = "g++ x.cpp -o graph.so"
    with pytest.raises(OSError, match="killed"):
        torch_internals._run_and_rename(functools.partial(build, fails=True), command, str(tmp_path))
    assert not (tmp_path / "graph.so").exists()
    torch_internals._run_and_rename(functools.partial(build, fails=False), command, str(tmp_path))
    assert (tmp_path / "graph.so").read_text() == "whole"


@pytest.mark.parametrize(("flags", "is_known"), [("-O1 -std=c++17", True), ("-O1 -mno-such-instructions", False)])
def test_check_build_asks_the_compiler_only_whether_it_knows_the_flags(monkeypatch, flags, is_known):
    with torch_internals.build_settings():
        instructions = torch_internals.cpu_vec_isa.VecAVX2()
    monkeypatch.setattr(type(instructions), "build_arch_flags", lambda self: flags)
    monkeypatch.setattr(torch_internals.cpu_vec_isa.VecISA, "_probe_load", lambda *arguments: pytest.fail("was built"))
    assert instructions.check_build("this is no C++") == is_known


def test_another_name_is_not_an_attribute():
    with pytest.raises(AttributeError, match="'alfish.compiler.torch_internals' has no attribute 'anything'"):
        torch_internals.anything  # noqa: B018
