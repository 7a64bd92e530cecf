"""Makes `rliable.json`: aggregates of random scores and their intervals, as rliable computes them.

pip install rliable "pandas<3" && python tests/analysis/make_rliable.py > tests/analysis/rliable.json
"""

import importlib.metadata
import json

import numpy as np
from rliable import library, metrics

NUM_DRAWS = 2000
AGGREGATES = {
    "iqm": metrics.aggregate_iqm,
    "mean": metrics.aggregate_mean,
    "median": metrics.aggregate_median,
    "optimality_gap": metrics.aggregate_optimality_gap,
}


def estimated(scores, functions):
    """Point and interval of each function."""
    np.random.seed(0)  # rliable draws from the global generator
    together = lambda *arrays: np.array([function(*arrays) for function in functions.values()])  # noqa: E731
    points, intervals = library.get_interval_estimates({"": scores}, together, reps=NUM_DRAWS)
    return {
        name: {"point": points[""][k], "low": intervals[""][0, k], "high": intervals[""][1, k]}
        for k, name in enumerate(functions)
    }


def main():
    random = np.random.RandomState(7)
    shapes = {"x": (5, 3), "y": (7, 3), "one": (10, 1), "two": (2, 1)}
    scores = {name: np.round(random.normal(0.6, 0.4, shape), 6) for name, shape in shapes.items()}
    scores["y"][0, 0] = scores["x"][0, 0]  # a tie
    improvement = {"probability_of_improvement": metrics.probability_of_improvement}
    pairs = [(scores[a], scores[b]) for a, b in (("x", "y"), ("one", "two"), ("x", "x"))]
    content = {
        "made_by": {name: importlib.metadata.version(name) for name in ("rliable", "arch", "numpy", "scipy")},
        "num_draws": NUM_DRAWS,
        "cases": [{"scores": one.tolist(), **estimated(one, AGGREGATES)} for one in scores.values()],
        "pairs": [{"x": x.tolist(), "y": y.tolist(), **estimated([x, y], improvement)} for x, y in pairs],
    }
    print(json.dumps(content))


if __name__ == "__main__":
    main()
