"""The list of mutations is whole; `make mutants` runs it."""

import re

from mutants import ROOT, apply, mutations


def test_each_mutation_applies_to_the_code_as_it_is():
    assert [m.name for m in mutations() if apply(m.path, ROOT, "--check").returncode] == []


def test_each_mutation_names_tests_that_exist():
    for mutation in mutations():
        named = [word for word in mutation.test.split() if word.startswith("tests/")]
        assert named, f"{mutation.name} names no test"
        for word in named:
            path, *names = word.partition("[")[0].split("::")
            text = (ROOT / path).read_text()
            missing = [name for name in names if not re.search(rf"\b(def|class) {name}\b", text)]
            assert not missing, f"{mutation.name}: {path} has no {missing}"
