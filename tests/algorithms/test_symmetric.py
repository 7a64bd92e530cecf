import pickle
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_learning_toys import PPO_SETTINGS, _network, _trainer
from test_ppo import _batch, _chunks, _ppo, _unroll

from alfish import specs
from alfish.algorithms.symmetric import Mirror, SymmetricPPO
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.learner.learner import Learner
from alfish.networks import GRU, ActorCritic, BetaHead, PolicyHead, Torso

OBSERVATION = Mirror([1, 0, 2, 3], [1, 1, -1, 1])
ACTION = Mirror([1, 0], [-1, -1])


def symmetric(action="box", mirror_action=ACTION, **settings):
    plain = _ppo(action)
    torch.manual_seed(0)
    return SymmetricPPO(
        plain.observation_spec, plain.action_spec, plain.reward_spec, mirror_observation=OBSERVATION,
        mirror_action=mirror_action, **settings,
    )  # fmt: skip


class TestMirror:
    def test_entries_change_places_and_signs(self):
        assert OBSERVATION(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[2, 1, -3, 4]]
        assert Mirror([1, 0])(torch.tensor([5, 6])).tolist() == [6, 5]
        assert Mirror(signs=[1, -1])(torch.tensor([5, 6])).tolist() == [5, -6]

    @pytest.mark.parametrize(
        ("indices", "signs", "words"),
        [
            ([1, 2, 0], None, "must have 0 for entry 1"),
            ([1, 0], [1, -1], "with the same sign"),
            ([0, 0], None, "each index from 0 to 1 once"),
            ([0, 1], [1], "a sign of 1 or -1 for each"),
            ([0, 1], [1, 0], "a sign of 1 or -1 for each"),
        ],
    )
    def test_what_is_not_undone_by_mirroring_again_is_refused(self, indices, signs, words):
        with pytest.raises(UsageError, match=words):
            Mirror(indices, signs)

    @pytest.mark.parametrize("indices", [None, []])
    def test_a_mirror_needs_indices_or_signs(self, indices):
        with pytest.raises(UsageError, match="Mirror has neither indices nor signs; set one of them, or both"):
            Mirror(indices)

    def test_a_vector_of_another_length_is_refused(self):
        with pytest.raises(UsageError, match="a Mirror for vectors of 2 entries got a vector of 3; set Mirror.indices"):
            ACTION(torch.zeros(3))


class TestLoss:
    def test_loss_is_the_mean_over_rows_and_their_mirror_images(self):
        algorithm = symmetric()
        batch = _batch(algorithm, _unroll(algorithm))
        rows = batch.experience
        image = rows._replace(
            time_step=rows.time_step._replace(observation=OBSERVATION(rows.time_step.observation)),
            action=ACTION(rows.action),
        )
        plain = _ppo("box")
        plain.load_state_dict(algorithm.state_dict())
        each = [plain.calc_loss(one, plain.train_step(one, None).info).loss for one in (rows, image)]
        found = algorithm.calc_loss(rows, algorithm.train_step(rows, None).info)
        assert torch.allclose(found.loss, (each[0] + each[1]) / 2)
        assert not torch.allclose(each[0], each[1])

    def test_the_mirror_loss_is_the_squared_distance_of_the_means(self):
        algorithm = symmetric(augments=False, mirror_loss_coef=0.5)
        rows = _batch(algorithm, _unroll(algorithm)).experience
        info = algorithm.train_step(rows, None).info
        found, plain = algorithm.calc_loss(rows, info), _ppo("box")
        expected = (info.image.policy.mean - ACTION(info.own.policy.mean)).square().mean(-1)
        without = plain.calc_loss(rows, info.own).loss
        assert torch.allclose(found.loss, without + 0.5 * expected) and expected.mean() > 1e-5
        (gradient,) = torch.autograd.grad(found.extra["mirror_loss"].sum(), info.own.policy.mean, allow_unused=True)
        assert gradient is None, "the mean of the row is a target"

    def test_beta_distributions_have_a_mirror_loss(self):
        network = partial(ActorCritic, policy_head=partial(PolicyHead, box=BetaHead))
        algorithm = symmetric(augments=False, mirror_loss_coef=0.5, network=network)
        rows = _batch(algorithm, _unroll(algorithm)).experience
        info = algorithm.train_step(rows, None).info
        means = [2 * torch.distributions.Beta(*one.policy).mean - 1 for one in (info.image, info.own)]
        expected = (means[0] - ACTION(means[1])).square().mean(-1)
        assert torch.allclose(algorithm.calc_loss(rows, info).extra["mirror_loss"], expected, atol=1e-6)

    def test_a_limit_of_the_kl_reads_the_rows_themselves(self):
        algorithm = symmetric(target_kl=0.01)
        rows = _batch(algorithm, _unroll(algorithm)).experience
        found = algorithm.calc_loss(rows, algorithm.train_step(rows, None).info)
        assert found.kl.abs().max() < 1e-5 and torch.allclose(found.stop, found.kl - 0.015)

    def test_choices_are_mirrored_by_a_function(self):
        algorithm = symmetric("discrete", mirror_action=lambda action: 2 - action)
        rows = _batch(algorithm, _unroll(algorithm)).experience
        info = algorithm.train_step(rows, None).info
        assert torch.equal(info.mirrored.action, 2 - rows.action)

    def test_parts_of_a_dict_have_mirrors_of_their_own(self):
        space = spaces.Dict(joints=spaces.Box(-1, 1, (2,), np.float32), height=spaces.Box(-1, 1, (1,), np.float32))
        made = SymmetricPPO(
            specs.observation_spec(space), specs.action_spec(spaces.Box(-1, 1, (2,), np.float32)), specs.reward_spec(),
            mirror_observation={"joints": ACTION}, mirror_action=ACTION,
        )  # fmt: skip
        rows = {"joints": torch.tensor([[1.0, 2.0]]), "height": torch.tensor([[3.0]])}
        image = made._mirror_observation(rows)
        assert image["joints"].tolist() == [[-2, -1]] and image["height"].tolist() == [[3]]
        made = pickle.loads(pickle.dumps(made))  # for workers
        assert torch.equal(made._mirror_observation(rows)["joints"], image["joints"])

    def test_mirrors_move_with_the_algorithm_and_are_not_saved(self):
        algorithm = symmetric()
        assert algorithm.state_dict().keys() == _ppo("box").state_dict().keys()
        buffers = dict(algorithm.named_buffers())
        assert {"_mirror_observation._indices", "_mirror_action._signs"} < buffers.keys()

    def test_compiled_updates_equal_the_plain_learner(self, interpreted):
        found = []
        for compile in (False, True):
            algorithm = symmetric(mirror_loss_coef=0.5)
            learner = Learner(algorithm, learning_rate=1e-3, compile=compile)
            learner.train(_chunks(algorithm, _unroll(algorithm), 2, 16))
            found.append(torch.cat([parameter.reshape(-1) for parameter in algorithm.parameters()]))
        assert not learner.is_plain
        assert torch.allclose(*found, atol=1e-4)


