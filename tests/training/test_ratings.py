"""Elo by maximum likelihood, and exploitability among players."""

import numpy as np
import pytest

from alfish.training.evaluations.ratings import Outcomes, elo_ratings, exploitability

STRENGTHS = np.array([1000.0, 1150.0, 1320.0, 870.0, 1500.0])


def simulated(num_games, seed=0, pairs=None):
    """Results of games of players with known strengths, without draws."""
    generator, found = np.random.default_rng(seed), {}
    every = [(i, j) for i in range(len(STRENGTHS)) for j in range(len(STRENGTHS)) if i != j]
    for i, j in pairs or every:
        wins = generator.binomial(num_games, 1 / (1 + 10 ** ((STRENGTHS[j] - STRENGTHS[i]) / 400)))
        found[i, j] = Outcomes(int(wins), 0, int(num_games - wins))
    return found


def test_known_strengths_are_recovered():
    ratings = elo_ratings(simulated(4000), 5)
    np.testing.assert_allclose(ratings.elo, STRENGTHS, atol=15)
    assert ratings.elo[0] == ratings.low[0] == ratings.high[0] == 1000


def test_a_chain_of_games_connects_players():
    ratings = elo_ratings(simulated(20_000, pairs=[(0, 1), (1, 2), (3, 0), (2, 4)]), 5)
    np.testing.assert_allclose(ratings.elo, STRENGTHS, atol=20)


def test_intervals_contain_the_true_strength_in_most_experiments():
    inside = []
    for seed in range(40):
        ratings = elo_ratings(simulated(60, seed), 5)
        inside += ((ratings.low <= STRENGTHS) & (ratings.high >= STRENGTHS))[1:].tolist()
    assert 0.85 < np.mean(inside) < 1.0
    few, many = (elo_ratings(simulated(n), 5) for n in (50, 5000))
    assert ((many.high - many.low)[1:] < 0.2 * (few.high - few.low)[1:]).all()


def test_two_players_have_the_closed_form():
    # Nine points and a half of twelve games, of which one draw is added: log10(9.5 / 3.5) * 400.
    ratings = elo_ratings({(1, 0): Outcomes(8, 2, 1)}, 2)
    assert ratings.elo[1] - 1000 == pytest.approx(400 * np.log10(9.5 / 2.5))
    assert elo_ratings({(0, 1): Outcomes(1, 2, 8)}, 2).elo[1] == pytest.approx(ratings.elo[1])
    assert elo_ratings({(0, 1): Outcomes(0, 9, 0)}, 2).elo[1] == pytest.approx(1000)


def test_the_anchor_moves_all_ratings_alike():
    one, other = (elo_ratings(simulated(100), 5, anchor) for anchor in (0, 3))
    np.testing.assert_allclose(one.elo - one.elo[3], other.elo - 1000, atol=1e-6)


def test_a_player_that_always_wins_has_a_finite_rating():
    ratings = elo_ratings({(0, 1): Outcomes(0, 0, 1000)}, 2)
    assert 2000 < ratings.elo[1] < 3000 and np.isfinite(ratings.high).all()


def test_players_without_games_in_common_are_refused():
    with pytest.raises(ValueError, match="no games connect"):
        elo_ratings({(0, 1): Outcomes(1, 1, 1), (2, 3): Outcomes(1, 1, 1)}, 4)


def test_exploitability_is_the_loss_to_the_best_opponent():
    means = {(0, 1): 0.5, (1, 0): -0.5, (0, 2): -0.25, (2, 0): 0.25, (1, 2): 0.0, (2, 1): 0.0}
    np.testing.assert_array_equal(exploitability(means, 4), [0.25, 0.5, 0.0, np.nan])
