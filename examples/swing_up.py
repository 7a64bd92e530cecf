"""Data of your own: episodes of a controller written by hand, as arrays in a file.

python examples/swing_up.py pendulum.npz
"""

import sys

import gymnasium
import numpy as np


def controller(observation: np.ndarray) -> np.ndarray:
    """Pumps energy into the pendulum, and holds it where it stands upright."""
    cosine, sine, velocity = observation
    angle = np.arctan2(sine, cosine)  # 0: upright
    if abs(angle) < 0.5:
        torque = -10 * angle - 2 * velocity
    else:
        energy = velocity**2 / 6 + 5 * (cosine - 1)  # below 0: too little to reach the top
        torque = -2 * np.sign(energy * velocity + 1e-9)
    return np.clip([torque], -2, 2).astype(np.float32)


def record(path: str, num_episodes: int = 50) -> None:
    env = gymnasium.make("Pendulum-v1")
    observations, actions, rewards, terminated, lengths = [], [], [], [], []
    for k in range(num_episodes):
        observation, _ = env.reset(seed=k)
        observations.append(observation)
        done, length = False, 0
        while not done:
            action = controller(observation)
            observation, reward, ends, truncated, _ = env.step(action)
            observations.append(observation)  # the final one too: T + 1 observations for T actions
            actions.append(action)
            rewards.append(reward)
            terminated.append(ends)
            done, length = ends or truncated, length + 1
        lengths.append(length)
    np.savez(path, lengths=lengths, observations=observations, actions=actions, rewards=rewards, terminated=terminated)


if __name__ == "__main__":
    record(sys.argv[1])