MEMORY = partial(ActorCritic, actor_torso=partial(Torso, memory=GRU))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"augments": False}, "is the same as PPO; set augments"),
        ({"network": MEMORY}, "the policy has a memory"),
        ({"action": "discrete", "mirror_action": lambda a: 2 - a, "mirror_loss_coef": 1.0}, "is for Box actions"),
        ({"mirror_action": lambda action: action + 1}, "SymmetricPPO.mirror_action does not mirror"),
        ({"mirror_action": lambda action: action[..., :1]}, "SymmetricPPO.mirror_action does not mirror"),
        ({"mirror_action": {"left": ACTION}}, "SymmetricPPO.mirror_action names 'left'"),
        (
            {"action": "discrete", "mirror_action": Mirror(signs=[1] * 4)},
            "mirror_action: a Mirror for vectors of 4 entries got",
        ),
        ({"mirror_action": Mirror}, r"mirror_action has a class, but .*, such as @left_right/Mirror\(\)"),
        ({"action": "discrete", "mirror_action": torch.neg}, "mirror_action does not mirror: it leads out of Discrete"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        symmetric(**settings)


def test_one_mirror_for_several_leaves_is_refused():
    plain = _ppo("box")
    words = r"mirror_action is one Mirror, but it must be a dict .*; the leaves are \['arm', 'leg'\]"
    with pytest.raises(UsageError, match=words):
        action_spec = {"arm": plain.action_spec, "leg": plain.action_spec}
        SymmetricPPO(plain.observation_spec, action_spec, plain.reward_spec, mirror_observation=OBSERVATION,
                     mirror_action=ACTION)  # fmt: skip


def test_checking_mirrors_draws_no_random_numbers():
    states = []
    for make in (symmetric, partial(_ppo, "box")):
        make()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class OneSide(gymnasium.Env):
    """Of two numbers, the first is always the larger one, and the action is to be 0.5; its image would be -0.5."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action):
        self._step += 1
        reward = 1 - abs(float(action[0]) - 0.5)
        return self._observe(), reward, self._step >= 4, False, {}

    def _observe(self):
        self._numbers = np.sort(self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32))[::-1].copy()
        return self._numbers


@pytest.mark.parametrize("settings", [{}, {"augments": False, "mirror_loss_coef": 10.0}, None])
def test_one_side_learns_from_its_mirror_image(tmp_path, settings):
    make = {"network": _network(), "gamma": 0.0, "lambda_": 0.0}
    algorithm = PPO_SETTINGS["algorithm"].func if settings is None else SymmetricPPO
    if settings is not None:
        make |= {"mirror_observation": Mirror([1, 0]), "mirror_action": Mirror([0], [-1]), **settings}
    learner = partial(Learner, learning_rate=1e-2, max_grad_norm=0.5)
    trainer = _trainer(
        tmp_path, OneSide, 0, 15, **PPO_SETTINGS | {"algorithm": partial(algorithm, **make), "learner": learner}
    )
    trainer.train()
    torch.manual_seed(1)
    numbers = (torch.rand(256, 2) - 0.5).sort(-1, descending=True).values + torch.tensor([0.1, -0.1])
    steps = TimeStep(torch.full((256,), StepType.FIRST), None, None, numbers, None, None)
    with torch.no_grad():
        mean = trainer.algorithm.predict_step(steps, None).output
        image = trainer.algorithm.predict_step(steps._replace(observation=numbers.flip(-1)), None).output
    trainer.close()
    asymmetry, size = (mean + image).abs().mean(), mean.abs().mean()
    print(asymmetry, size)
    assert size > 0.2
    assert (asymmetry < 0.25 * size) == (settings is not None), f"{asymmetry} of {size}"
