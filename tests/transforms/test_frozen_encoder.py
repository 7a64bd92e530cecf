"""Encoders whose features are stored in place of images."""

import contextlib
import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

import alfish
from alfish import nest, specs
from alfish.algorithms.acting import changing_tensors
from alfish.algorithms.appo import APPO
from alfish.algorithms.bc import BC
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, StepType, in_line
from alfish.environments import EncodedEnvironment, TensorEnvironment, VectorEnvironment, make_environment
from alfish.environments.sequential import SequentialVectorEnv
from alfish.environments.toy import Catch, TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, OfflineBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import AverageReturn
from alfish.networks import MLP, ActorCritic, Encoder, QNetwork, SmallCNN, Torso
from alfish.offline import open_source
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, FrozenEncoder, ObservationNormalizer, Transform, Transforms
from alfish.unrollers import AsyncUnroller, SyncUnroller

CNN = functools.partial(SmallCNN, channels=(4,), output_size=8)
IMAGE = spaces.Box(0, 255, (10, 5, 1), np.uint8)
NESTED = {"camera": IMAGE, "goal": spaces.Discrete(3), "speed": spaces.Box(-1, 1, (2,), np.float32)}
SCALAR = specs.reward_spec()
SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, encoder=functools.partial(Encoder, image=CNN), mlp=SMALL)
FEATURES = functools.partial(Torso, mlp=SMALL)
FROZEN = functools.partial(FrozenEncoder, encoder=CNN)
REPLAY = functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=40, updates_per_env_step=0.1)


def dqn(torso):
    return functools.partial(DQN, q_network=functools.partial(QNetwork, torso=torso))


def ppo(torso, kind=PPO):
    return functools.partial(kind, network=functools.partial(ActorCritic, actor_torso=torso, shared_torso=True))


def make(root_dir, algorithm, transforms=(), make_game=Catch, **settings):
    on_policy = algorithm.func.on_policy
    return Trainer(
        root_dir,
        **{
            "algorithm": algorithm,
            "environment": functools.partial(make_environment, make_game, num_envs=3),
            "transforms": transforms,
            "batches": functools.partial(EpochBatches, num_epochs=1, minibatch_size=8) if on_policy else REPLAY,
            "listeners": [CheckpointSaver()],
            "unroll_length": 8,
            "num_iterations": 6,
            "device": "cpu",
            **settings,
        },
    )


@pytest.fixture(scope="module", params=["dqn", "ppo"])
def inside(request, tmp_path_factory):
    """A finished run with the encoder in its network, and the algorithm and place of its torso."""
    kind, place = {"dqn": (dqn, "q_network.torso"), "ppo": (ppo, "network.actor_torso")}[request.param]
    trainer = make(tmp_path_factory.mktemp("runs") / "inside", kind(TORSO))
    trainer.train()
    return trainer, kind, place


def twin(inside, root_dir, **settings):
    """A trainer that has the same networks, with the encoder in front of them."""
    trainer, kind, place = inside
    run, (root, _) = trainer.directory.path, place.split(".")
    names = {name.rpartition(".")[0] for name in trainer.algorithm.state_dict() if name.startswith(f"{root}.")}
    parts = {name: str(run) for name in names if "encoder" not in name}
    encoder = functools.partial(FROZEN, source=f"{place}.encoder.encoders.0@{run}")
    return make(root_dir, kind(FEATURES), [encoder], initial_parts=parts, **settings)


def steps(algorithm, rows):
    with torch.no_grad():
        return algorithm.predict_step(rows, algorithm.initial_state(3))


