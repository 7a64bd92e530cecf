"""Ratings of players from the results of their games: Elo as maximum likelihood, and exploitability.

The model is that of Bradley & Terry, 1952, https://doi.org/10.2307/2334029: player i wins against player j with the
probability 1 / (1 + exp(r_j - r_i)), and a draw counts as half a win of each. Elo is 1000 + 400 r / ln 10, where r is
0 for one player, the anchor. The order of games has no effect, in contrast to Elo that is updated after each game.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

ANCHOR = 1000.0  # Elo of the anchor
SCALE = 400.0 / math.log(10.0)  # Elo for each unit of log-odds
NUM_RESAMPLES = 1000
MAX_STEPS, LARGEST_STEP, TOLERANCE = 200, 1.0, 1e-9  # limits of Newton's method; steps are in units of log-odds

Pair = tuple[int, int]


class Outcomes(NamedTuple):
    """Numbers of games that the first player of a pair won, drew and lost."""

    wins: int
    draws: int
    losses: int


class Ratings(NamedTuple):
    """Elo of each player, `[P]`, with the ends of a 95 % bootstrap interval over games."""

    elo: np.ndarray
    low: np.ndarray
    high: np.ndarray


def elo_ratings(outcomes: Mapping[Pair, Outcomes], num_players: int, anchor: int = 0, seed: int = 0) -> Ratings:
    """Returns the ratings of players.

    A draw is added to the games of each pair, so that a player that won or lost all games has a finite rating.

    Args:
      outcomes: results by pair (first, second) of players, numbered from 0; may contain both (a, b) and (b, a).
      num_players: number of players, P.
      anchor: player whose Elo is 1000.
      seed: seed of the bootstrap.

    Raises:
      ValueError: games do not connect all players.
    """
    counts = {pair: np.array(own, np.float64) for pair, own in outcomes.items() if sum(own)}
    if not _is_connected(list(counts), num_players):
        raise ValueError("there are players that no games connect, so their ratings cannot be compared")
    found = _strengths(_scores(counts, num_players), anchor)
    generator = np.random.default_rng(seed)
    drawn = {
        pair: generator.multinomial(int(own.sum()), own / own.sum(), NUM_RESAMPLES).astype(np.float64)
        for pair, own in counts.items()
    }
    low, high = np.percentile(_strengths(_scores(drawn, num_players), anchor), [2.5, 97.5], axis=0)
    return Ratings(*(ANCHOR + SCALE * one for one in (found, low, high)))


def exploitability(means: Mapping[Pair, float], num_players: int) -> np.ndarray:
    """Returns the mean loss of each player against its strongest opponent, `[P]`; nan without opponents.

    Args:
      means: mean return of the first player of each pair against the second player.
      num_players: number of players, P.
    """
    found = np.full(num_players, np.nan)
    for (player, _), value in means.items():
        found[player] = np.fmax(found[player], -value)
    return found


def _scores(counts: Mapping[Pair, np.ndarray], num_players: int) -> np.ndarray:
    """Returns the points of each player against each other player, `[..., P, P]`, with a draw added for each pair.

    Args:
      counts: wins, draws and losses, `[..., 3]`, by pair.
    """
    (shape,) = {own.shape[:-1] for own in counts.values()}
    scores = np.zeros((*shape, num_players, num_players))
    for (first, second), own in counts.items():
        scores[..., first, second] += own[..., 0] + own[..., 1] / 2
        scores[..., second, first] += own[..., 2] + own[..., 1] / 2
    for first, second in {(min(pair), max(pair)) for pair in counts}:
        scores[..., first, second] += 0.5
        scores[..., second, first] += 0.5
    return scores


def _strengths(scores: np.ndarray, anchor: int) -> np.ndarray:
    """Returns the most likely strengths r, `[..., P]`, by Newton's method; 0 for the anchor."""
    *shape, num_players, _ = scores.shape
    games, free = scores + np.swapaxes(scores, -1, -2), [k for k in range(num_players) if k != anchor]
    strengths = np.zeros((*shape, num_players))
    if not free:
        return strengths
    for _ in range(MAX_STEPS):
        expected = 1.0 / (1.0 + np.exp(strengths[..., None, :] - strengths[..., :, None]))
        gradient = (scores - games * expected).sum(-1)
        weights = games * expected * (1.0 - expected)
        curvature = np.eye(num_players) * weights.sum(-1)[..., None] - weights
        step = np.linalg.solve(curvature[..., free, :][..., free], gradient[..., free, None])[..., 0]
        longest = np.abs(step).max(-1, keepdims=True)
        strengths[..., free] += step * np.minimum(1.0, LARGEST_STEP / np.maximum(longest, TOLERANCE))
        if longest.max() < TOLERANCE:
            break
    return strengths


def _is_connected(pairs: list[Pair], num_players: int) -> bool:
    reached, is_growing = {0}, True
    while is_growing:
        more = {k for pair in pairs if reached & set(pair) for k in pair} - reached
        reached, is_growing = reached | more, bool(more)
    return len(reached) == num_players
