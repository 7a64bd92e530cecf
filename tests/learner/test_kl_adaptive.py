"""Learning rates that follow the KL: the rule, and plain updates; `test_compiled` has the compiled ones."""

import functools

import pytest
import torch
from test_compiled import NETWORK, chunks_of, make, train
from test_learner import SGD, _chunk, _Regression

from alfish.algorithms.a2c import A2C
from alfish.algorithms.composition import RND, Composed
from alfish.algorithms.ppo import PPO
from alfish.data import LossInfo
from alfish.errors import UsageError
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam, RAdam, RMSprop
from alfish.learner.updates import Updates


def far_from(weight=0.0, **fields):
    """A regression whose KL is the mean of its rows, so a test says what is measured."""

    def calc_loss(self, experience, info):
        observation = experience.time_step.observation
        return LossInfo((self.weight - weight).expand_as(observation), kl=observation, **fields)

    return _Regression(calc_loss)


class TestRule:
    # factor 2, target 0.1, within [1, 8]
    @pytest.mark.parametrize(
        ("rate", "kl", "expected"),
        [
            (4, 0.21, 2), (4, 0.19, 4), (4, 0.1, 4), (4, 0.051, 4), (4, 0.049, 8), (4, 0, 8), (4, -1e-9, 8),
            (6, 0, 8), (8, 0, 8), (1.5, 9, 1), (1, 9, 1), (4, float("nan"), 4), (4, float("inf"), 2),
        ],
    )  # fmt: skip
    def test_learning_rate_falls_above_twice_the_target_and_rises_below_half(self, rate, kl, expected):
        led = KLAdaptive(4.0, target=0.1, factor=2.0, lowest=1.0, highest=8.0)
        assert led.next(torch.tensor(float(rate)), torch.tensor(float(kl))).item() == expected

    @pytest.mark.parametrize("settings", [{"factor": 1.0}, {"initial": 1.0}, {"initial": 1e-6}, {"lowest": 0.1}])
    def test_settings_that_cannot_be_met_are_refused(self, settings):
        with pytest.raises(UsageError, match=r"KLAdaptive\.(factor|initial) is"):
            KLAdaptive(**settings)


class TestUpdates:
    def test_an_update_takes_the_rate_that_its_own_rows_give(self):
        """Steps of SGD on a slope of 1, so the weight falls by the rates."""
        learner = Learner(far_from(), optimizer=SGD, learning_rate=KLAdaptive(1e-3, 0.1, 2.0, 5e-4, 3e-3))
        weights, rates = [0.0], []
        for kl in (0.0, 0.1, 0.0, 0.3, 0.3, 0.3, 0.3):
            rates.append(learner.train([_chunk([kl] * 4)])["learning_rate"])
            weights.append(learner._algorithm.weight.item())
        expected = [2e-3, 2e-3, 3e-3, 1.5e-3, 7.5e-4, 5e-4, 5e-4]
        assert rates == pytest.approx(expected)
        assert [a - b for a, b in zip(weights, weights[1:])] == pytest.approx(expected, rel=1e-4)

    def test_rows_that_do_not_train_do_not_count(self):
        learner = Learner(far_from(), learning_rate=KLAdaptive(1e-3))
        chunk = _chunk([0.01, 9.0])
        mask = torch.tensor([[True, False]]).expand_as(chunk.source.mask)
        assert learner.train([chunk._replace(source=chunk.source._replace(mask=mask))])[
            "learning_rate"
        ] == pytest.approx(1e-3)

    @pytest.mark.parametrize("on_cpu", [True, False])
    def test_a_skipped_update_leaves_the_rate(self, monkeypatch, on_cpu):
        learner = Learner(far_from(weight=torch.tensor(float("nan"))), learning_rate=KLAdaptive(1e-3), compile=False)
        learner._plain.on_cpu = on_cpu
        summary = learner.train([_chunk([0.0])])
        assert summary["learning_rate"] == pytest.approx(1e-3) and summary["nonfinite_updates"] == 1

    def test_a_stop_leaves_the_rate(self):
        algorithm = _Regression(lambda self, experience, info: LossInfo(info, kl=info, stop=torch.ones_like(info)))
        learner = Learner(algorithm, learning_rate=KLAdaptive(1e-3))
        assert learner.train([_chunk([0.0])]) == {}
        assert learner._plain.rates["all"].item() == pytest.approx(1e-3)

    def test_a_part_may_have_a_rate_of_its_own(self):
        algorithm = make("measured ppo")
        rates = {"all": KLAdaptive(1e-3), "network.critic_torso": 3e-4, "network.value_head": KLAdaptive(5e-4)}
        learner = Learner(algorithm, learning_rate=rates, compile=False)
        summary = train(algorithm, learner, [chunks_of("measured ppo", 4)])[0]
        names = [f"learning_rate/{name}" for name in ("all", "all/network.critic_torso", "all/network.value_head")]
        assert summary[names[1]] == 3e-4
        assert summary[names[2]] == pytest.approx(summary[names[0]] / 2) and summary[names[0]] != pytest.approx(1e-3)

    def test_evaluating_a_batch_leaves_the_rate(self):
        learner = Learner(far_from(), learning_rate=KLAdaptive(1e-3))
        learner.evaluate(_chunk([0.0]).source)
        assert learner._plain.rates["all"].item() == pytest.approx(1e-3)

    def test_an_algorithm_without_a_kl_is_refused(self):
        algorithm = A2C(*specs_of(make("ppo")))
        learner = Learner(algorithm, learning_rate=KLAdaptive())
        with pytest.raises(UsageError, match="is a KLAdaptive, and calc_loss of A2C returns no LossInfo.kl"):
            learner.train(chunks_of("a2c", 4))

    def test_a_kl_of_other_rows_is_refused(self):
        algorithm = _Regression(lambda self, experience, info: LossInfo(info, kl=info[:, :1]))
        with pytest.raises(UsageError, match=r"LossInfo.kl of _Regression has shape \(1, 1\)"):
            Learner(algorithm, learning_rate=KLAdaptive()).train([_chunk([0.0, 1.0])])


