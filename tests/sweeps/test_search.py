"""Searches as the command line writes them, and the samplers that draw from them."""

import sys

import numpy as np
import pytest

from alfish.errors import UsageError
from alfish.parameters.varied import Parameter
from alfish.sweeps.group import corners
from alfish.sweeps.run_state import RunState
from alfish.sweeps.sweep import parameter_of
from alfish.sweeps.trial_samplers import MedianPruner, default_sampler, make_sampler
from alfish.sweeps.trials import Trial, TrialRun

SEARCH = [
    "Learner.learning_rate = log(1e-4, 1e-2)",
    "critic/MLP.layers=choice((64, 64), (256,))",
    "MLP.activation=grid('tanh', 'a, b', @relu())",
    "PPO.gamma=uniform(.9, 0.999)",
    "EpochBatches.num_epochs=int(1, 20)",
]


def parsed(arguments):
    return tuple(map(parameter_of, arguments))


def trial(number, value=None, state="complete", bindings=None, seen=(), means=None):
    """A trial with one run, whose evaluations have one episode each."""
    means = means or ({} if value is None else {100: value})
    run_state = RunState(None, state == "complete", "crashed" if state == "failed" else None, None, {})
    run_state = run_state._replace(evaluations={clock: (mean,) for clock, mean in means.items()})
    run = TrialRun(run_state, 0, max(means) if state == "pruned" else None, 1)
    return Trial(number, bindings or {}, tuple(seen), (run,))


def test_searches_are_parsed_and_written_as_they_are_read():
    found = parsed(SEARCH)
    assert found == (
        Parameter("Learner.learning_rate", "log", ("1e-4", "1e-2")),
        Parameter("critic/MLP.layers", "choice", ("(64, 64)", "(256,)")),
        Parameter("MLP.activation", "grid", ("'tanh'", "'a, b'", "@relu()")),
        Parameter("PPO.gamma", "uniform", (".9", "0.999")),
        Parameter("EpochBatches.num_epochs", "int", ("1", "20")),
    )
    assert parsed([f"{one.name}={one}" for one in found]) == found


@pytest.mark.parametrize(
    "argument, words",
    [
        ("PPO.gamma", "is not a search space: write NAME=grid"),
        ("PPO.gamma=0.9", "is not a search space"),
        ("PPO.gamma=normal(0, 1)", "is not a search space"),
        ("PPO.gamma=uniform(1, 0.9)", "upside down; write uniform(0.9, 1)"),
        ("PPO.gamma=uniform(1, 1)", "empty"),
        ("PPO.gamma=uniform(0, 1, 2)", "requires two numbers"),
        ("PPO.gamma=uniform(0, 'a')", "requires two numbers"),
        ("PPO.gamma=uniform(0, nan)", "requires two numbers"),
        ("PPO.epochs=int(1, 2.5)", "requires two integers"),
        ("PPO.gamma=log(0, 1)", "requires positive numbers"),
        ("PPO.gamma=uniform(0, 1e999)", "bounds must be finite numbers"),
        ("PPO.gamma=log(1, 1e999)", "bounds must be finite numbers"),
        ("PPO.gamma=grid()", "one or more distinct values"),
        ("PPO.gamma=grid(1, 2, 1)", "one or more distinct values"),
        ("PPO.gamma=grid((1, 2)", "not valid gin"),
        ("PPO.gamma=grid(1,\nimport x)", "is not a search space"),
        ("Trainer.seed=grid(1, 2)", "--seeds=3"),
    ],
)
def test_an_invalid_search_is_refused_in_one_sentence(argument, words):
    with pytest.raises(UsageError) as error:
        parameter_of(argument)
    assert words in str(error.value) and str(error.value).startswith(f"--search={argument}")
    assert str(error.value).count("\n") == argument.count("\n")


def test_a_parameter_recognizes_its_valid_values():
    log, choice, _, _, epochs = parsed(SEARCH)
    assert log.has("1e-3") and log.has("0.01") and choice.has("(256,)") and epochs.has("20")
    others = [(log, "1"), (log, "nan"), (log, "1e-3\n"), (choice, "(1,)"), (epochs, "2.0"), (epochs, "0")]
    assert not any(parameter.has(text) for parameter, text in others)


def test_corners_hold_each_value_each_end_and_a_fraction():
    found = corners(parsed(["a.b=grid(1, 2, 3)", "c.d=log(1e-3, 0.1)"]))
    assert found[0] == ["a.b=1", "c.d=1e-3"]
    ends = [("a.b=1", "c.d=0.1"), ("a.b=2", "c.d=1e-3"), ("a.b=3", "c.d=1e-3")]
    assert sorted(map(tuple, found[1:])) == sorted([*ends, ("a.b=1", "c.d=0.00222222")])
    assert corners(parsed(["a.n=uniform(1, 20)"])) == [["a.n=1"], ["a.n=20"], ["a.n=1.23457"]]
    assert corners(parsed(["a.n=int(1, 20)"])) == [["a.n=1"], ["a.n=20"]]


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_proposals_lie_within_their_ranges_and_depend_only_on_seed_and_number(name):
    parameters = parsed(SEARCH)
    told = [trial(k, float(k), bindings=propose(name, 7, k)) for k in range(12)]
    for number in range(12, 20):
        bindings = propose(name, 7, number, told)
        assert list(bindings) == [one.name for one in parameters]
        assert 1e-4 <= float(bindings["Learner.learning_rate"]) <= 1e-2
        assert bindings["critic/MLP.layers"] in ("(64, 64)", "(256,)")
        assert 0.9 <= float(bindings["PPO.gamma"]) <= 0.999
        assert 1 <= int(bindings["EpochBatches.num_epochs"]) <= 20
        assert propose(name, 7, number, told) == bindings
        assert propose(name, 8, number, told) != bindings != propose(name, 7, number + 1, told)


