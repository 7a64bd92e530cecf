"""Random shifts of images."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from test_frozen_encoder import IMAGE, SCALAR, TORSO, dqn, make, ppo

from alfish import nest
from alfish.algorithms.sac import SAC
from alfish.data import StepType, TimeStep
from alfish.environments import make_environment
from alfish.environments.toy import Catch
from alfish.errors import UsageError
from alfish.learner.batches import OfflineBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import CriticEnsemble, Encoder, SmallCNN
from alfish.offline import Arrays, OfflineBuffer, Spaces
from alfish.training.diagnostics import Histograms
from alfish.training.summaries import Summaries
from alfish.transforms import RandomShift, RewardScale
from alfish.transforms.random_shift import shifted
from alfish.unrollers import AsyncUnroller

SHIFT = functools.partial(RandomShift, pad=1)


def rows(observation, length=3, size=5):
    """`[T, N]` rows."""
    step_type = torch.full((length, size), StepType.MID, dtype=torch.int32)
    zeros = torch.zeros(length, size)
    return TimeStep(step_type, zeros, zeros + 1, observation, zeros, step_type)


class TestShift:
    def test_by_hand(self):
        image = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)
        found = shifted(image.expand(4, 2, 3), torch.tensor([0, 1, -1, 0]), torch.tensor([0, 0, 0, 2]), -2)
        assert found.dtype == torch.uint8
        assert found.tolist() == [
            [[1, 2, 3], [4, 5, 6]],
            [[4, 5, 6], [4, 5, 6]],
            [[1, 2, 3], [1, 2, 3]],
            [[3, 3, 3], [6, 6, 6]],
        ]

    @pytest.mark.parametrize(
        ("shape", "height"), [((6, 7), -2), ((6, 7, 3), -3), ((3, 6, 7), -2), ((4, 6, 7, 3), -3), ((4, 3, 6, 7), -2)]
    )
    def test_it_is_a_crop_of_the_image_padded_by_its_border(self, shape, height):
        torch.manual_seed(0)
        images = torch.randint(0, 256, (8, *shape)).float()
        down, right = torch.randint(-2, 3, (2, 8))
        found = shifted(images, down, right, height)
        first = images.movedim((height, height + 1), (-2, -1)).reshape(8, -1, 6, 7)
        padded = F.pad(first, (2, 2, 2, 2), mode="replicate")
        for k in range(8):
            y, x = 2 + int(down[k]), 2 + int(right[k])
            crop = found[k].movedim((height, height + 1), (-2, -1)).reshape(-1, 6, 7)
            assert torch.equal(crop, padded[k, :, y : y + 6, x : x + 7])


class TestTransform:
    def test_each_row_has_a_shift_of_its_own_and_all_shifts_are_as_likely(self):
        torch.manual_seed(0)
        transform = RandomShift(spaces.Box(0, 255, (9, 9, 1), np.uint8), SCALAR, pad=2)
        image = torch.zeros(9, 9, 1, dtype=torch.uint8)
        image[4, 4] = 255
        found = transform.transform(rows(image.expand(50, 60, 9, 9, 1), 50, 60), None).observation
        places = found.reshape(-1, 81).argmax(1)
        counts = torch.zeros(81).index_add_(0, places, torch.ones(len(places))).reshape(9, 9)
        assert counts[2:7, 2:7].sum() == 3000 and (found.sum((2, 3, 4)) == 255).all()
        assert counts[2:7, 2:7].min() > 80 and counts[2:7, 2:7].max() < 160  # 120 are expected

    def test_only_images_change_and_only_in_training(self):
        torch.manual_seed(0)
        spec = {"camera": IMAGE, "speed": spaces.Box(-1, 1, (2,), np.float32)}
        transform = RandomShift(spec, SCALAR, pad=3)
        given = rows({"camera": torch.randint(0, 256, (3, 5, 10, 5, 1)).byte(), "speed": torch.randn(3, 5, 2)})
        found = transform.transform(given, None)
        assert not torch.equal(found.observation["camera"], given.observation["camera"])
        assert torch.equal(found.observation["speed"], given.observation["speed"])
        acting = nest.at(given, 0)
        assert transform(acting, None) == (acting, None)

    def test_without_images_it_is_refused(self):
        with pytest.raises(UsageError, match="RandomShift shifts images, but there is no image among"):
            RandomShift(spaces.Box(-1, 1, (2,), np.float32), SCALAR)

    def test_on_policy_it_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="RandomShift changes rows in training, but PPO needs them"):
            make(tmp_path, ppo(TORSO), [SHIFT]).start()


class TestRuns:
    def test_replay_keeps_images_without_shifts_and_updates_see_others(self, tmp_path):
        trainer = make(tmp_path / "run", dqn(TORSO), [SHIFT])
        trainer.train()
        stored = trainer.batches._collected.in_place()
        index = trainer.batches._collected.draw(64, 1)
        raw = stored._replace(transforms=None).windows(index).experience.time_step.observation
        one, other = (stored.windows(index).experience.time_step.observation for _ in range(2))
        assert set(raw.unique().tolist()) == {0, 255} and not torch.equal(one, other) and not torch.equal(one, raw)

    @pytest.mark.parametrize("kind", ["dqn", "sac"])
    def test_compiled_updates_are_those_of_the_plain_learner(self, tmp_path, kind, interpreted):
        """Both draw the same shifts, also at the updates that are compared."""
        found = []
        encoder = functools.partial(Encoder, image=functools.partial(SmallCNN, channels=(4,), output_size=8))
        sac = functools.partial(
            SAC, actor_encoder=encoder, critic=functools.partial(CriticEnsemble, encoder=encoder, layers=(8,))
        )
        for compile in (False, True):
            trainer = make(
                tmp_path / str(compile),
                dqn(TORSO) if kind == "dqn" else sac,
                [SHIFT, functools.partial(RewardScale, scale=2.0)],
                learner=functools.partial(Learner, learning_rate=1e-3, compile=compile),
                batches=functools.partial(
                    ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=40, updates_per_env_step=0.25,
                    max_chunk_size=1,
                ),
            )  # fmt: skip
            trainer.train()
            found.append((trainer, torch.cat([p.detach().reshape(-1) for p in trainer.algorithm.parameters()])))
        assert not found[1][0].learner.is_plain and found[0][0].learner.updates > 10
        assert torch.allclose(found[0][1], found[1][1], atol=1e-4)

    def test_diagnostics_of_compiled_updates_change_no_result(self, tmp_path, interpreted):
        found = []
        for diagnostics in ([], [Histograms()]):
            trainer = make(
                tmp_path / str(len(diagnostics)),
                dqn(TORSO),
                [SHIFT],
                learner=functools.partial(Learner, learning_rate=1e-3, compile=True),
                listeners=[Summaries(diagnostics=diagnostics, diagnostics_period=24)],
                summary_period=24,
                num_iterations=8,
            )
            trainer.train()
            found.append((*trainer.algorithm.parameters(), torch.get_rng_state()))
        assert all(torch.equal(one, other) for one, other in zip(*found))

    def test_held_out_rows_have_equal_shifts_in_each_summary(self, tmp_path):
        environment = functools.partial(make_environment, Catch, num_envs=2)
        trainer = make(tmp_path / "run", dqn(TORSO), [], num_iterations=1)
        episodes = trainer.evaluator(20, 4).generate_test_episodes(20)
        spaces_of = Spaces(trainer.environment.observation_space, trainer.environment.action_space)
        buffer = functools.partial(OfflineBuffer, [Arrays(episodes, spaces_of)], holdout_fraction=0.3)
        batches = functools.partial(OfflineBatches, buffer=buffer, batch_size=8)
        offline = make(tmp_path / "offline", dqn(TORSO), [SHIFT], environment=environment, batches=batches,
                       num_iterations=None, num_updates=8)  # fmt: skip
        offline.start()
        one = offline.batches.holdout().experience.time_step.observation
        torch.rand(3)  # as updates between two summaries draw
        before = torch.get_rng_state()
        other = offline.batches.holdout().experience.time_step.observation
        assert torch.equal(one, other) and torch.equal(torch.get_rng_state(), before)

    def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(self, tmp_path):
        def made(name):
            return make(tmp_path / name, dqn(TORSO), [SHIFT], unroll_length=13, num_iterations=8)

        whole = made("whole")
        whole.train()
        cut = made("cut")
        cut.start()
        for report in cut.iterate():
            if report.iterations == 3:  # row 39 is the last of the fourth episode, so only generators have a state
                break
        cut.save()
        cut.close()
        torch.manual_seed(99)
        resumed = made("cut")
        resumed.train()
        assert resumed.learner.updates == whole.learner.updates > 10
        for a, b in zip(resumed.algorithm.parameters(), whole.algorithm.parameters()):
            assert torch.equal(a, b)

    @pytest.mark.slow
    def test_workers_act_on_images_without_shifts(self, tmp_path):
        unroller = functools.partial(AsyncUnroller, num_workers=1, mode="lockstep")
        found = []
        for name in ("a", "b"):
            trainer = make(tmp_path / name, dqn(TORSO), [SHIFT], unroller=unroller, make_game=Catch)
            trainer.train()
            found.append(torch.cat([p.detach().reshape(-1) for p in trainer.algorithm.parameters()]))
        assert torch.equal(*found)
