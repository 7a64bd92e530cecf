import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from far_device import FarDevice
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.transforms import (
    ObservationNormalizer,
    ObservationRescaler,
    RewardClip,
    RewardNormalizer,
    RewardRescaler,
    RewardScale,
    Transform,
    Transforms,
)
from alfish.transforms.normalizers import RunningMoments, _turns

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
NESTED = {
    "body": VECTOR,
    "camera": spaces.Box(0, 255, (2, 2, 1), np.uint8),
    "goal": (spaces.Box(-1, 1, (), np.float32), spaces.Discrete(3)),
}
SCALAR = specs.reward_spec()


def _rows(observation=None, reward=None, step_type=None):
    """`[T, B]` rows; what is not given is zero, and every row MID."""
    known = next(leaf for leaf in (step_type, reward, *nest.leaves(observation)) if leaf is not None)
    leading = known.shape[:2]
    step_type = torch.full(leading, MID, dtype=torch.int32) if step_type is None else step_type
    reward = torch.zeros(leading) if reward is None else reward
    observation = torch.zeros(*leading, 3) if observation is None else observation
    env_id = torch.arange(leading[1], dtype=torch.int32).expand(leading)
    return TimeStep(step_type, reward, torch.ones(leading), observation, torch.zeros(leading), env_id)


