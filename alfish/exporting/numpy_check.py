"""Runs an exported policy on recorded inputs, in a separate process that cannot import torch or alfish.

python -I numpy_check.py policy.py inputs.npz outputs.npz
"""

import runpy
import sys

import numpy as np


def nested(leaves, policy):
    """Returns the leaves that the policy reads as nested dicts; if the observation is a single leaf, returns it."""
    observation: dict = {}
    for name, keys, *_ in policy.observations:
        if not keys:
            return leaves[name]
        place = observation
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = leaves[name]
    return observation


def flat(action):
    """Returns the leaves of an action, in the order of the sorted keys of a dict."""
    if isinstance(action, dict):
        action = [action[key] for key in sorted(action)]
    return [leaf for part in action for leaf in flat(part)] if isinstance(action, (list, tuple)) else [action]


def main(policy_file, inputs_file, outputs_file):
    for name in ("torch", "alfish", "gymnasium"):
        sys.modules[name] = None  # type: ignore[assignment]  # prevents its import
    policy = runpy.run_path(policy_file)["Policy"]()
    results = []
    with np.load(inputs_file, allow_pickle=False) as inputs:
        columns = {name: inputs[name] for name in inputs.files}
    noise = [column for name, column in columns.items() if name.startswith("noise.")]
    for t in range(len(columns["first"])):
        leaves = {name: column[t] for name, column in columns.items()}
        drawn = [column[t] for column in noise]
        state = {name: np.array(leaves[name]) for name in policy.states} if t else policy.initial_state()
        action, after = policy.step(nested(leaves, policy), state, leaves["first"], leaves["reward"], drawn)
        results.append([np.array(leaf) for leaf in (*flat(action), *after.values())])
    outputs = {f"result_{k}": np.stack(column) for k, column in enumerate(zip(*results))}
    np.savez(outputs_file, **outputs)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
