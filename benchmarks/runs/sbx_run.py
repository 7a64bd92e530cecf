"""SBX's side: stable-baselines3's interface, environments, evaluations and rows, with networks and updates in JAX.

It counts updates as stable-baselines3 does: epochs for PPO, gradient steps for the others.
"""

import flax.linen
import sbx

from benchmarks.runs import script
from benchmarks.runs.sb3_run import SHIPPED, THROUGHPUT, main

OF_IMAGES = {"ppo_pong", "dqn_pong"}
RELU = SHIPPED["ppo_halfcheetah"].settings["policy_kwargs"] | {"activation_fn": flax.linen.relu}
OWN_SETTINGS = {
    "sac_halfcheetah": {"qf_learning_rate": 1e-3},
    "td3_halfcheetah": {"qf_learning_rate": 1e-3},
    "ppo_halfcheetah": {"policy_kwargs": RELU},
}

if __name__ == "__main__":
    main(
        sbx,
        script.versions("sbx-rl", "jax"),
        {name: recipe for name, recipe in THROUGHPUT.items() if name not in OF_IMAGES},
        {
            name: recipe._replace(settings=recipe.settings | OWN_SETTINGS.get(name, {}))
            for name, recipe in SHIPPED.items()
        },
    )
