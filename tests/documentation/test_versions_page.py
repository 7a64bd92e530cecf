"""docs/install.md names the versions that are tested, and the oldest torch."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_page_has_the_tested_versions_and_the_oldest_torch():
    page = (REPOSITORY / "docs" / "install.md").read_text()
    tested = dict(re.findall(r"^(\w+)==([\w.]+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("torch", "gymnasium", "numpy"):
        assert f"{name} {tested[name]}" in page
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert f"torch before {oldest}\n" in page and tuple(map(int, oldest.split("."))) >= (2, 8)
