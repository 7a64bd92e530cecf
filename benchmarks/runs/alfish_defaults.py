"""alfish's side of `benchmarks.defaults`: `alfish.train(ALGORITHM, environment)` and no setting but budget and seed.

python -m benchmarks.runs.alfish_defaults ALGORITHM TASK SEED
"""

import json
import sys
import tempfile
import time
from typing import Any

import alfish
from benchmarks.runs import unknown_tasks


def main(name: str, task_name: str, seed: int) -> None:
    task = unknown_tasks.TASKS[task_name]
    train = alfish.train  # imports what it needs, as the peer's `import` does
    num_env_steps = unknown_tasks.BUDGETS[name]
    with tempfile.TemporaryDirectory() as root_dir:
        began = time.monotonic()
        policy = train(name, task.env, num_env_steps=num_env_steps, seed=seed, root_dir=f"{root_dir}/run")
        seconds = time.monotonic() - began

    def act(observation: Any, is_first: bool) -> Any:
        return policy.act(observation, first=is_first)

    print(json.dumps({"seconds": seconds, "returns": unknown_tasks.returns(task, act)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