def _random_step_types(num_rows, num_envs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.full((num_rows, num_envs), MID, dtype=torch.int32)
    for b in range(num_envs):
        end = num_rows - int(torch.randint(num_rows // 3, (), generator=generator))
        previous = LAST
        for t in range(num_rows):
            last = torch.rand((), generator=generator) < 0.2
            previous = PAD if t >= end else FIRST if previous == LAST else LAST if last else MID
            step_type[t, b] = previous
    return step_type


class TestRunningMoments:
    @pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
    def test_running_moments_equal_numpy_over_all_chunks(self, shape):
        generator = torch.Generator().manual_seed(0)
        moments, chunks = RunningMoments(shape), []
        for size in (1, 7, 30, 2):
            rows = torch.randn(size, *shape, generator=generator) * 5 + 100
            mask = torch.rand(size, generator=generator) < 0.7
            moments.update(rows, mask, 1e-8)
            chunks.append(rows[mask].double().numpy())
        everything = np.concatenate(chunks)
        assert moments.count.item() == len(everything)
        np.testing.assert_allclose(moments.mean.numpy(), everything.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.squares.numpy() / len(everything), everything.var(0), rtol=1e-9)
        np.testing.assert_allclose(moments.shift.numpy(), everything.mean(0), rtol=1e-6)
        np.testing.assert_allclose(moments.scale.numpy(), 1 / np.sqrt(everything.var(0) + 1e-8), rtol=1e-6)

    @pytest.mark.parametrize("filler", [math.nan, math.inf, 1e30])
    def test_rows_that_do_not_count_may_hold_anything(self, filler):
        clean, dirty = RunningMoments((2,)), RunningMoments((2,))
        rows, mask = torch.randn(10, 2), torch.arange(10) < 6
        clean.update(rows[:6], mask[:6], 1e-8)
        dirty.update(rows.masked_fill(~mask[:, None], filler), mask, 1e-8)
        for name, value in clean.state_dict().items():
            torch.testing.assert_close(dirty.state_dict()[name], value)

    def test_rows_of_pad_only_leave_the_scale_at_1(self):
        normalizer = ObservationNormalizer(VECTOR, specs.reward_spec())
        absent = torch.full((4, 2), PAD, dtype=torch.int32)
        rows = _rows(torch.full((4, 2, 3), 0.5), step_type=absent)
        normalizer.observe(rows)
        assert torch.equal(normalizer.transform(rows, None).observation, rows.observation)

    def test_a_small_spread_far_from_zero_keeps_its_digits(self):
        moments = RunningMoments(())
        for part in torch.linspace(0, 1, 1000).split(100):
            moments.update(1000 + part, torch.ones(100, dtype=torch.bool), 0.0)
        assert moments.scale.item() == pytest.approx(12**0.5, rel=1e-2)

    def test_before_any_row_they_are_the_identity(self):
        moments = RunningMoments((2,))
        assert moments.shift.tolist() == [0, 0]
        assert moments.scale.tolist() == [1, 1]

    def test_no_row_changes_nothing(self):
        moments = RunningMoments((2,))
        moments.update(torch.randn(5, 2), torch.ones(5, dtype=torch.bool), 1e-8)
        before = copy.deepcopy(moments.state_dict())
        moments.update(torch.full((5, 2), math.nan), torch.zeros(5, dtype=torch.bool), 1e-8)
        for name, value in moments.state_dict().items():
            torch.testing.assert_close(value, before[name])

    def test_buffers_are_updated_in_place(self):
        """So that what a worker was given keeps seeing them."""
        moments = RunningMoments((2,))
        before = dict(moments.named_buffers())
        moments.update(torch.randn(5, 2), torch.ones(5, dtype=torch.bool), 1e-8)
        assert all(buffer is before[name] for name, buffer in moments.named_buffers())


class TestObservationNormalizer:
    def test_float_images_of_pixels_keep_their_bounds_unless_they_are_named(self):
        """Without these bounds an encoder takes them for vectors, or does not scale them."""
        pixels = spaces.Box(0, 255, (24, 24, 3), np.float32)
        for kind in (ObservationNormalizer, ObservationRescaler):
            assert kind({"camera": pixels, "x": VECTOR}, SCALAR).observation_spec["camera"] == pixels
            assert kind({"camera": pixels}, SCALAR, leaves=["camera"]).observation_spec["camera"] != pixels

    def test_what_comes_out_has_mean_zero_and_deviation_one(self):
        torch.manual_seed(0)
        normalizer = ObservationNormalizer(VECTOR, SCALAR)
        rows = _rows(torch.randn(20, 4, 3) * torch.tensor([1.0, 10, 0.1]) + 7)
        normalizer.observe(rows)
        out = normalizer.transform(rows, None).observation.flatten(0, 1)
        torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
        torch.testing.assert_close(out.std(0, correction=0), torch.ones(3), atol=1e-3, rtol=0)

    def test_padding_counts_for_nothing(self):
        step_type = _random_step_types(20, 4)
        observation = torch.randn(20, 4, 3)
        normalizer = ObservationNormalizer(VECTOR, SCALAR)
        poisoned = observation.masked_fill((step_type == PAD)[..., None], math.nan)
        normalizer.observe(_rows(poisoned, step_type=step_type))
        expected = observation[step_type != PAD].double()
        (moments,) = normalizer._moments
        torch.testing.assert_close(moments.mean, expected.mean(0))
        assert moments.count.item() == (step_type != PAD).sum()

    def test_only_float_leaves_are_normalized(self):
        normalizer = ObservationNormalizer(NESTED, SCALAR)
        observation = {
            "body": torch.randn(6, 2, 3) + 5,
            "camera": torch.randint(256, (6, 2, 2, 2, 1), dtype=torch.uint8),
            "goal": (torch.rand(6, 2), torch.randint(3, (6, 2))),
        }
        rows = _rows(observation)
        normalizer.observe(rows)
        out = normalizer.transform(rows, None).observation
        assert out["camera"] is observation["camera"]
        assert out["goal"][1] is observation["goal"][1]
        assert out["body"].mean().abs() < 1e-3
        assert out["goal"][0].mean().abs() < 1e-3
        assert out["goal"][0].dtype == torch.float32

    def test_globs_choose_the_leaves(self):
        normalizer = ObservationNormalizer(NESTED, SCALAR, leaves=["goal.*"])
        observation = {
            "body": torch.randn(6, 2, 3) + 5, "camera": torch.zeros(6, 2, 2, 2, 1, dtype=torch.uint8),
            "goal": (torch.rand(6, 2), torch.zeros(6, 2, dtype=torch.int64)),
        }  # fmt: skip
        normalizer.observe(_rows(observation))
        out = normalizer.transform(_rows(observation), None).observation
        assert out["body"] is observation["body"]
        assert out["goal"][0].mean().abs() < 1e-3

    def test_the_output_matches_the_spec(self):
        spec = ObservationNormalizer(NESTED, SCALAR, clip=5.0).observation_spec
        assert spec["camera"] == NESTED["camera"]
        assert spec["goal"][1] == NESTED["goal"][1]
        assert spec["goal"][0].shape == ()
        assert (spec["body"].low == -5).all()
        assert (spec["body"].high == 5).all()
        assert spec["body"].dtype == np.float32
        assert spec["body"].shape == (3,)

    def test_outliers_are_clipped(self):
        normalizer = ObservationNormalizer(VECTOR, SCALAR, clip=2.0)
        normalizer.observe(_rows(torch.randn(50, 2, 3)))
        out = normalizer.transform(_rows(torch.tensor([[[1e6, -1e6, 0.0]]])), None).observation
        assert out[0, 0, :2].tolist() == [2, -2]

    def test_without_clip_outliers_keep_their_size_and_the_spec_has_no_bounds(self):
        normalizer = ObservationNormalizer(VECTOR, SCALAR, clip=None)
        rows = _rows(torch.randn(50, 2, 3))
        normalizer.observe(rows)
        mean, std = rows.observation.mean((0, 1)), rows.observation.std((0, 1), correction=0)
        outlier = torch.tensor([[[1e6, -1e6, 0.0]]])
        out = normalizer.transform(_rows(outlier), None).observation
        torch.testing.assert_close(out, (outlier - mean) / std, rtol=1e-4, atol=1e-4)
        spec = normalizer.observation_spec
        assert (spec.low == -np.inf).all() and (spec.high == np.inf).all() and spec.dtype == np.float32

    def test_an_observation_without_a_float_leaf_passes_unchanged_by_default(self):
        normalizer = ObservationNormalizer(spaces.Discrete(3), SCALAR)
        rows = _rows(torch.tensor([[0, 2], [1, 1]]))
        normalizer.observe(rows)
        assert normalizer.transform(rows, None).observation is rows.observation
        assert normalizer.observation_spec == spaces.Discrete(3)

    def test_no_leaf_to_normalize_is_refused(self):
        with pytest.raises(UsageError, match="has 'camera', which matches no float leaf of body: Box"):
            ObservationNormalizer(NESTED, SCALAR, leaves=["camera"])
        with pytest.raises(UsageError, match="no float leaf"):
            ObservationNormalizer(spaces.Discrete(3), SCALAR, leaves="digit")
        with pytest.raises(UsageError, match="has 'gaol.*'"):
            ObservationNormalizer(NESTED, SCALAR, leaves=["body", "gaol.*"])
        with pytest.raises(UsageError, match="leaves is empty"):
            ObservationNormalizer(NESTED, SCALAR, leaves=[])

    def test_one_glob_may_be_a_text_and_float16_is_normalized(self):
        half = {"a": spaces.Box(-1, 1, (3,), np.float16), "b": VECTOR}
        normalizer = ObservationNormalizer(half, SCALAR, leaves="a")
        rows = _rows({"a": torch.randn(50, 2, 3).half() + 5, "b": torch.randn(50, 2, 3)})
        normalizer.observe(rows)
        out = normalizer.transform(rows, None).observation
        assert out["b"] is rows.observation["b"]
        assert out["a"].dtype == torch.float32
        assert out["a"].mean().abs() < 1e-2


class TestObservationRescaler:
    SPEC = spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def observed(self, rows, **options):
        rescaler = ObservationRescaler(self.SPEC, SCALAR, **options)
        rescaler.observe(_rows(step_type=torch.full(rows.shape[:2], MID, dtype=torch.int32), observation=rows))
        return rescaler

    def test_it_changes_only_entries_of_unusual_size(self):
        """Entries: small, usual, usual by its mean alone, large, and constant 0."""
        generator = torch.Generator().manual_seed(0)
        sizes, means = torch.tensor([1e-3, 3.0, 0.1, 1e4, 0.0]), torch.tensor([0.0, 1.0, 20.0, 5e4, 0.0])
        rows = torch.randn((200, 3, 5), generator=generator) * sizes + means
        out = self.observed(rows).normalize(rows)
        assert torch.equal(out[..., 1:3], rows[..., 1:3])
        changed = out[..., [0, 3]].flatten(0, 1)
        torch.testing.assert_close(changed.mean(0), torch.zeros(2), atol=1e-2, rtol=0)
        torch.testing.assert_close(changed.std(0), torch.ones(2), atol=2e-2, rtol=0)
        assert out[..., 4].eq(0).all()

    @pytest.mark.parametrize("value", [0.0, 0.01, 1e-3, 1e4])
    def test_an_entry_that_was_constant_keeps_its_scale(self, value):
        """A contact that never closed among the observed rows must not become 10,000 when it closes."""
        rescaler = self.observed(torch.full((200, 3, 5), value))
        torch.testing.assert_close(rescaler.normalize(torch.full((5,), value + 1.0)), torch.ones(5), atol=1e-3, rtol=0)

    def test_the_range_is_a_setting_and_values_are_not_clipped(self):
        rows = torch.full((20, 3, 5), 3.0) + torch.arange(60.0).view(20, 3, 1) % 2
        assert torch.equal(self.observed(rows).normalize(100 * rows), 100 * rows)
        moved = self.observed(rows, largest=2.0).normalize(100 * rows)
        assert moved.abs().min() > 100

    def test_an_observation_without_floats_stays_as_it_is(self):
        rescaler = ObservationRescaler(spaces.Discrete(3), SCALAR)
        rows = _rows(observation=torch.ones(2, 3, dtype=torch.int64))
        rescaler.observe(rows)
        assert torch.equal(rescaler.transform(rows, None).observation, rows.observation)


class TestRewardRescaler:
    @pytest.mark.parametrize(
        ("largest", "scale"), [(1e-3, 1e3), (0.05, 20.0), (0.1, 1.0), (1.0, 1.0), (100.0, 1.0), (1e4, 1e-4), (0.0, 1.0)]
    )
    def test_it_divides_rewards_of_unusual_size_by_the_largest(self, largest, scale):
        rescaler = RewardRescaler(VECTOR, SCALAR)
        reward = torch.tensor([[0.5], [-1.0], [0.25]]) * largest
        rescaler.observe(_rows(step_type=torch.full((3, 1), MID, dtype=torch.int32), reward=reward))
        torch.testing.assert_close(rescaler.transform(_rows(reward=reward), None).reward, reward * scale)

    def test_rewards_of_first_rows_and_padding_do_not_count(self):
        rescaler = RewardRescaler(VECTOR, SCALAR)
        step_type = torch.tensor([[FIRST], [MID], [LAST], [PAD]], dtype=torch.int32)
        rescaler.observe(_rows(step_type=step_type, reward=torch.tensor([[1e6], [1e-3], [-2e-3], [1e6]])))
        assert rescaler.scale.item() == pytest.approx(500)

    def test_vector_entries_have_own_scales_from_all_calls(self):
        rescaler = RewardRescaler(VECTOR, specs.reward_spec(2))
        for size in (1.0, 5.0, 2.0):
            reward = torch.tensor([[[1e3, 0.5]]]) * size
            rescaler.observe(_rows(step_type=torch.full((1, 1), MID, dtype=torch.int32), reward=reward))
        torch.testing.assert_close(rescaler.scale, torch.tensor([1 / 5e3, 1.0]))


class TestRewardNormalizer:
    @pytest.mark.parametrize("num_rewards", [None, 2, 3])  # 3 is also the number of environments
    @pytest.mark.parametrize("pieces", [[60], [1, 20, 2, 37], [30, 30]])
    def test_it_is_the_plain_loop_over_calls_and_episodes(self, pieces, num_rewards):
        generator = torch.Generator().manual_seed(0)
        step_type = torch.cat([_random_step_types(n, 3, seed=n) if n > 6 else torch.full((n, 3), MID) for n in pieces])
        shape = (60, 3) if num_rewards is None else (60, 3, num_rewards)
        reward = torch.randn(shape, generator=generator) + 0.3
        normalizer = RewardNormalizer(VECTOR, specs.reward_spec(num_rewards), gamma=0.9)
        for rows in zip(step_type.split(pieces), reward.split(pieces)):
            normalizer.observe(_rows(step_type=rows[0].int(), reward=rows[1]))

        running, seen = [np.zeros(shape[2:]) for _ in range(3)], []
        for t in range(60):
            for b in range(3):
                kind = int(step_type[t, b])
                if kind == FIRST:
                    running[b] = np.zeros(shape[2:])
                elif kind in (MID, LAST):
                    running[b] = 0.9 * running[b] + reward[t, b].double().numpy()
                    seen.append(running[b])
        expected = 1 / np.sqrt(np.var(np.array(seen), 0) + 1e-8)
        moments = normalizer._moments
        assert moments.count.item() == len(seen)
        np.testing.assert_allclose(moments.scale.numpy(), expected, rtol=1e-5)
        out = normalizer.transform(_rows(reward=reward), None).reward
        expected_out = (reward * torch.as_tensor(expected, dtype=torch.float32)).clamp(-10, 10)
        torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("num_rewards", [None, 2])
    def test_what_is_carried_follows_the_environment_whatever_its_columns(self, num_rewards):
        reward = torch.randn((40, 3) if num_rewards is None else (40, 3, num_rewards))
        rows = _rows(
            step_type=_random_step_types(40, 3).masked_fill(torch.arange(40)[:, None] > 25, MID), reward=reward
        )
        straight, moved = (RewardNormalizer(VECTOR, specs.reward_spec(num_rewards)) for _ in range(2))
        straight.observe(rows)
        # Ten rows at a time of (environment, which ten of its own) in each column, as they come from unequal workers.
        for unroll in ([(1, 0), (1, 1)], [(2, 0), (0, 0)], [(1, 2), (0, 1), (1, 3), (0, 2)], [(0, 3), (2, 1)],
                       [(2, 2), (2, 3)]):  # fmt: skip
            tens = [nest.map(lambda leaf, b=b, k=k: leaf[10 * k : 10 * k + 10, b], rows) for b, k in unroll]
            moved.observe(nest.stack(tens, dim=1))
        torch.testing.assert_close(moved._return, straight._return)
        torch.testing.assert_close(moved._moments.state_dict(), straight._moments.state_dict())

    def test_columns_of_one_environment_follow_each_other_on_a_device_after_a_transform_of_rewards(self):
        columns = _rows(reward=torch.randn(20, 4))
        columns = columns._replace(env_id=torch.tensor([0, 1, 1, 0]).expand(20, 4))
        found = []
        with FarDevice() as far:
            for device in ("cpu", far.device):
                chain = [partial(RewardScale, scale=0.5), RewardNormalizer]
                transforms = Transforms(chain, VECTOR, specs.reward_spec()).to(device)
                transforms.observe(columns, transforms.initial_state(4), 0)
                found.append(nest.to(transforms.others[1]._moments.scale, torch.device("cpu")).item())
        assert found[0] == pytest.approx(found[1])

    @pytest.mark.slow
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
    @pytest.mark.parametrize("num_rewards", [None, 2])
    def test_host_rows_update_gpu_statistics_without_waiting(self, num_rewards):
        reward = torch.randn((40, 3) if num_rewards is None else (40, 3, num_rewards))
        rows = _rows(step_type=_random_step_types(40, 3), reward=reward)
        states = []
        for device in ("cpu", "cuda"):
            factories = [ObservationNormalizer, lambda *given: RewardNormalizer(*given, largest_return=5.0)]
            transforms = Transforms(factories, VECTOR, specs.reward_spec(num_rewards)).to(device)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for part in (nest.at(rows, slice(20)), nest.at(rows, slice(20, None))):
                    transforms.observe(part, transforms.initial_state(3), 0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            states.append(transforms.cpu().state_dict())
        torch.testing.assert_close(*states)

    def test_environments_that_are_not_there_keep_theirs(self):
        normalizer = RewardNormalizer(VECTOR, SCALAR, gamma=0.5)
        normalizer.observe(_rows(reward=torch.tensor([[8.0, 4.0, 2.0]])))
        normalizer.observe(_rows(reward=torch.ones(1, 2)))
        assert normalizer._return.tolist() == [5, 3, 2]
        absent = _rows(reward=torch.ones(2, 5), step_type=torch.tensor([[MID, PAD, MID, PAD, FIRST]] * 2))
        normalizer.observe(absent._replace(env_id=torch.tensor([[1, 0, 2, 0, 4]] * 2)))
        assert normalizer._return.tolist() == [5, 2.25, 2, 0, 0]
        assert normalizer._moments.count == 9

    def test_columns_of_an_environment_are_gone_through_in_turn(self):
        env_id = torch.tensor([1, 0, 1, 2, 0, 1])
        turns = _turns(env_id, torch.ones(6, dtype=torch.bool))
        assert [columns.tolist() for columns in turns] == [[0, 1, 3], [2, 4], [5]]
        turns = _turns(env_id, torch.tensor([True, False, True, True, True, False]))
        assert [columns.tolist() for columns in turns] == [[0, 3, 4], [2]]
        assert _turns(env_id, torch.zeros(6, dtype=torch.bool)) == []

    @pytest.mark.parametrize("garbage", [1e6, math.nan])
    def test_rewards_of_first_and_padding_rows_are_never_read(self, garbage):
        step_type = _random_step_types(40, 3)
        reward = torch.randn(40, 3)
        unread = (step_type == FIRST) | (step_type == PAD)
        clean, dirty = RewardNormalizer(VECTOR, SCALAR), RewardNormalizer(VECTOR, SCALAR)
        clean.observe(_rows(step_type=step_type, reward=reward))
        dirty.observe(_rows(step_type=step_type, reward=reward.masked_fill(unread, garbage)))
        assert torch.equal(clean._moments.scale, dirty._moments.scale)

    def test_the_mean_is_not_subtracted_and_outliers_are_clipped(self):
        normalizer = RewardNormalizer(VECTOR, SCALAR, clip=3.0)
        normalizer.observe(_rows(reward=torch.randn(100, 2)))
        out = normalizer.transform(_rows(reward=torch.tensor([[0.0, 1e6, -1e6]])), None).reward
        assert out.tolist() == [[0, 3, -3]]
        assert normalizer.transform(_rows(reward=torch.ones(1, 1)), None).reward.item() > 0

    @pytest.mark.parametrize("num_rewards", [None, 2])
    def test_a_largest_return_limits_only_large_returns(self, num_rewards):
        spec = specs.reward_spec(num_rewards)
        bounded = RewardNormalizer(VECTOR, spec, gamma=0.0, clip=None, largest_return=5.0)
        plain = RewardNormalizer(VECTOR, spec, gamma=0.0, clip=None)
        reward = torch.ones((50, 2) if num_rewards is None else (50, 2, num_rewards))
        reward[::2] = -1
        for each in (bounded, plain):
            each.observe(_rows(reward=reward))
        assert torch.equal(bounded.normalize(reward), plain.normalize(reward))
        rare = reward.clone()
        rare[3, 1] = -50
        for each in (bounded, plain):
            each.observe(_rows(reward=rare))
        assert float(bounded.normalize(rare).min()) == pytest.approx(-5) and float(plain.normalize(rare).min()) < -6
        restored = RewardNormalizer(VECTOR, spec, gamma=0.0, clip=None, largest_return=5.0)
        restored.load_state_dict(copy.deepcopy(bounded.state_dict()))
        for each in (bounded, restored):
            each.observe(_rows(reward=reward))
        assert torch.equal(bounded.normalize(rare), restored.normalize(rare))
        assert float(bounded.normalize(rare).min()) == pytest.approx(-5)

    @pytest.mark.parametrize("largest_return", [None, 5.0])
    @pytest.mark.parametrize("num_rewards", [None, 2])
    def test_rewards_are_unchanged_before_the_first_nonzero_reward(self, num_rewards, largest_return):
        normalizer = RewardNormalizer(VECTOR, specs.reward_spec(num_rewards), clip=None, largest_return=largest_return)
        reward = torch.zeros((50, 2) if num_rewards is None else (50, 2, num_rewards))
        normalizer.observe(_rows(reward=reward))
        assert torch.equal(normalizer.normalize(reward + 7), reward + 7)
        reward[3, 0] = 7
        normalizer.observe(_rows(reward=reward))
        assert float(normalizer.normalize(reward).max()) < 7

    def test_state_continues_after_a_restore(self):
        rows = [_rows(reward=torch.randn(7, 2)) for _ in range(3)]
        straight = RewardNormalizer(VECTOR, SCALAR)
        for part in rows:
            straight.observe(part)
        first = RewardNormalizer(VECTOR, SCALAR)
        first.observe(rows[0])
        restored = RewardNormalizer(VECTOR, SCALAR)
        restored.load_state_dict(copy.deepcopy(first.state_dict()))
        for part in rows[1:]:
            restored.observe(part)
        assert torch.equal(straight._moments.scale, restored._moments.scale)
        assert torch.equal(straight._return, restored._return)


FACTORIES = {
    "observation": ObservationNormalizer,
    "reward": RewardNormalizer,
    "clip": RewardClip,
    "scale": partial(RewardScale, scale=0.5),
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("num_rewards", [None, 2])
class TestContract:
    def _make(self, name, num_rewards):
        transforms = Transforms([FACTORIES[name]], VECTOR, specs.reward_spec(num_rewards))
        return transforms, self._rows(num_rewards)

    def _rows(self, num_rewards, num_rows=9):
        shape = (num_rows, 2) if num_rewards is None else (num_rows, 2, num_rewards)
        return _rows(torch.randn(num_rows, 2, 3) * 3, torch.randn(shape) * 3)

    def test_acting_and_training_see_the_same_numbers(self, name, num_rewards):
        transforms, rows = self._make(name, num_rewards)
        transforms.observe(self._rows(num_rewards), transforms.initial_state(2), 0)
        state = transforms.initial_state(2)
        whole = transforms.transform(rows, state)
        for t in range(9):
            seen, state = transforms(nest.map(lambda leaf, t=t: leaf[t], rows), state)
            assert torch.equal(seen.observation, whole.observation[t])
            assert torch.equal(seen.reward, whole.reward[t])

    def test_raw_rows_are_left_as_they_were(self, name, num_rewards):
        transforms, rows = self._make(name, num_rewards)
        before = nest.map(torch.clone, rows)
        transforms.observe(rows, transforms.initial_state(2), 0)
        transforms.transform(rows, transforms.initial_state(2))
        for was, leaf in zip(nest.leaves(before), nest.leaves(rows)):
            assert torch.equal(was, leaf)

    def test_statistics_change_in_observe_and_nowhere_else(self, name, num_rewards):
        transforms, rows = self._make(name, num_rewards)
        transforms.observe(rows, transforms.initial_state(2), 0)
        first = transforms.transform(rows, transforms.initial_state(2))
        state = transforms.initial_state(2)
        for t in range(9):
            _, state = transforms(nest.map(lambda leaf, t=t: leaf[t] + 100, rows), state)
        again = transforms.transform(rows, transforms.initial_state(2))
        assert torch.equal(first.observation, again.observation)
        assert torch.equal(first.reward, again.reward)

    def test_state_round_trip(self, name, num_rewards):
        transforms, rows = self._make(name, num_rewards)
        transforms.observe(rows, transforms.initial_state(2), 0)
        other, _ = self._make(name, num_rewards)
        other.load_state_dict(copy.deepcopy(transforms.state_dict()))
        out, again = (each.transform(rows, each.initial_state(2)) for each in (transforms, other))
        assert torch.equal(out.observation, again.observation)
        assert torch.equal(out.reward, again.reward)

    def test_dtypes_and_shapes_stay(self, name, num_rewards):
        transforms, rows = self._make(name, num_rewards)
        transforms.observe(rows, transforms.initial_state(2), 0)
        out = transforms.transform(rows, transforms.initial_state(2))
        for was, leaf in zip(nest.leaves(rows), nest.leaves(out)):
            assert leaf.dtype == was.dtype
            assert leaf.shape == was.shape


def test_reward_clip_and_scale():
    rows = _rows(reward=torch.tensor([[-3.0, 0.25, 7.0]]))
    assert RewardClip(VECTOR, SCALAR).transform(rows, None).reward.tolist() == [[-1, 0.25, 1]]
    assert RewardScale(VECTOR, SCALAR, scale=2.0).transform(rows, None).reward.tolist() == [[-6, 0.5, 14]]
    with pytest.raises(UsageError, match="RewardClip.low must be below RewardClip.high"):
        RewardClip(VECTOR, SCALAR, low=1.0, high=1.0)


def test_a_chain_applies_the_first_one_first():
    factories = [partial(RewardScale, scale=10.0), partial(RewardClip, low=-2.0, high=2.0)]
    rows = _rows(reward=torch.tensor([[0.1, 0.5]]))
    for chain, expected in ((factories, [1, 2]), (factories[::-1], [1, 5])):
        transforms = Transforms(chain, VECTOR, SCALAR)
        assert transforms.transform(rows, transforms.initial_state(2)).reward.tolist() == [expected]


def test_a_chain_passes_specs_on():
    transforms = Transforms(
        [partial(ObservationNormalizer, clip=3.0), partial(ObservationNormalizer, clip=2.0)], VECTOR, SCALAR
    )
    assert (transforms.observation_spec.high == 2).all()
    assert transforms.reward_spec.shape == ()


def test_each_transform_observes_the_output_of_the_previous_one():
    torch.manual_seed(0)
    transforms = Transforms([partial(RewardScale, scale=10.0), RewardNormalizer], VECTOR, SCALAR)
    alone = RewardNormalizer(VECTOR, SCALAR)
    rows = _rows(reward=torch.randn(30, 2))
    transforms.observe(rows, transforms.initial_state(2), 0)
    alone.observe(rows._replace(reward=10 * rows.reward))
    assert torch.equal(transforms._chain[1]._moments.scale, alone._moments.scale)


@pytest.mark.parametrize("factories", [[ObservationNormalizer], [RewardNormalizer], [RewardScale, RewardNormalizer]])
def test_rows_observed_before_count_once(factories):
    """On-policy, row 0 was the last row of the unroll before."""
    factories = [partial(one, scale=2.0) if one is RewardScale else one for one in factories]
    rows = _rows(torch.randn(9, 2, 3), torch.randn(9, 2), _random_step_types(9, 2))
    straight, again = (Transforms(factories, VECTOR, SCALAR) for _ in range(2))
    state = straight.initial_state(2)
    straight.observe(rows, state, 0)
    again.observe(nest.map(lambda leaf: leaf[:5], rows), state, 0)
    again.observe(nest.map(lambda leaf: leaf[4:], rows), state, 1)
    (expected,) = (m for m in straight.modules() if isinstance(m, RunningMoments))
    (moments,) = (m for m in again.modules() if isinstance(m, RunningMoments))
    assert moments.count == expected.count > 0
    torch.testing.assert_close(moments.scale, expected.scale)


def _changing(change):
    """A transform whose observations `change` returns, and whose spec is that of its input."""

    class Changes(Transform):
        def transform(self, time_step, state):
            return time_step._replace(observation=change(time_step.observation))

    return Changes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: torch.cat([x, x], -1), r"of shape \(6,\) and float32, but its observation_spec has Box"),
        (lambda x: x[..., :1], r"of shape \(1,\) and float32"),
        (lambda x: x.double(), r"of shape \(3,\) and float64"),
        (lambda x: {"a": x, "b": x}, "the observations a, b, but its observation_spec has one"),
    ],
    ids=["wider", "narrower", "of another dtype", "of other leaves"],
)
def test_observations_that_do_not_fit_the_spec_of_their_transform_are_refused(change, words):
    chain, rows = Transforms([_changing(change)], VECTOR, SCALAR), _rows(reward=torch.ones(3, 2))
    for call in (chain, chain.transform):
        with pytest.raises(UsageError, match=f"Changes returned .*{words}"):
            call(rows, (None,))
    Transforms([_changing(lambda x: x + 1)], VECTOR, SCALAR).transform(rows, (None,))


def test_observations_of_fewer_rows_are_refused():
    rows = _rows(reward=torch.ones(3, 2))
    with pytest.raises(UsageError, match=r"Changes returned .* for rows of shape \(3, 2\); return one observation"):
        Transforms([_changing(lambda x: x[:1])], VECTOR, SCALAR).transform(rows, (None,))


def test_a_transform_that_returns_no_time_step_is_named():
    class Forgets(Transform):
        def transform(self, time_step, state):
            time_step._replace(reward=time_step.reward * 2)

    chain, rows = Transforms([Forgets], VECTOR, SCALAR), _rows(reward=torch.ones(3, 2))
    for call in (chain, chain.transform):
        with pytest.raises(UsageError, match=r"Forgets\.transform returned None; it must return the time step"):
            call(rows, (None,))


def test_no_transform_is_the_identity():
    transforms = Transforms([], VECTOR, SCALAR)
    rows = _rows(reward=torch.randn(3, 2))
    assert transforms.transform(rows, transforms.initial_state(2)) is rows
    assert transforms(rows, transforms.initial_state(2))[0] is rows