class TestAFrozenEncoder:
    def test_only_the_encoded_leaf_is_replaced_with_features(self):
        transform = FrozenEncoder(NESTED, SCALAR, CNN)
        observation = nest.map(lambda leaf: torch.from_numpy(np.array([leaf.sample() for _ in range(3)])), NESTED)
        encoded = transform.encode(observation)
        assert encoded["goal"] is observation["goal"] and encoded["speed"] is observation["speed"]
        assert torch.equal(encoded["camera"], transform.encoder(observation["camera"]).detach())
        assert transform.observation_spec["camera"] == spaces.Box(-np.inf, np.inf, (8,), np.float32)
        assert not encoded["camera"].requires_grad and observation["camera"].dtype == torch.uint8

    def test_uses_the_default_encoder_for_the_size_of_an_image(self):
        assert isinstance(FrozenEncoder(IMAGE, SCALAR).encoder, SmallCNN)

    def test_any_module_can_encode_any_leaf(self):
        def factory(space):
            return nn.Sequential(nn.Flatten(), nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))

        transform = FrozenEncoder(NESTED, SCALAR, factory, leaf="speed")
        transforms = Transforms([lambda *_: transform], NESTED, SCALAR).train()
        observation = {"camera": None, "goal": torch.zeros(4), "speed": torch.randn(4, 2)}
        before = {name: value.clone() for name, value in transform.state_dict().items()}
        features = [transforms.encode({**observation, "camera": torch.zeros(4, 10, 5, 1)})["speed"] for _ in range(2)]
        assert torch.equal(*features), "neither dropout nor batches change the features"
        assert all(torch.equal(value, before[name]) for name, value in transform.state_dict().items())
        assert not any(parameter.requires_grad for parameter in transform.parameters())

    @pytest.mark.parametrize(
        "spec, settings, words",
        [
            ({"a": IMAGE, "b": IMAGE}, {}, r"2 images; set FrozenEncoder.leaf to one of \['a', 'b'\]"),
            (NESTED["speed"], {}, "no encoder for Box.*set FrozenEncoder.encoder"),
            ({"a": NESTED["speed"], "b": NESTED["speed"]}, {}, "0 images; set FrozenEncoder.leaf"),
            (NESTED, {"leaf": "left"}, r"leaf is 'left'; the leaves of the observation are \['camera'"),
            (NESTED, {"leaf": "speed"}, "no encoder for Box.*set FrozenEncoder.encoder"),
            (IMAGE, {"encoder": lambda _: nn.Identity()}, r"returns \[1, 10, 5, 1\] .*it must be \[1, F\]"),
        ],
    )
    def test_mistakes_are_reported_in_one_sentence(self, spec, settings, words):
        with pytest.raises(UsageError, match=words):
            FrozenEncoder(spec, SCALAR, **settings)

    def test_stands_before_whatever_changes_the_observation(self):
        class Shift(Transform):
            def transform(self, time_step, state):
                return time_step._replace(observation=time_step.observation.roll(1, -2))

        with pytest.raises(UsageError, match="FrozenEncoder encodes .* put it first in Trainer.transforms"):
            Transforms([Shift, FROZEN], IMAGE, SCALAR)
        with pytest.raises(UsageError, match="FrozenEncoder encodes .* put it first"):
            Transforms([FrameStack, FROZEN], IMAGE, SCALAR)


class TestPolicies:
    def test_act_as_with_the_encoder_in_the_network(self, inside, tmp_path):
        """The same outputs and memory of features, to float error; each weight is bit-equal to its source."""
        there = inside[0]
        here = twin(inside, tmp_path / "run")
        here.start()
        rows = nest.tensors(here.environment.reset())
        stored = rows._replace(observation=here.transforms.encode(rows.observation))
        seen, _ = here.transforms(stored, here.transforms.initial_state(3))
        expected, found = steps(there.algorithm, rows), steps(here.algorithm, seen)
        assert torch.equal(found.output, expected.output)
        features = there.algorithm.get_submodule(inside[2])(rows, None)[0]
        mine = here.algorithm.get_submodule(inside[2])(seen, None)[0]
        assert torch.allclose(mine, features, atol=1e-6)
        encoder = there.algorithm.get_submodule(f"{inside[2]}.encoder.encoders.0").state_dict()
        own = here.transforms.encoders[0].encoder.state_dict()
        assert encoder.keys() == own.keys() and all(torch.equal(own[name], encoder[name]) for name in own)
        here.close()

    def test_saved_policies_accept_raw_images(self, inside, tmp_path):
        trainer = twin(inside, tmp_path / "run", learner=functools.partial(Learner, learning_rate=0.0))
        trainer.train()
        policies = alfish.load(tmp_path / "run"), alfish.load(inside[0].directory.path)
        images = np.stack([Catch().reset(seed=seed)[0] for seed in range(9)])
        assert policies[0].observation_space == IMAGE
        assert np.array_equal(*(policy.act(images, batched=True) for policy in policies))
        episodes = []
        for each in (trainer, inside[0]):
            with contextlib.closing(each.evaluator(5)) as evaluator:
                episodes.append(evaluator.generate_test_episodes(5, seed=7))
        for one, other in zip(*episodes, strict=True):
            assert one.observations.dtype == np.uint8 and np.array_equal(one.observations, other.observations)
            assert np.array_equal(one.actions, other.actions)


class Counting(nn.Module):
    """Two features of an image: its sum and the number of rows that were encoded so far."""

    def __init__(self, space):
        super().__init__()
        self.num_rows = 0

    def forward(self, image):
        self.num_rows += len(image)
        return torch.stack([image.flatten(1).float().sum(1), torch.full((len(image),), 7.0)], 1)


