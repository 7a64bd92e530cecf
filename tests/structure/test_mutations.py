"""The tables of mutations are whole; `make mutants` runs them."""

import re

from mutants import ROOT, mutations


def test_the_text_of_each_mutation_occurs_once():
    problems = {str(mutation): mutation.problem(ROOT) for mutation in mutations()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_each_mutation_changes_its_text_and_has_a_description_of_its_own():
    every = mutations()
    assert [str(m) for m in every if m.old == m.new] == []
    assert len({str(m) for m in every}) == len(every)


def test_each_mutation_names_tests_that_exist():
    for mutation in mutations():
        named = [word for word in mutation.test.split() if word.startswith("tests/")]
        assert named, f"{mutation} names no test"
        # A part of a name would select nothing once tests are renamed.
        assert "-k" not in mutation.test.split(), f"{mutation} selects tests by parts of their names"
        for word in named:
            path, *names = word.partition("[")[0].split("::")
            text = (ROOT / path).read_text()
            missing = [name for name in names if not re.search(rf"\b(def|class) {name}\b", text)]
            assert not missing, f"{mutation}: {path} has no {missing}"
