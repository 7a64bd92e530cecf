"""The toys are what they say: tests of everything else stand on them."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from toys import Bandit, NestedBandit, OneState, Stamped, TwoLengths

from alfish.environments.bit_flip import BitFlip, bit_flip_reached, bit_flip_reward
from alfish.environments.toy import Corridor, HiddenArm, MaskedIdentity, Recall, TensorPointMass
from alfish.errors import UsageError

TOYS = [
    Stamped,
    OneState,
    TwoLengths,
    *(lambda kind=kind: Bandit(kind) for kind in ("discrete", "box", "multi_discrete", "multi_binary")),
    NestedBandit,
    lambda: NestedBandit(nested_action=True),
    Recall,
    lambda: Recall(2, 0),
    lambda: Recall(3, 1, "box"),
    HiddenArm,
    Corridor,
    BitFlip,
    lambda: BitFlip(1),
    *(lambda kind=kind: MaskedIdentity(6, 4, kind) for kind in ("discrete", "multi_discrete", "multi_binary")),
]


def episode(env, seed=None, act=None):
    """Return, length, and whether it terminated."""
    observation, _ = env.reset(seed=seed)
    total, length, ends = 0.0, 0, False
    while not ends:
        observation, reward, terminated, truncated, _ = env.step(act(observation) if act else env.action_space.sample())
        total, length, ends = total + reward, length + 1, terminated or truncated
    return total, length, terminated


@pytest.mark.filterwarnings("ignore")  # gymnasium's checker warns of wide bounds and of missing render modes
@pytest.mark.parametrize("make", TOYS[1:])  # Stamped stamps its rows with the episode, over every reset
def test_toys_pass_gymnasiums_own_checker(make):
    check_env(make(), skip_render_check=True)


@pytest.mark.parametrize(("num_cues", "delay"), [(4, 8), (3, 1), (2, 0)])
def test_recall_shows_the_cue_once_and_rewards_its_name_only_at_the_end(num_cues, delay):
    env, seen = Recall(num_cues, delay), []
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        cue = int(observation[:-1].argmax())
        assert observation.tolist() == [*(float(k == cue) for k in range(num_cues)), float(delay == 0)]
        for step in range(1, delay + 1):
            observation, reward, terminated, truncated, _ = env.step(cue)
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert observation.tolist() == [0.0] * num_cues + [float(step == delay)]
        answer = cue if seed % 2 else (cue + 1) % num_cues
        _, reward, terminated, _, _ = env.step(answer)
        assert (reward, terminated) == (float(seed % 2), True)
        seen.append(cue)
    assert set(seen) == set(range(num_cues))


def test_recall_refuses_impossible_settings():
    for settings in ((1, 8), (4, -1)):
        with pytest.raises(UsageError, match="Recall.(num_cues is 1|delay is -1); it must be an integer of at least"):
            Recall(*settings)


@pytest.mark.parametrize("num_bits", [1, 3, 15, 62])
def test_bit_flip_best_return_is_one_minus_differing_bits(num_bits):
    env = BitFlip(num_bits)
    for seed in range(20):
        differing = np.flatnonzero(np.logical_xor(*goals(env.reset(seed=seed)[0])))
        act = iter(differing)
        assert len(differing) > 0
        assert episode(env, seed, lambda _, act=act: next(act)) == (1 - len(differing), len(differing), True)


@pytest.mark.parametrize("num_bits", [2, 6])
def test_bit_flip_is_truncated_after_as_many_steps_as_bits(num_bits):
    env, seed = BitFlip(num_bits), 0
    while np.logical_xor(*goals(env.reset(seed=seed)[0])).sum() < 2:  # two differ, and one is flipped to and fro
        seed += 1
    assert episode(env, seed, lambda _: 0) == (-num_bits, num_bits, False)


def test_bit_flip_starts_anywhere_and_wants_anything_else():
    env, pairs = BitFlip(2), []
    env.reset(seed=0)
    for _ in range(1200):
        pairs.append(tuple(int(bits @ [1, 2]) for bits in goals(env.reset()[0])))
    counts = [pairs.count((start, goal)) for start in range(4) for goal in range(4) if goal != start]
    assert sum(counts) == 1200 and min(counts) > 60, counts  # 100 each


@pytest.mark.parametrize("num_bits", [1, 4])
def test_bit_flips_reward_function_gives_the_rewards_of_its_steps(num_bits):
    env, found = BitFlip(num_bits), []
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(300):
        before, (observation, reward, terminated, truncated, _) = env._bits.copy(), env.step(env.action_space.sample())
        assert (before != observation["observation"]).sum() == 1
        found.append((*goals(observation), reward, terminated))
        if terminated or truncated:
            env.reset()
    achieved, goal, reward, terminated = (torch.from_numpy(np.array(column)) for column in zip(*found))
    assert bit_flip_reward(achieved, goal).dtype == torch.float32
    assert torch.equal(bit_flip_reward(achieved, goal), reward.float()) and len(reward.unique()) == 1 + (num_bits > 1)
    assert torch.equal(bit_flip_reached(achieved, goal), terminated)


def test_what_bit_flip_has_shown_does_not_change():
    env = BitFlip(5)
    shown, _ = env.reset(seed=1)
    copy = {key: bits.copy() for key, bits in shown.items()}
    env.step(2)
    assert all((shown[key] == copy[key]).all() for key in copy)


@pytest.mark.parametrize("num_bits", [0, 63])
def test_bit_flip_refuses_impossible_settings(num_bits):
    with pytest.raises(UsageError, match=f"num_bits is {num_bits}"):
        BitFlip(num_bits)


def goals(observation):
    """What there is, and what is wanted."""
    return observation["achieved_goal"], observation["desired_goal"]


def test_stamped_numbers_its_rows():
    env = Stamped((2, 1))
    start, _ = env.reset(seed=4)
    stamp = start[0]
    assert start.tolist() == [stamp, 0, 0]
    assert env.step(0)[0].tolist() == [stamp, 0, 1]
    observation, reward, terminated, truncated, info = env.step(1)
    assert (observation.tolist(), reward, terminated, truncated) == ([stamp, 0, 2], 2.0, True, False)
    assert info["episode"] == 0
    assert env.reset()[0].tolist() == [stamp, 1, 0]
    assert env.step(0)[2]
    assert env.reset()[0].tolist() == [stamp, 2, 0]
    assert Stamped((1,)).reset(seed=5)[0][0] != stamp


def test_stamped_stamps_are_exact_in_float32():
    assert all(float(np.float32(Stamped().reset(seed=seed)[0][0])).is_integer() for seed in range(20))


@pytest.mark.parametrize("truncates", [True, False])
def test_stamped_ends_as_configured(truncates):
    env = Stamped((1,), truncates)
    env.reset(seed=0)
    _, _, terminated, truncated, _ = env.step(0)
    assert (terminated, truncated) == (not truncates, truncates)


def test_one_state_is_truncated_after_its_length():
    assert episode(OneState(5)) == (5.0, 5, False)


def test_both_lengths_are_equally_likely():
    env = TwoLengths()
    lengths = []
    for seed in range(400):
        env.reset(seed=seed)
        lengths.append(env._length)
    assert set(lengths) == {10, 500}
    assert abs(np.mean(lengths) - 255) < 3 * 245 / 400**0.5


@pytest.mark.parametrize(
    "kind, best",
    [
        ("discrete", lambda target: target - 1),
        ("box", lambda target: np.array([target], np.float32)),
        ("multi_discrete", lambda target: np.array([target, 3 - target])),
        ("multi_binary", lambda target: np.array([target // 2, target % 2], np.int8)),
    ],
)
def test_bandits_best_return_is_its_length(kind, best):
    env = Bandit(kind, length=50)
    assert episode(env, 0, lambda seen: best(int(seen.argmax()))) == (50.0, 50, True)
    assert episode(env, 0)[0] < 45


def test_an_unknown_bandit_is_refused():
    with pytest.raises(UsageError, match="Bandit.action is 'boxx'"):
        Bandit("boxx")


@pytest.mark.parametrize("nested", [False, True])
def test_nested_bandits_best_return_is_its_length(nested):
    def best(seen):
        side = int(seen["image"][0, -1, 0] > 0)
        sign = int(seen["vector"][0] > 0)
        digit = int(seen["digit"]) - 2
        if not nested:
            return np.array([side, sign, digit])
        bits = np.array([side, 0], np.int8)
        return {"choice": digit + 1, "parts": (np.array([2 * sign - 2, 0], np.float32), bits)}

    env = NestedBandit(nested, image_size=8, length=30)
    assert episode(env, 0, best)[:2] == (pytest.approx(30), 30)
    assert episode(env, 0)[0] < 27


@pytest.mark.parametrize("kind", ["multi", "nested"])
def test_nested_bandits_actions_are_in_its_space(kind):
    env = NestedBandit(kind == "nested")
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(20):
        observation, reward, *_ = env.step(env.action_space.sample())
        assert observation in env.observation_space and 0 <= reward <= 1


def test_point_mass_moves_by_half_its_push():
    env = TensorPointMass(2, length=3)
    start, _ = env.reset(seed=0)
    assert start.abs().max() <= 1
    after, reward, terminated, truncated, _ = env.step(torch.tensor([[1.0], [-1.0]]))
    assert torch.allclose(after[:, 0], start[:, 0] + torch.tensor([0.5, -0.5]))
    assert torch.equal(reward, -after[:, 0].abs())
    assert not terminated.any() and not truncated.any()


def test_point_mass_has_the_returns_of_its_docstring():
    def average(act, length=20):
        env = TensorPointMass(4000, length)
        observation, _ = env.reset(seed=0)
        total = 0
        for _ in range(length):
            observation, reward, *_ = env.step(act(observation))
            total += reward.mean().item()
        return total

    assert average(lambda seen: torch.zeros(4000, 1)) == pytest.approx(-10, rel=0.05)
    home = average(lambda seen: (-2 * seen[:, :1]).clamp(-1, 1))
    assert -0.6 < home <= 0, f"pushing home returns {home}"


def test_all_toys_are_reproducible_from_their_seeds():
    for make in TOYS:
        one, other = make(), make()
        for env in (one, other):
            env.action_space.seed(1)
        seen = [[], []]
        for record, env in zip(seen, (one, other)):
            record.append(env.reset(seed=3)[0])
            for _ in range(6):
                observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
                record += [observation, reward, terminated, truncated]
                if terminated or truncated:
                    record.append(env.reset()[0])
        assert gymnasium.utils.env_checker.data_equivalence(*seen)


@pytest.mark.parametrize("num_forbidden", [0, 3, 5])
def test_masked_identity_forbids_new_actions_at_each_step(num_forbidden):
    env = MaskedIdentity(6, num_forbidden)
    target, info = env.reset(seed=0)
    masks = []
    for _ in range(50):
        mask = info["action_mask"]
        assert mask is env.action_masks() and mask[target] == 1 and (mask == 0).sum() == num_forbidden
        masks.append((int(target), mask.tobytes()))
        target, reward, _, _, info = env.step(target)
        assert reward == 1
    assert len(set(masks)) > (20 if num_forbidden == 3 else 5)
    assert env.step((target + 1) % 6)[1] == 0
    with pytest.raises(
        UsageError, match="MaskedIdentity.num_forbidden is 6; it must be less than its number of actions, 6"
    ):
        MaskedIdentity(6, 6)


def test_one_arm_of_an_episode_is_rewarded():
    env, arms = HiddenArm(3, length=5), []
    for seed in range(40):
        returns = [episode(env, seed, lambda _, arm=arm: arm) for arm in range(3)]
        assert sorted(returns) == [(0, 5, False), (0, 5, False), (5, 5, False)]
        arms.append(returns.index((5, 5, False)))
    assert set(arms) == {0, 1, 2}


def test_correct_actions_lead_to_the_last_room_of_the_corridor():
    env = Corridor(6, 3)
    assert episode(env, act=lambda observation: env._onward[observation.argmax()]) == (1.0, 5, True)
    back = episode(env, act=lambda observation: (env._onward[observation.argmax()] + 1) % 3)
    assert back == (0.0, 18, False)
    assert Corridor(6, 3)._onward.tolist() == env._onward.tolist() and len(set(env._onward)) > 1


def test_random_actions_do_not_reach_the_last_of_twenty_rooms():
    env = Corridor()
    env.action_space.seed(0)
    assert sum(episode(env, seed)[0] for seed in range(100)) == 0


def test_a_number_that_recalls_a_cue_is_rewarded_by_its_distance():
    env, seen = Recall(3, 0, "box"), set()
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        cue = int(observation[:3].argmax())
        _, reward, terminated, _, _ = env.step(np.array([0.5], np.float32))
        assert reward == pytest.approx([0.25, 0.75, 0.75][cue]) and terminated
        seen.add(cue)
    assert seen == {0, 1, 2}