class Uniform(RLAlgorithm):
    """Acts at random, whatever it observes."""

    on_policy = False

    def rollout_step(self, time_step, state):
        return AlgStep(specs.sample(self.action_spec, len(time_step.step_type)), state)

    def train_step(self, experience, state):
        raise NotImplementedError

    def calc_loss(self, experience, info):
        raise NotImplementedError


class TestRows:
    def test_hold_features_and_each_row_is_encoded_once(self, tmp_path):
        trainer = make(tmp_path / "run", dqn(FEATURES), [functools.partial(FrozenEncoder, encoder=Counting)])
        counter = trainer.transforms.encoders[0].encoder
        counter.num_rows = 0
        trainer.train()
        num_rows = 6 * 8 * 3
        assert counter.num_rows == num_rows + 3, "and the row to act from next"
        stored = trainer.batches.buffer.read(torch.arange(3), torch.arange(20).unsqueeze(1).expand(20, 3))
        assert stored.time_step.observation.shape == (20, 3, 2)
        assert (stored.time_step.observation[..., 1] == 7).all()

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
    def test_rows_have_image_features_in_every_reset_mode(self, mode):
        def unrolled(transforms):
            torch.manual_seed(0)
            if mode == AutoresetMode.SAME_STEP:
                env = gymnasium.vector.SyncVectorEnv([Catch] * 3, autoreset_mode=mode)
            else:
                env = SequentialVectorEnv([Catch] * 3, mode)
            environment = VectorEnvironment(env, [1, 2, 3])
            chain = Transforms(transforms, environment.observation_spec, SCALAR)
            algorithm = Uniform(chain.observation_spec, environment.action_spec, SCALAR)
            unroller = SyncUnroller(environment, algorithm, chain)
            torch.manual_seed(0)
            rows = [in_line(nest.tensors(unroller.unroll(15))).experience.time_step for _ in range(3)]
            unroller.close()
            return chain, rows

        _, images = unrolled([])
        chain, features = unrolled([FROZEN])
        for raw, encoded in zip(images, features, strict=True):
            assert torch.equal(raw.step_type, encoded.step_type) and torch.equal(raw.reward, encoded.reward)
            flat = chain.encode(raw.observation.flatten(0, 1)).view(encoded.observation.shape)
            is_row = encoded.step_type != StepType.PAD
            assert torch.allclose(flat[is_row], encoded.observation[is_row], atol=1e-6)
            assert (raw.step_type == StepType.LAST).any() and (raw.step_type == StepType.FIRST).any()

    def test_rebuilt_environments_have_encoded_rows(self):
        raw = VectorEnvironment(SequentialVectorEnv([Catch] * 3, AutoresetMode.NEXT_STEP), [1, 2, 3])
        transform = FROZEN(IMAGE, SCALAR)
        environment = EncodedEnvironment(
            raw, lambda rows: transform.encode(nest.tensors(rows)), transform.observation_spec
        )
        environment.reset()
        before = environment.step(np.zeros(3, np.int64))
        after = environment.replace(before, np.array([False, True, False]))
        assert after.step_type.tolist() == [StepType.MID, StepType.FIRST, StepType.MID]
        assert np.array_equal(after.observation[[0, 2]], before.observation[[0, 2]])
        starts = transform.encode(torch.from_numpy(np.stack([Catch().reset(seed=k)[0] for k in range(60)]))).numpy()
        assert np.abs(starts - after.observation[1]).max(1).min() < 1e-5
        assert (environment.num_envs, environment.broken, environment.observation_spec.shape) == (3, None, (8,))
        environment.broken = np.array([True, False, False])
        assert raw.broken[0]

    def test_torch_environments_are_encoded_on_their_device(self):
        environment = TensorEnvironment(TensorPointMass(num_envs=3), 0)
        encoder = functools.partial(FrozenEncoder, encoder=lambda space: nn.Linear(space.shape[0], 6), leaf="")
        chain = Transforms([encoder], environment.observation_spec, SCALAR)
        algorithm = Uniform(chain.observation_spec, environment.action_spec, SCALAR)
        unroller = SyncUnroller(environment, algorithm, chain)
        observation = unroller.unroll(5).time_step.observation
        assert isinstance(observation, torch.Tensor) and observation.shape[1:] == (3, 6)

    def test_later_transforms_see_features(self, tmp_path):
        chain = [FROZEN, functools.partial(FrameStack, num_frames=2), ObservationNormalizer]
        trainer = make(tmp_path / "run", dqn(FEATURES), chain)
        trainer.train()
        assert trainer.transforms.observation_spec.shape == (16,)
        assert trainer.transforms.stored_observation_spec.shape == (8,)
        assert trainer.transforms.raw_observation_spec.shape == (10, 5, 1)
        assert isinstance(alfish.load(tmp_path / "run").act(Catch().reset(seed=0)[0]), (int, np.integer))

    def test_a_resumed_run_uses_its_saved_encoder(self, tmp_path):
        """The source is not read again, and what the constructor draws does not matter."""
        first = make(tmp_path / "run", dqn(FEATURES), [FROZEN], seed=1)
        first.start()
        next(first.iterate())
        first.save()
        first.close()
        resumed = make(tmp_path / "run", dqn(FEATURES), [functools.partial(FROZEN, source="x@runs/gone")], seed=2)
        resumed.start()
        resumed.close()
        image = torch.from_numpy(Catch().reset(seed=0)[0][None])
        assert torch.equal(resumed.transforms.encode(image), first.transforms.encode(image))
        for one, other in ((first.transforms, resumed.transforms), (first.batches.buffer, resumed.batches.buffer)):
            leaves = nest.leaves(one.state_dict()), nest.leaves(other.state_dict())
            assert all(torch.equal(a, b) for a, b in zip(*leaves) if isinstance(a, torch.Tensor))

    def test_worker_losses_of_episodes_are_counted(self, tmp_path, inside):
        """The first images of all episodes but for the ball's column are equal, and so are their features."""
        workers = functools.partial(AsyncUnroller, num_workers=1, mode="lockstep")
        source = f"{inside[2]}.encoder.encoders.0@{inside[0].directory.path}"
        encoder = functools.partial(FROZEN, source=source)
        trainer = make(tmp_path / "run", ppo(FEATURES, APPO), [encoder], unroller=workers)
        trainer.start()
        observation = nest.tensors(trainer.unroller.unroll(8)).time_step.observation
        trainer.close()
        assert observation.shape == (9, 3, 8)
        images = torch.from_numpy(np.stack([Catch().reset(seed=seed)[0] for seed in range(60)]))
        known = trainer.transforms.encode(images)
        distance = (observation[0].unsqueeze(1) - known).abs().amax(-1).amin(1)
        assert (distance < 1e-5).all()

    def test_frozen_encoders_are_not_published_to_workers(self):
        chain = Transforms([FROZEN, ObservationNormalizer], IMAGE, SCALAR)
        algorithm = dqn(FEATURES)(chain.observation_spec, spaces.Discrete(3), SCALAR)
        published = {id(tensor) for tensor in changing_tensors(algorithm, chain)}
        assert not published & {id(parameter) for parameter in chain.encoders[0].parameters()}
        assert published >= {id(tensor) for tensor in (*algorithm.parameters(), *chain.others[0].buffers())}


