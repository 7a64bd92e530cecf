"""docs/from_stable_baselines3.md names arguments and defaults that stable-baselines3 has, where it is installed."""

import inspect
import re
from pathlib import Path

import pytest

import alfish

PAGE = Path(alfish.__file__).parent.parent / "docs" / "from_stable_baselines3.md"
TABLES = {  # heading or first cell -> classes that take the arguments of the table
    "## PPO and A2C": ["PPO"],
    "## DQN, SAC and TD3": ["DQN", "SAC", "TD3"],
    "| DQN |": ["DQN"],
    "| SAC |": ["SAC"],
    "| TD3 |": ["TD3"],
}


@pytest.mark.parametrize("start", list(TABLES), ids=lambda start: start.strip("#| "))
def test_arguments_and_defaults_of_the_peer_are_real(start):
    peer = pytest.importorskip("stable_baselines3", reason="a peer, which nothing installs")
    table = PAGE.read_text().partition(start)[2].lstrip("\n").partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = [found for cell in cells for found in re.findall(r"`(\w+)`(?: = `([^`]*)`)?", cell)]
    checked = 0
    for name, default in named:
        if name[0].isupper():
            continue
        for owner in TABLES[start]:
            parameters = inspect.signature(getattr(peer, owner)).parameters
            assert name in parameters or len(TABLES[start]) > 1, f"{owner}.{name}"
            if default and name in parameters:
                assert repr(parameters[name].default) == default, f"{owner}.{name}"
                checked += 1
    assert checked > 0