class TestPPO:
    def test_kl_is_exact_and_relative_to_the_rollout_policy(self):
        algorithm = make("measured ppo")
        learner = Learner(algorithm, learning_rate=KLAdaptive(1e-2), compile=False)
        (chunk,) = chunks_of("measured ppo", 4)  # of the same initial weights
        source = chunk.source
        learner.train([chunk])
        means, _ = learner._plain.means(source)
        with torch.no_grad():
            policy = algorithm.train_step(source.experience, None).info.policy
        kl = source.experience.info.policy.kl(policy)[source.mask]
        assert means.kl.item() == pytest.approx(kl.mean().item(), rel=1e-5) and means.kl > 1e-4

    def test_the_kl_is_measured_only_where_it_is_followed_or_limited(self):
        algorithm = make("ppo")
        assert not algorithm.measures_kl and make("stopping ppo").measures_kl
        Learner(algorithm, learning_rate=1e-3)
        assert not algorithm.measures_kl
        composed = Composed(*specs_of(algorithm), algorithm=functools.partial(PPO, network=NETWORK), rewards=[RND])
        rates = {"all": KLAdaptive(), "rnd": 1e-4}
        Learner(composed, learning_rate=rates)
        assert composed.algorithm.measures_kl


def specs_of(algorithm):
    return algorithm.observation_spec, algorithm.action_spec, algorithm.reward_spec


@pytest.mark.parametrize("optimizer", [Adam, RAdam, RMSprop, functools.partial(Adam, weight_decay=0.1)])
def test_proportional_coefficients_follow_the_learning_rate(optimizer):
    made = optimizer([torch.zeros(3)])
    for _ in range(8):
        assert made.scaled(made.coefficients(1.0), 0.25) == made.coefficients(0.25)
        made.count()


def test_an_optimizer_whose_proportions_are_wrong_is_not_compiled(interpreted, caplog):
    class Reversed(RMSprop):
        in_proportion = ()

    learner = Learner(far_from(), optimizer=Reversed, learning_rate=KLAdaptive(), compile=True)
    learner.train([_chunk([0.0])])
    assert learner.is_plain and "`in_proportion` of Reversed does not name the coefficients" in caplog.text


def on_a_device(monkeypatch, **settings):
    """A learner whose updates are those of a GPU."""
    with monkeypatch.context() as patch:
        init = Updates.__init__

        def made(self, *arguments):
            init(self, *arguments)
            self.on_cpu = False

        patch.setattr(Updates, "__init__", made)
        return Learner(far_from(), **settings)


@pytest.mark.parametrize("optimizer", [Adam, RMSprop, RAdam, SGD])
def test_device_updates_equal_cpu_updates(monkeypatch, optimizer):
    settings = {"optimizer": optimizer, "learning_rate": KLAdaptive(1e-3), "compile": False}
    learners = Learner(far_from(), **settings), on_a_device(monkeypatch, **settings)
    for kl in (0.0, 0.0, 0.03, 0.01):
        here, there = (learner.train([_chunk([kl] * 2)]) for learner in learners)
        assert here["learning_rate"] == pytest.approx(there["learning_rate"])
    assert learners[0]._algorithm.weight.item() == pytest.approx(learners[1]._algorithm.weight.item(), rel=1e-5)


class TestResume:
    @pytest.mark.parametrize("rate", [torch.tensor(-1.0), torch.tensor(float("nan")), torch.ones(2) * 1e-3])
    def test_a_rate_that_no_run_has_is_refused(self, rate):
        learner = Learner(far_from(), learning_rate=KLAdaptive())
        state = learner.state_dict()
        with pytest.raises(ValueError, match="learning rate is"):
            learner.load_state_dict({**state, "rates": {"all": rate}})

    @pytest.mark.parametrize("bounds, expected", [({"highest": 5e-3}, 5e-3), ({"lowest": 2e-2, "highest": 1e-1}, 2e-2)])
    def test_a_rate_outside_of_new_bounds_continues_at_the_nearest_one(self, bounds, expected):
        before = Learner(far_from(), learning_rate=KLAdaptive(1e-2)).state_dict()
        learner = Learner(far_from(), learning_rate=KLAdaptive(bounds.get("lowest", 1e-3), **bounds))
        learner.load_state_dict(before)
        assert learner._plain.rates["all"].item() == pytest.approx(expected)

    def test_a_state_without_rates_begins_with_the_initial_one(self):
        learner = Learner(far_from(), learning_rate=KLAdaptive(2e-3))
        learner.load_state_dict(Learner(far_from(), learning_rate=1e-3).state_dict())
        assert learner._plain.rates["all"].item() == pytest.approx(2e-3)