class TestRefused:
    def test_with_recorded_data(self, tmp_path):
        batches = functools.partial(OfflineBatches, dict)  # which is not called
        trainer = make(tmp_path / "run", functools.partial(BC), [FROZEN], batches=batches)
        with pytest.raises(UsageError, match=r"FrozenEncoder encodes rows when they are collected.*frozen_parts"):
            trainer.start()
        trainer.close()

    def test_as_a_source_of_recorded_episodes(self, tmp_path):
        make(tmp_path / "run", dqn(FEATURES), [FROZEN]).train()
        with pytest.raises(UsageError, match="stores 8 features of an encoder instead of the observation; record"):
            list(open_source(f"run:{tmp_path / 'run'}").episodes())

    def test_with_a_metric_that_reads_images(self, tmp_path):
        class Brightness(AverageReturn):
            reads_observations = True

        with pytest.raises(UsageError, match="a metric reads observations, but FrozenEncoder replaces them"):
            make(tmp_path / "run", dqn(FEATURES), [FROZEN], extra_metrics=[Brightness(name="brightness")])

    def test_training_mode_is_set_on_request(self, tmp_path):
        learner = functools.partial(Learner, learning_rate={"all": 1e-3, "transforms": 1e-5})
        with pytest.raises(UsageError, match=r"DQN has the groups \['all'\], and has no part 'transforms'"):
            make(tmp_path / "run", dqn(FEATURES), [FROZEN], learner=learner)

    def test_an_encoder_of_other_images(self, inside, tmp_path):
        source = f"{inside[2]}.encoder.encoders.0@{inside[0].directory.path}"
        encoder = functools.partial(FrozenEncoder, encoder=functools.partial(CNN, output_size=9), source=source)
        trainer = make(tmp_path / "run", dqn(FEATURES), [encoder])
        with pytest.raises(UsageError, match=r"FrozenEncoder.source: .*body.1.weight is \[9, 200\] float32 in this"):
            trainer.start()
        trainer.close()
