"""stable-baselines3's side of `benchmarks.defaults`: its one call with its own defaults, and no setting but the seed.

  python -m benchmarks.runs.sb3_defaults ALGORITHM TASK SEED

The policy's name is the one that its documentation gives for the observation space. Its CNN takes images from 36 x 36
pixels on, so smaller ones go to "MlpPolicy", which flattens and scales them.
"""

import json
import sys
import time
from typing import Any

import stable_baselines3
from gymnasium import spaces

from benchmarks.runs import unknown_tasks


def main(name: str, task_name: str, seed: int) -> None:
    task = unknown_tasks.TASKS[task_name]
    env = unknown_tasks.made(task)
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    began = time.monotonic()
    model = getattr(stable_baselines3, name)(policy, env, seed=seed).learn(unknown_tasks.BUDGETS[name])
    seconds = time.monotonic() - began

    def act(observation: Any, is_first: bool) -> Any:
        action, _ = model.predict(observation, deterministic=True)
        return int(action) if isinstance(env.action_space, spaces.Discrete) else action

    print(json.dumps({"seconds": seconds, "returns": unknown_tasks.returns(task, act)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
