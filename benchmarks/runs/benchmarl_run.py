"""Trains BenchMARL's IPPO, with its own settings, in the game of `ppo_tag.gin`; `benchmarks.tag` starts it.

Writes the weights of both policies to OUTPUT, an `.npz` of arrays GROUP/LAYER/weight and GROUP/LAYER/bias, after each
ten iterations and at the end. A frame is a step of the game, in which all four agents act.
"""

import argparse
import sys
import tempfile
import time

import mpe2.all_modules
import numpy as np
import torch

# TorchRL asks PettingZoo for these games, which moved to a package of their own.
sys.modules |= {"pettingzoo.mpe": mpe2, "pettingzoo.mpe.all_modules": mpe2.all_modules}

from benchmarl.algorithms import IppoConfig  # noqa: E402
from benchmarl.environments import PettingZooTask  # noqa: E402
from benchmarl.experiment import Callback, Experiment, ExperimentConfig  # noqa: E402
from benchmarl.models.mlp import MlpConfig  # noqa: E402


class Weights(Callback):
    """Writes the weights each time `period` more frames have been played."""

    def __init__(self, output: str, period: int):
        super().__init__()
        self._output, self._period, self._began = output, period, time.perf_counter()

    def on_train_end(self, training_td: object, group: str) -> None:
        if self.experiment.total_frames % self._period == 0 and group == list(self.experiment.group_map)[-1]:
            self.write()

    def write(self) -> None:
        arrays = {"frames": self.experiment.total_frames, "seconds": time.perf_counter() - self._began}
        found = [item for item in self.experiment.policy.state_dict().items() if isinstance(item[1], torch.Tensor)]
        for k, group in enumerate(self.experiment.group_map):
            own = [value.numpy() for name, value in found if name.startswith(f"module.{k}.module.0.mlp.params.")]
            for layer, (weight, bias) in enumerate(zip(own[::2], own[1::2])):
                arrays |= {f"{group}/{layer}/weight": weight, f"{group}/{layer}/bias": bias}
        np.savez(self._output, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = PettingZooTask.SIMPLE_TAG.get_from_yaml()
    task.config |= {"num_good": 1, "num_adversaries": 3, "num_obstacles": 2, "max_cycles": 25}
    config = ExperimentConfig.get_from_yaml()
    config.prefer_continuous_actions = config.evaluation = config.render = config.create_json = False
    config.max_n_frames, config.loggers = arguments.frames, []
    weights = Weights(arguments.output, 10 * config.on_policy_collected_frames_per_batch)
    with tempfile.TemporaryDirectory() as config.save_folder:
        parts = {"algorithm_config": IppoConfig.get_from_yaml(), "model_config": MlpConfig.get_from_yaml()}
        Experiment(task=task, seed=arguments.seed, config=config, callbacks=[weights], **parts).run()
        weights.write()


if __name__ == "__main__":
    main()
