"""Which policy plays which agent."""

import pickle

import numpy as np
import pytest
from toy_games import Meeting

from alfish.environments.games import ParallelGames
from alfish.errors import UsageError
from alfish.policies.lineup import Lineup, patterns_of


def games(count=2):
    return ParallelGames([Meeting() for _ in range(count)], seed=0)


def lineup_of(policies, count=2, **settings):
    own = games(count)
    own.reset()
    return Lineup(patterns_of(policies, own), own, 0, **settings)


def test_a_fixed_lineup_plays_the_same_columns_in_every_game():
    lineup = lineup_of({"x": "a", "y": ["b", "c"]})
    assert lineup.is_fixed and lineup.playing["a"].tolist() == [0, 1, 1, 0, 1, 1]
    assert lineup.columns["x"].tolist() == [0, 3] and lineup.columns["y"].tolist() == [1, 2, 4, 5]
    assert lineup.agents_of("y") == ["b", "c"] and (lineup.share("x"), lineup.share("y")) == (2, 4)


def test_each_and_numbers_name_policies():
    assert patterns_of("each", games()) == {"a": ("a",), "b": ("b",), "c": ("c",)}
    assert list(patterns_of({"p": ("*", 3)}, games())) == ["p0", "p1", "p2"]
    assert patterns_of(None, games()) == {"shared": ("*",)}


def frequencies(lineup, count=3000):
    drawn = [lineup.of_game(5, k)["a"] for k in range(count)]
    return np.array([[row.count(k) for k in range(len(lineup.names))] for row in drawn]).sum(0) / (3 * count), drawn


def test_drawn_policies_play_equally_often():
    found, _ = frequencies(lineup_of({"p": ("*", 4)}))
    assert np.abs(found - 0.25).max() < 3 * np.sqrt(0.25 * 0.75 / 9000)


def test_weights_are_relative_frequencies():
    lineup = lineup_of({"x": "*", "y": "*"}, weights={"x": 3.0})
    found, _ = frequencies(lineup)
    assert abs(found[0] - 0.75) < 0.02 and lineup.share("x") == pytest.approx(4.5)


def test_an_unnumbered_weight_applies_to_each_policy():
    lineup = lineup_of({"main": "*", "past": ("*", 4)}, weights={"main": 4.0, "past": 2.0, "past3": 0.0})
    assert [lineup.share(name) / 6 for name in lineup.names] == pytest.approx([0.4, 0.2, 0.2, 0.2, 0.0])


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("policies", [{"x": "*", "y": "*", "z": "*"}, {"x": ["a", "b"], "y": "*", "z": ["b", "c"]}])
def test_a_required_policy_plays_in_each_game(policies, mixed):
    settings = {"weights": {"y": 2.0}, "mixed": mixed}
    lineup = lineup_of(policies, requires="x", **settings)
    found, drawn = frequencies(lineup)
    assert all(0 in row for row in drawn)
    _, without = frequencies(lineup_of(policies, **settings))
    pairs = list(zip(drawn, without))
    assert all(row == other for row, other in pairs if 0 in other) and any(0 not in other for other in without)
    if mixed:
        assert all(sum(a != b for a, b in zip(*pair)) <= 1 for pair in pairs)
    shares = [lineup.share(name) / 6 for name in lineup.names]
    np.testing.assert_allclose(found, shares, atol=0.012)
    assert sum(shares) == pytest.approx(1.0)


def test_an_unmixed_lineup_has_one_policy_in_a_game():
    _, drawn = frequencies(lineup_of({"p": ("*", 4)}, mixed=False), 200)
    assert all(len(set(row)) == 1 for row in drawn) and len({row[0] for row in drawn}) == 4


def test_a_draw_depends_on_the_game_and_its_resets_only():
    one, other = lineup_of({"p": ("*", 4)}), lineup_of({"p": ("*", 4)}, count=5)
    one.draw(), other.draw()
    np.testing.assert_array_equal(one.playing["a"], other.playing["a"][:6])


@pytest.mark.parametrize(
    "policies, settings, sentence",
    [
        (
            {"x": "foo_*"},
            {},
            r"policies\['x'\] has 'foo_\*', which matches no agent; agents with equal spaces are a",
        ),
        ({"x": "a"}, {}, "has no policy that plays b; add the agent to one of x"),
        ({"x": ("*", 0)}, {}, "it must be a pattern of agents"),
        ({"x": []}, {}, "it must be a pattern of agents"),
        ({}, {}, "a dict from names to agents"),
        ({"actor": "*"}, {}, "a policy called 'actor'"),
        ({"my policy": "*"}, {}, "a policy called 'my policy'"),
        ({1: "*"}, {}, "a policy called 1"),
        ({"p": ("*", 2), "p0": "*"}, {}, "names the policy p0 twice"),
        ({"p0": "*", "p": ("*", 2)}, {}, "names the policy p0 twice"),
        ({"x": ["a", "bb"], "y": "*"}, {}, r"policies\['x'\] has 'bb', which matches no agent"),
        ({"x": "*"}, {"weights": {"z": 1.0}}, "Lineup.weights has 'z'; the policies are x"),
        ({"x": "*"}, {"requires": "z"}, "Lineup.requires is 'z'; the policies are x"),
        ({"x": "*", "y": "*"}, {"weights": {"x": 0.0, "y": 0.0}}, "Lineup.weights is 0 for x, y"),
    ],
)
def test_a_lineup_that_cannot_play_is_refused(policies, settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        lineup_of(policies, **settings)


def test_games_of_a_worker_have_the_lineup_of_their_numbers():
    settings = {"weights": {"x": 2.0}, "requires": "y"}
    patterns = patterns_of({"x": "*", "y": "*", "z": "*"}, games())
    everything = games(6)
    everything.reset()
    whole = Lineup(patterns, everything, 0, **settings)
    whole.draw()
    sent = pickle.loads(pickle.dumps(Lineup(patterns, games(2), 0, **settings)))
    for first, count in ((0, 4), (4, 2)):
        own = games(count)
        own.reset()
        lineup = sent.of_worker(own, first, generation=0)
        lineup.draw()
        assert lineup.playing["a"].tolist() == whole.playing["a"][3 * first : 3 * (first + count)].tolist()
        assert len(lineup.columns["x"]) == 3 * count


def test_restarted_workers_have_new_lineups():
    patterns = patterns_of({"x": "*", "y": "*", "z": "*"}, games())
    own = games(8)
    own.reset()
    lineup, found = Lineup(patterns, own, 0), []
    for generation in (0, 1, 2, 1):
        other = lineup.of_worker(own, 0, generation)
        other.draw()
        found.append(other.playing["a"].tolist())
    assert found[1] == found[3] and found[0] != found[1] != found[2] != found[0]