def propose(name, seed, number, trials=()):
    """By a new sampler each time."""
    return make_sampler(name, parsed(SEARCH), seed).propose(number, list(trials))


def test_draws_are_uniform_in_their_own_scale_and_reach_both_ends_of_integers():
    generator = np.random.default_rng(0)
    log, choice, _, uniform, epochs = parsed(SEARCH)
    exponents = np.log10([float(log.draw(generator)) for _ in range(2000)])
    assert abs(exponents.mean() + 3) < 0.05 and (np.abs(exponents + 3) < 0.5).mean() == pytest.approx(0.5, abs=0.05)
    assert np.mean([float(uniform.draw(generator)) for _ in range(2000)]) == pytest.approx(0.9495, abs=0.003)
    drawn = [int(epochs.draw(generator)) for _ in range(2000)]
    assert set(drawn) == set(range(1, 21))
    assert 0.4 < np.mean([choice.draw(generator) == "(256,)" for _ in range(1000)]) < 0.6


def test_a_grid_is_every_combination_once():
    grid = make_sampler("grid", parsed(["a.b=grid(1, 2)", "c.d=choice('x', 'y', 'z')"]), 0)
    points = [grid.propose(k, []) for k in range(grid.size)]
    assert points[:2] == [{"a.b": "1", "c.d": "'x'"}, {"a.b": "1", "c.d": "'y'"}]
    assert len({tuple(point.values()) for point in points}) == 6
    with pytest.raises(UsageError, match=r"a.b=uniform\(0, 1\) is a range; write grid"):
        make_sampler("grid", parsed(["a.b=uniform(0, 1)"]), 0)


def test_tpe_proposes_values_near_the_best_and_accepts_trials_of_any_state():
    search = parsed(["a.x=uniform(0, 1)"])
    tpe = make_sampler("tpe", search, 0)
    points = [{"a.x": str(k / 30)} for k in range(31)]
    trials = [trial(k, -abs(k / 30 - 0.8), bindings=point) for k, point in enumerate(points)]
    near = [abs(float(tpe.propose(number, trials)["a.x"]) - 0.8) for number in range(100, 120)]
    assert np.median(near) < 0.1
    pruned = [trial(k, -abs(k / 30 - 0.8), "pruned", point) for k, point in enumerate(points)]
    failed = [trial(99, None, "failed", {"a.x": "0.5"}), trial(98, None, "running", {"a.x": "0.8"})]
    assert 0 <= float(tpe.propose(100, [*pruned, *failed])["a.x"]) <= 1


def test_grid_is_the_default_if_all_parameters_are_grids():
    assert default_sampler(parsed(["a.b=grid(1, 2)", "c.d=grid(1)"])) == "grid"
    assert default_sampler(parsed(["a.b=grid(1, 2)", "c.d=choice(1, 2)"])) == "tpe"


def test_without_optuna_grid_and_random_still_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    search = parsed(["a.b=choice(1, 2)"])
    for make in (lambda: make_sampler("tpe", search, 0), MedianPruner):
        with pytest.raises(UsageError, match=r"pip install 'alfish\[sweep\]'"):
            make()
    for name in ("grid", "random"):
        assert make_sampler(name, search, 0).propose(0, [])["a.b"] in "12"


def curve(*means):
    return {100 * (k + 1): mean for k, mean in enumerate(means)}


def test_pruning_stops_at_the_first_evaluation_below_the_median():
    pruner = MedianPruner()
    others = [trial(k, means=curve(k, 10 * k, 100 * k)) for k in range(5)]  # medians 2, 20, 200
    seen = range(5)
    for means, expected in [
        (curve(1), 100),
        (curve(3, 19), 200),
        (curve(3, 21), None),
        (curve(3, 21, 0), None),  # the last evaluation of all
        (curve(1, 21, 400), 100),  # it was faster than the question
    ]:
        assert pruner.pruned_at(trial(9, means=means, seen=seen, state="running"), 0, others) == expected


def test_a_run_is_compared_with_trials_that_were_complete_when_it_was_proposed():
    pruner = MedianPruner()
    others = [trial(k, means=curve(9, 9)) for k in range(8)]
    assert pruner.pruned_at(trial(9, means=curve(1), seen=range(5)), 0, others) == 100
    assert pruner.pruned_at(trial(9, means=curve(1), seen=range(4)), 0, others) is None
    assert pruner.pruned_at(trial(9, means=curve(1), seen=()), 0, others) is None
