"""The learner, driven by algorithms made for the purpose: a loss per row, a few parameters, nothing else."""

import copy
import gc
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from alfish import specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Batch, Experience, LossInfo, StepType, TimeStep
from alfish.errors import RunError, UsageError
from alfish.learner.batches import EpochBatches, Minibatches
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam, RMSprop, TorchOptimizer
from alfish.learner.updates import Updates
from alfish.parameters.schedules import Linear, Steps
from alfish.transforms import Transforms

SGD = partial(TorchOptimizer, optimizer=torch.optim.SGD)


class _Regression(RLAlgorithm):
    """Half the squared distance of `weight` to the row's observation; `calc_loss` may be replaced."""

    on_policy = True

    def __init__(self, calc_loss=None):
        super().__init__({}, {}, specs.reward_spec())
        self.weight = nn.Parameter(torch.zeros(()))
        self.after_updates = 0
        self._calc_loss = calc_loss

    def rollout_step(self, time_step, state):
        return AlgStep()

    def train_step(self, experience, state):
        return AlgStep(info=0.5 * (self.weight - experience.time_step.observation).square())

    def calc_loss(self, experience, info):
        return LossInfo(info) if self._calc_loss is None else self._calc_loss(self, experience, info)

    def after_update(self):
        self.after_updates += 1


class _ActorCritic(RLAlgorithm):
    """Two groups and a graph that both losses share: the actor's features go into the critic, and the other way."""

    on_policy = True

    def __init__(self, losses=lambda actor, critic: {"actor": actor, "critic": critic}, scalar=None):
        super().__init__({}, {}, specs.reward_spec())
        self.actor, self.critic = nn.Linear(1, 1), nn.Linear(1, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self._losses, self._scalar = losses, scalar

    def parameter_groups(self):
        return {"actor": self.actor.parameters(), "critic": self.critic.parameters()}

    def rollout_step(self, time_step, state):
        return AlgStep()

    def train_step(self, experience, state):
        action = self.actor(experience.time_step.observation[..., None])
        return AlgStep(info=(action, self.critic(action)))

    def calc_loss(self, experience, info):
        action, q = (leaf.squeeze(-1) for leaf in info)
        return LossInfo(self._losses(-q, (q - 3 * action).square()), self._scalar)


def _chunk(observation, mask=None, weight=None, index=None):
    """Rows `[1, N]`, all of them in one minibatch unless `index` says otherwise."""
    observation = torch.as_tensor(observation, dtype=torch.float32).view(1, -1)
    size = observation.shape[1]
    mask = torch.ones(1, size, dtype=torch.bool) if mask is None else torch.tensor([mask])
    time_step = TimeStep(torch.ones(1, size, dtype=torch.int32), observation, observation, observation, None, None)
    batch = Batch(Experience(time_step, None, None, None, None), mask, weight=weight)
    return Minibatches(batch, torch.arange(size)[None] if index is None else torch.tensor(index))


def _after(algorithm, chunk, **settings):
    """The weight after one gradient step with learning rate 1: minus its gradient."""
    Learner(algorithm, optimizer=SGD, **{"learning_rate": 1.0} | settings).train([chunk])
    return algorithm.weight.item()


class TestReduction:
    def test_the_loss_is_the_mean_over_rows(self):
        assert _after(_Regression(), _chunk([1, 2, 6])) == pytest.approx(3)

    def test_rows_that_do_not_train_do_not_count(self):
        assert _after(_Regression(), _chunk([1, 1000, 6], [True, False, True])) == pytest.approx(3.5)

    def test_a_fully_masked_batch_changes_nothing(self):
        assert _after(_Regression(), _chunk([1, 2], [False, False])) == 0

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_the_loss_of_a_masked_row_may_be_anything(self, poison):
        def calc_loss(self, experience, info):
            return LossInfo(torch.where(experience.time_step.observation > 100, poison, info))

        algorithm = _Regression(calc_loss)
        learner = Learner(algorithm, optimizer=SGD, learning_rate=1.0)
        summary = learner.train([_chunk([1, 1000, 6], [True, False, True])])
        assert algorithm.weight.item() == pytest.approx(3.5)
        assert summary["nonfinite_updates"] == 0
        assert summary["loss"] == pytest.approx((0.5 + 18) / 2)

    def test_importance_weights_multiply_and_do_not_change_the_count(self):
        assert _after(_Regression(), _chunk([1, 2, 6], weight=torch.tensor([3.0, 0.0, 2.0]))) == pytest.approx(5)

    def test_a_scalar_loss_is_added_once(self):
        def calc_loss(self, experience, info):
            return LossInfo(info, scalar={"all": 5 * self.weight})

        assert _after(_Regression(calc_loss), _chunk([1, 2, 6])) == pytest.approx(3 - 5)

    def test_a_group_may_have_only_a_scalar_loss(self):
        def calc_loss(self, experience, info):
            return LossInfo({}, scalar={"all": 5 * self.weight})

        assert _after(_Regression(calc_loss), _chunk([1, 2])) == pytest.approx(-5)

    def test_fewer_rows_than_the_batch_use_the_first_rows_of_the_mask(self):
        observation = torch.tensor([[1.0, 2.0], [50.0, 50.0]])
        time_step = TimeStep(torch.ones(2, 2), observation, observation, observation, None, None)
        batch = Batch(Experience(time_step, None, None, None, None), torch.tensor([[True, False], [True, True]]))
        algorithm = _Regression(lambda self, experience, info: LossInfo(info[:1]))
        assert _after(algorithm, Minibatches(batch, torch.arange(2)[None])) == pytest.approx(1)


class TestGroups:
    def test_a_groups_loss_reaches_only_that_groups_parameters(self):
        torch.manual_seed(0)
        algorithm = _ActorCritic()
        x = torch.randn(5)
        expected = {}
        for group, module in (("actor", algorithm.actor), ("critic", algorithm.critic)):
            action = algorithm.actor(x[:, None])
            q = algorithm.critic(action)
            loss = -q.mean() if group == "actor" else (q - 3 * action).square().mean()
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            pairs = zip(module.parameters(), gradients)
            expected[group] = [(parameter - 0.1 * gradient).detach() for parameter, gradient in pairs]
        Learner(algorithm, optimizer=SGD, learning_rate=0.1).train([_chunk(x)])
        torch.testing.assert_close(list(algorithm.actor.parameters()), expected["actor"])
        torch.testing.assert_close(list(algorithm.critic.parameters()), expected["critic"])

    @pytest.mark.parametrize("optimizer", [Adam, RMSprop, SGD, partial(Adam, weight_decay=0.1)])
    @pytest.mark.parametrize("trained", ["actor", "critic"])
    def test_a_group_without_a_loss_is_not_stepped(self, trained, optimizer):
        alone = [False]

        def losses(actor, critic):
            return {trained: {"actor": actor, "critic": critic}[trained]} if alone[0] else {
                "actor": actor, "critic": critic,
            }  # fmt: skip

        algorithm = _ActorCritic(losses)
        learner = Learner(algorithm, optimizer=optimizer, learning_rate=0.1)
        learner.train([_chunk([1, 2, 3])])  # so that the moments are not zero
        alone[0] = True
        before = copy.deepcopy(algorithm.state_dict())
        learner.train([_chunk([1, 2, 3])] * 5)
        for name, value in algorithm.state_dict().items():
            if not name.startswith(("actor", "critic")):
                continue
            assert torch.equal(value, before[name]) == (not name.startswith(trained)), name

    def test_parameters_that_a_loss_does_not_touch_stay(self):
        algorithm = _ActorCritic(lambda actor, critic: {"critic": critic * 0 + 1})
        before = copy.deepcopy(algorithm.state_dict())
        Learner(algorithm).train([_chunk([1, 2])])
        assert all(torch.equal(value, before[name]) for name, value in algorithm.state_dict().items())

    def test_a_loss_whose_gradients_were_already_computed_is_named(self):
        def loss(actor, critic):
            actor.square().sum().backward(retain_graph=False)
            return {"actor": actor.square()}

        with pytest.raises(UsageError, match="gradients of the loss 'actor' were already computed.* leave backward"):
            Learner(_ActorCritic(loss)).train([_chunk([1, 2])])

    def test_a_loss_that_reaches_no_parameter_of_its_group_is_named(self):
        class Detached(_ActorCritic):
            def train_step(self, experience, state):
                action = self.actor(experience.time_step.observation[..., None])
                return AlgStep(info=(action, self.critic(action.detach())))

        with pytest.raises(UsageError, match="the loss 'actor' depends on parameters of other groups only"):
            Learner(Detached()).train([_chunk([1, 2, 3])])

    def test_frozen_parameters_belong_to_no_group_and_stay(self):
        algorithm = _ActorCritic()
        Learner(algorithm).train([_chunk([1, 2])])
        assert algorithm.frozen.tolist() == [1, 1]

    def test_summaries_average_over_the_updates_of_each_group(self):
        calls = []

        def losses(actor, critic):
            calls.append(critic)
            both = {"critic": critic * 0 + len(calls), "actor": actor}
            return both if len(calls) % 2 else {"critic": both["critic"]}

        learner = Learner(_ActorCritic(losses), learning_rate=0.0)
        summary = learner.train([_chunk([1, 2])] * 4)
        assert summary["loss/critic"] == pytest.approx(2.5)
        assert set(summary) >= {"loss/actor", "grad_norm/actor", "grad_norm/critic", "learning_rate/actor"}

    def test_a_summary_after_a_resume_has_the_updates_before_it(self):
        learner, resumed = (Learner(_ActorCritic(), learning_rate=0.0) for _ in range(2))
        learner.train([_chunk([1, 2])] * 3, summarize=False)
        resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
        resumed._algorithm.load_state_dict(learner._algorithm.state_dict())
        assert resumed.train([_chunk([7, 9])]) == learner.train([_chunk([7, 9])])


class TestMistakes:
    def test_a_parameter_that_no_group_claims_is_named(self):
        class Forgetful(_ActorCritic):
            def parameter_groups(self):
                return {"actor": self.actor.parameters()}

        with pytest.raises(UsageError, match=r"Forgetful claims critic\.weight, critic\.bias"):
            Learner(Forgetful())

    def test_a_parameter_that_is_not_registered_is_refused(self):
        algorithm = _Regression()
        hidden, groups = nn.Parameter(torch.zeros(2)), algorithm.parameter_groups
        algorithm.parameter_groups = lambda: groups() | {"hidden": [hidden]}
        with pytest.raises(UsageError, match="'hidden' has a parameter that is not registered.*ParameterList"):
            Learner(algorithm)

    @pytest.mark.parametrize("claim", [lambda self: self, lambda self: [self.parameters()], nn.Module.named_parameters])
    def test_an_entry_of_a_group_that_is_not_a_parameter_is_named(self, claim):
        algorithm = _ActorCritic()
        algorithm.parameter_groups = lambda: {"all": claim(nn.Sequential(algorithm.actor, algorithm.critic))}
        with pytest.raises(UsageError, match="in the group 'all'; each entry must be a parameter"):
            Learner(algorithm)

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("extra", [torch.zeros(3)], "a list as LossInfo.extra; it must be a dict from names to tensors"),
            ("buffers", {"progress": torch.zeros(())}, "a dict as LossInfo.buffers; it must be a dict from buffers to"),
            ("buffers", [torch.zeros(())], "a list as LossInfo.buffers; it must be a dict from buffers"),
            ("buffers", {torch.zeros(()): 0.5}, "a dict as LossInfo.buffers; it must be a dict from buffers"),
            ("priority", 1.0, "a float as LossInfo.priority; it must be a tensor"),
        ],
    )
    def test_fields_of_loss_info_of_other_kinds_are_named(self, field, value, words):
        chunk = _chunk([1, 2, 3])
        if field == "priority":
            chunk = _chunk([1, 2, 3], weight=torch.ones(3))
        algorithm = _Regression(lambda self, experience, info: LossInfo(info, **{field: value}))
        with pytest.raises(UsageError, match=f"calc_loss of _Regression returned {words}"):
            Learner(algorithm).train([chunk])

    def test_a_parameter_that_two_groups_claim_is_named_with_both(self):
        class Greedy(_ActorCritic):
            def parameter_groups(self):
                return {"actor": self.actor.parameters(), "critic": self.parameters()}

        with pytest.raises(UsageError, match=r"actor\.weight.*'actor'.*'critic'"):
            Learner(Greedy())

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda loss: loss.mean(),
            lambda loss: loss.mean(0),
            lambda loss: loss[..., None],
            lambda loss: loss[..., :2],
            lambda loss: torch.cat([loss, loss]),
        ],
    )
    def test_a_loss_that_is_not_one_per_row_is_refused(self, wrong):
        algorithm = _Regression(lambda self, experience, info: LossInfo(wrong(info)))
        with pytest.raises(UsageError, match=r"one loss per trainable row \(in .*'all'.*rows of \(1, 3\)"):
            Learner(algorithm).train([_chunk([1, 2, 3])])

    def test_a_loss_for_a_missing_group_is_named(self):
        algorithm = _ActorCritic(lambda actor, critic: {"actor": actor, "value": critic})
        with pytest.raises(UsageError, match=r"'value'.*\['actor', 'critic'\]"):
            Learner(algorithm).train([_chunk([1])])

    def test_a_scalar_loss_for_a_missing_group_is_named(self):
        algorithm = _ActorCritic(scalar={"alpha": torch.zeros(())})
        with pytest.raises(UsageError, match=r"'alpha'.*\['actor', 'critic'\]"):
            Learner(algorithm).train([_chunk([1])])

    def test_no_loss_at_all_is_refused(self):
        with pytest.raises(UsageError, match=r"no loss; the parameter groups are \['actor', 'critic'\]"):
            Learner(_ActorCritic(lambda actor, critic: {})).train([_chunk([1])])

    def test_a_bare_loss_for_several_groups_is_refused(self):
        with pytest.raises(UsageError, match=r"dict with one loss for each of the groups \['actor', 'critic'\]"):
            Learner(_ActorCritic(lambda actor, critic: actor)).train([_chunk([1])])

    def test_learning_rates_for_other_groups_are_refused(self):
        with pytest.raises(UsageError, match=r"groups \['actor', 'critic'\].* no part 'value'"):
            Learner(_ActorCritic(), learning_rate={"actor": 1e-3, "critic": 1e-3, "value": 1e-3})
        with pytest.raises(UsageError, match=r"is for \['actor'\].*\['actor', 'critic'\]"):
            Learner(_ActorCritic(), learning_rate={"actor": 1e-3})


class TestNonFinite:
    def _poisoned(self, when):
        """The loss is not finite in the updates whose number (from 0) is in `when`."""
        calls = [0]

        def calc_loss(self, experience, info):
            calls[0] += 1
            return LossInfo(info * (math.nan if calls[0] - 1 in when else 1.0))

        return _Regression(calc_loss)

    @pytest.mark.parametrize("optimizer", [Adam, RMSprop, SGD])
    @pytest.mark.parametrize("when", [{0}, {2}, {0, 1, 3}])
    def test_the_update_is_skipped_and_counted(self, when, optimizer):
        algorithm = self._poisoned(when)
        learner = Learner(algorithm, optimizer=optimizer, learning_rate=0.1)
        weights = [0.0]
        for _ in range(6):
            summary = learner.train([_chunk([1, 2])])
            weights.append(algorithm.weight.item())
        assert all(math.isfinite(weight) for weight in weights)
        assert {i for i in range(6) if weights[i] == weights[i + 1]} == when
        assert summary["nonfinite_updates"] == len(when)
        assert learner.updates == 6

    def test_a_gradient_that_is_not_finite_counts_too(self):
        algorithm = _Regression(lambda self, experience, info: LossInfo(info * 0 + self.weight.abs().sqrt()))
        learner = Learner(algorithm)  # the slope of a root at 0 is infinite, the loss is not
        summary = learner.train([_chunk([1])])
        assert summary["loss"] == 0
        assert summary["nonfinite_updates"] == 1
        assert algorithm.weight.item() == 0

    def test_clipping_does_not_hide_it(self):
        algorithm = _Regression(lambda self, experience, info: LossInfo(info * 0 + self.weight.abs().sqrt()))
        summary = Learner(algorithm, max_grad_norm=0.5).train([_chunk([1])])
        assert summary["nonfinite_updates"] == 1
        assert algorithm.weight.item() == 0

    def test_one_groups_trouble_steps_no_group(self):
        algorithm = _ActorCritic(lambda actor, critic: {"actor": actor * math.nan, "critic": critic})
        before = copy.deepcopy(algorithm.state_dict())
        Learner(algorithm).train([_chunk([1, 2])])
        assert all(torch.equal(value, before[name]) for name, value in algorithm.state_dict().items())

    def test_many_consecutive_non_finite_updates_end_the_run(self):
        learner = Learner(self._poisoned(set(range(10))), max_nonfinite_updates=3)
        learner.train([_chunk([1])] * 2)
        with pytest.raises(RunError, match=r"not finite in 3 consecutive updates.*these are all updates so far, so"):
            learner.train([_chunk([1])])
        learner = Learner(self._poisoned({1, 2, 3}), max_nonfinite_updates=3)
        learner.train([_chunk([1])] * 3)
        with pytest.raises(RunError, match=r"in 3 consecutive updates, up to update 4; lower.*learning_rate"):
            learner.train([_chunk([1])])

    def test_on_a_gpu_the_next_call_or_a_summary_ends_the_run(self):
        """Reading the count waits for the GPU, which has nothing to do before the updates of a call."""
        learner = Learner(self._poisoned(set(range(10))), max_nonfinite_updates=3)
        learner._plain.on_cpu = False
        learner.train([_chunk([1])] * 3, summarize=False)
        with pytest.raises(RunError, match="3 consecutive updates, up to update 3"):
            learner.train([_chunk([1])], summarize=False)
        with pytest.raises(RunError, match="3 consecutive updates, up to update 3"):
            learner.unreported()

    def test_a_good_one_between_starts_the_count_again(self):
        learner = Learner(self._poisoned({0, 1, 3, 4, 6, 7}), max_nonfinite_updates=3)
        for _ in range(9):
            learner.train([_chunk([1])])
        assert learner.train([_chunk([1])])["nonfinite_updates"] == 6

    def test_the_count_survives_a_resume(self):
        learner = Learner(self._poisoned(set(range(10))), max_nonfinite_updates=3)
        learner.train([_chunk([1])] * 2)
        resumed = Learner(self._poisoned(set(range(10))), max_nonfinite_updates=3)
        resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
        with pytest.raises(RunError, match="3 consecutive updates"):
            resumed.train([_chunk([1])])


class TestStop:
    def _stopping(self, at):
        calls = [0]

        def calc_loss(self, experience, info):
            calls[0] += 1
            return LossInfo(info, priority=info, stop=torch.full_like(info, calls[0] - at + 0.5))

        return _Regression(calc_loss), calls

    def test_it_skips_the_update_and_the_rest(self):
        algorithm, calls = self._stopping(3)
        learner = Learner(algorithm, optimizer=SGD, learning_rate=0.5)
        chunks = [_chunk([1.0] * 4, index=[[0], [1]]), _chunk([1.0] * 4, index=[[0], [1]])]
        summary = learner.train(chunks)
        assert algorithm.weight.item() == pytest.approx(0.75)  # two steps, each half of the way to 1
        assert calls == [3]
        assert learner.updates == algorithm.after_updates == 2
        assert summary["loss"] == pytest.approx((0.5 + 0.125) / 2)

    def test_priorities_include_all_earlier_updates(self):
        algorithm, _ = self._stopping(3)
        given = []
        chunk = _chunk([1.0] * 4, weight=torch.ones(4), index=[[0], [1], [2]])._replace(update_priorities=given.append)
        Learner(algorithm, optimizer=SGD, learning_rate=0.5).train([chunk])
        assert [len(priorities) for priorities in given] == [2]

    def test_the_next_iteration_trains_again(self):
        algorithm, calls = self._stopping(2)
        learner = Learner(algorithm, optimizer=SGD, learning_rate=0.5)
        learner.train([_chunk([1.0])] * 3)
        calls[0] = 0
        learner.train([_chunk([1.0])] * 3)
        assert learner.updates == 2

    def test_an_immediate_stop_changes_nothing(self):
        algorithm, _ = self._stopping(1)
        learner = Learner(algorithm)
        assert learner.train([_chunk([1.0])]) == {}
        assert algorithm.weight.item() == 0


class TestStopOnGPU:
    """Reading each stop would wait for the GPU: a stop skips the rest of the iteration there, and is counted later."""

    @staticmethod
    def _learner(on_cpu, compile, monkeypatch):
        """A regression that stops where its weight has come as far as progress allows, in a few of 6 updates."""

        def calc_loss(self, experience, info):
            too_far = (self.weight.detach().abs() - 2 * self.progress - 0.15).float()
            return LossInfo(info, extra={"rows": info}, stop=too_far.expand_as(info))

        with monkeypatch.context() as patch:
            make = Updates.__init__

            def made(self, *arguments):
                make(self, *arguments)
                self.on_cpu = on_cpu

            patch.setattr(Updates, "__init__", made)
            return Learner(_Regression(calc_loss), learning_rate=0.1, compile=compile)

    @pytest.mark.parametrize("compile", [False, True])
    def test_gpu_parameters_counts_and_summaries_equal_the_cpu(self, interpreted, monkeypatch, compile):
        learners = [self._learner(on_cpu, compile, monkeypatch) for on_cpu in (True, False)]
        chunks, made = [_chunk([9.0] * 4, index=[[0], [1]])] * 3, []
        for k, summarize in enumerate((False, True, False, False, True)):
            found = []
            for learner in learners:
                learner._algorithm.progress.fill_(0.1 * k)
                found.append(learner.train(chunks, summarize))
            assert found[0] == pytest.approx(found[1], rel=1e-5) and bool(found[0]) == summarize
            made.append(learners[0].updates)
        assert made == [2, 4, 6, 8, 10]
        on_cpu, on_gpu = (learner.state_dict() for learner in learners)
        for name in ("updates", "num_applied", "consecutive_skips"):
            assert on_cpu[name] == on_gpu[name]
        assert on_cpu["optimizers"]["all"]["num_steps"] == on_gpu["optimizers"]["all"]["num_steps"] == 10
        assert learners[1]._algorithm.num_updates == 10
        weights = [learner._algorithm.weight.item() for learner in learners]
        assert weights[0] == pytest.approx(weights[1], abs=1e-6)

    def test_an_early_stop_skips_only_updates_of_its_iteration(self, monkeypatch):
        learner = self._learner(False, False, monkeypatch)
        learner._algorithm._calc_loss = lambda self, experience, info: LossInfo(
            info, stop=experience.time_step.observation - 8.5
        )
        for count in (1, 2):
            learner.train([_chunk([8.0, 9.0, 8.0, 8.0], index=[[0], [1], [2]]), _chunk([8.0])], summarize=False)
            assert learner._plain.num_applied == count

    def test_a_stop_at_once_leaves_everything_as_it_was(self, monkeypatch):
        learner = self._learner(False, False, monkeypatch)
        learner._algorithm.progress.fill_(-1)
        assert learner.train([_chunk([9.0])] * 2) == {}
        assert learner.updates == learner._algorithm.weight.item() == 0

    def test_priorities_of_skipped_updates_are_not_finite(self, monkeypatch):
        learner, given = self._learner(False, False, monkeypatch), []
        calc_loss = learner._algorithm._calc_loss
        learner._algorithm._calc_loss = lambda *arguments: calc_loss(*arguments)._replace(priority=arguments[2])
        chunk = _chunk([9.0] * 4, weight=torch.ones(4), index=[[0], [1], [2], [3]])
        learner.train([chunk._replace(update_priorities=given.append)])
        assert [priority.isfinite().item() for priority in given[0]] == [True, True, False, False]


class TestLearningRate:
    def test_a_schedule_follows_progress(self):
        algorithm = _Regression(lambda self, experience, info: LossInfo(self.weight.expand_as(info)))
        learner = Learner(algorithm, optimizer=SGD, learning_rate=Linear(1.0, 0.0))
        moved = []
        for progress in (0.0, 0.25, 1.0):
            algorithm.progress.fill_(progress)
            before = algorithm.weight.item()
            assert learner.train([_chunk([1.0])])["learning_rate"] == pytest.approx(1 - progress)
            moved.append(before - algorithm.weight.item())
        assert moved == pytest.approx([1, 0.75, 0])

    def test_each_group_has_its_own(self):
        algorithm = _ActorCritic(lambda actor, critic: {"actor": critic, "critic": critic})
        before = copy.deepcopy(algorithm.state_dict())
        rates = {"critic": Steps([0.0, 1e-2], [0.5]), "actor": 1e-2}
        learner = Learner(algorithm, learning_rate=rates)
        summary = learner.train([_chunk([1.0, 2.0])])
        assert summary["learning_rate/critic"] == 0
        assert summary["learning_rate/actor"] == 1e-2
        assert torch.equal(algorithm.critic.weight, before["critic.weight"])
        assert not torch.equal(algorithm.actor.weight, before["actor.weight"])
        algorithm.progress.fill_(0.5)
        assert learner.train([_chunk([1.0, 2.0])])["learning_rate/critic"] == pytest.approx(1e-2)
        assert not torch.equal(algorithm.critic.weight, before["critic.weight"])


class TestClipping:
    def test_a_long_gradient_is_scaled_to_the_norm(self):
        assert _after(_Regression(), _chunk([8.0]), max_grad_norm=0.5) == pytest.approx(0.5, rel=1e-5)

    def test_a_short_one_does_not_change(self):
        assert _after(_Regression(), _chunk([0.25]), max_grad_norm=0.5) == pytest.approx(0.25)

    def test_each_group_is_clipped_separately(self):
        torch.manual_seed(0)
        algorithm = _ActorCritic(lambda actor, critic: {"actor": 1e-3 * actor, "critic": 1e3 * critic})
        before = copy.deepcopy(algorithm.state_dict())
        summary = Learner(algorithm, optimizer=SGD, learning_rate=1.0, max_grad_norm=0.5).train([_chunk([1.0, 2.0])])
        moved = {}
        for group in ("actor", "critic"):
            after = algorithm.state_dict()
            difference = [(after[name] - before[name]).flatten() for name in before if name.startswith(group)]
            moved[group] = torch.cat(difference).norm().item()
        assert summary["grad_norm/critic"] > 0.5, "what is reported is the norm before clipping"
        assert moved["critic"] == pytest.approx(0.5, rel=1e-4)
        assert moved["actor"] == pytest.approx(summary["grad_norm/actor"], rel=1e-4)
        assert moved["actor"] < 0.1


class TestFlatParameters:
    def _network(self):
        torch.manual_seed(0)
        return _ActorCritic()

    def _is_a_view(self, algorithm, learner):
        learner.train([_chunk([1.0, 2.0])])
        for group in ("actor", "critic"):
            module = getattr(algorithm, group)
            together = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
            (flat,) = learner._plain.groups[group].flat
            same_memory = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
            if not torch.equal(together, flat) or same_memory != {flat.untyped_storage().data_ptr()}:
                return False
        return True

    def test_building_a_learner_changes_no_value(self):
        algorithm = self._network()
        before = copy.deepcopy(algorithm.state_dict())
        Learner(algorithm)
        assert all(torch.equal(value, before[name]) for name, value in algorithm.state_dict().items())

    def test_parameters_stay_views_after_load_state_dict(self):
        algorithm = self._network()
        learner = Learner(algorithm)
        assert self._is_a_view(algorithm, learner)
        other = _ActorCritic()
        algorithm.load_state_dict(other.state_dict())
        assert torch.equal(algorithm.actor.weight, other.actor.weight)
        assert self._is_a_view(algorithm, learner)
        assert not torch.equal(algorithm.actor.weight, other.actor.weight), "the loaded weights do not train"

    def test_an_algorithm_with_a_learner_still_pickles(self):
        algorithm = self._network()
        Learner(algorithm)
        # The lambda in it does not pickle; the modules that hold the views do.
        again = pickle.loads(pickle.dumps(algorithm.actor))
        assert torch.equal(again.weight, algorithm.actor.weight)

    def test_groups_of_mixed_dtypes_train(self):
        algorithm = _ActorCritic(lambda actor, critic: {"actor": actor, "critic": critic})
        algorithm.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        groups = algorithm.parameter_groups
        algorithm.parameter_groups = lambda: groups() | {"extra": [algorithm.extra]}
        algorithm._losses = lambda actor, critic: {
            "actor": actor,
            "critic": critic,
            "extra": (algorithm.extra.sum() - 1).square().float() + 0 * actor.detach(),
        }
        Learner(algorithm, learning_rate=0.1).train([_chunk([1.0, 2.0])])
        torch.testing.assert_close(algorithm.extra.detach(), torch.full((2,), 0.1, dtype=torch.float64))


class TestPlan:
    """Compiling pays from 16,000 updates on, or 6,000 where each multiplies ten million numbers."""

    @pytest.mark.parametrize(
        ("algorithm", "num_updates", "num_rows", "is_plain"),
        [
            (_ActorCritic, 15_000, 1, True),
            (_ActorCritic, 20_000, 1, False),
            (_ActorCritic, 6_000, 2_500_000, True),  # rows x 4 parameters; the frozen ones cost nothing
            (_ActorCritic, 7_000, 2_500_000, False),
            (_Regression, 7_000, 2_500_000, True),
            (_Regression, 7_000, 10_000_000, False),
            (_Regression, 0.0, 10**9, True),
            (_Regression, math.inf, 1, False),
        ],
    )
    def test_auto_compiles_where_the_run_is_long_enough(self, algorithm, num_updates, num_rows, is_plain):
        learner = Learner(algorithm())
        assert learner.is_plain
        learner.plan(num_updates, num_rows)
        assert learner.is_plain == is_plain

    def test_the_reported_plan_is_executed(self):
        learner = Learner(_Regression(), compile=False)
        learner.plan(math.inf, 10**9)
        assert learner.is_plain
        learner = Learner(_Regression(), compile=True)
        learner.plan(1, 1)
        assert not learner.is_plain

    @pytest.mark.parametrize("wrong", ["Auto", "yes", None, 2])
    def test_another_word_is_refused(self, wrong):
        with pytest.raises(UsageError, match=f"Learner.compile is {wrong!r}; it must be True or False or 'auto'"):
            Learner(_Regression(), compile=wrong)


@pytest.mark.parametrize("optimizer", [Adam, RMSprop])
def test_a_restored_learner_continues_bit_for_bit(optimizer):
    def make():
        torch.manual_seed(0)
        algorithm = _ActorCritic()
        return algorithm, Learner(algorithm, optimizer=optimizer, learning_rate=0.01, max_grad_norm=1.0)

    algorithm, learner = make()
    learner.train([_chunk([1.0, 2.0])] * 4)
    saved = copy.deepcopy((algorithm.state_dict(), learner.state_dict()))
    learner.train([_chunk([2.0, -1.0])] * 4)
    again, resumed = make()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.updates == 4
    resumed.train([_chunk([2.0, -1.0])] * 4)
    for name, value in algorithm.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_summaries_are_means_over_trained_rows_of_all_updates():
    def calc_loss(self, experience, info):
        observation = experience.time_step.observation
        return LossInfo(info, extra={"seen": observation, "largest": observation.max()})

    chunk = _chunk([1, 2, 6, 100], [True, True, True, False], index=[[0, 3], [1, 2]])
    summary = Learner(_Regression(calc_loss)).train([chunk])
    assert summary["seen"] == pytest.approx(3)
    assert summary["largest"] == pytest.approx((100 + 6) / 2)
    assert Learner(_Regression(calc_loss)).train([chunk], summarize=False) == {}


@pytest.mark.parametrize("name", ["loss", "loss/critic", "grad_norm", "learning_rate", "nonfinite_updates"])
def test_an_extra_has_no_name_of_the_learners_own_scalars(name):
    algorithm = _Regression(lambda self, experience, info: LossInfo(info, extra={name: info}))
    with pytest.raises(
        UsageError, match=f"LossInfo.extra has '{name}', which the learner uses for one of its own scalars"
    ):
        Learner(algorithm).train([_chunk([1, 2, 3])])


def test_extras_are_checked_in_the_first_update_also_before_the_first_summary():
    algorithm = _Regression(lambda self, experience, info: LossInfo(info, extra={"q": info.unsqueeze(0)}))
    with pytest.raises(UsageError, match=r"LossInfo.extra\['q'\] has shape \[1, 1, 3\]; it must be 0-d, or its shape"):
        Learner(algorithm).train([_chunk([1, 2, 3])], summarize=False)


def test_a_loss_may_differentiate_where_it_is_only_evaluated():
    def calc_loss(self, experience, info):
        (steepness,) = torch.autograd.grad(info.sum(), self.weight, create_graph=True)
        return LossInfo(info + steepness)

    algorithm = _Regression(calc_loss)
    chunk = _chunk([1, 2, 6])
    assert Learner(algorithm).evaluate(chunk.source)["loss"] == pytest.approx((1 + 4 + 36) / 6 - 9)
    assert algorithm.weight.grad is None


def test_after_update_runs_after_every_update_without_gradients():
    class Target(_Regression):
        def after_update(self):
            super().after_update()
            assert not torch.is_grad_enabled()

    algorithm = Target()
    learner = Learner(algorithm)
    learner.train([_chunk([1, 2, 3, 4], index=[[0], [1], [2], [3]])])
    assert algorithm.after_updates == learner.updates == 4


def test_first_iteration_needs_every_row_of_an_unroll():
    """All T rows, with row T for its value only; A5."""
    algorithm = _Regression()
    observation = torch.tensor([[1.0], [2.0], [6.0], [1000.0]])
    step_type = torch.tensor([[StepType.FIRST], [StepType.MID], [StepType.MID], [StepType.MID]], dtype=torch.int32)
    time_step = TimeStep(step_type, observation, observation, observation, observation, step_type)
    experience = Experience(time_step, observation, None, None, None)
    source = EpochBatches(1)
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), 3, 1)
    source.add(experience)
    Learner(algorithm, optimizer=SGD, learning_rate=1.0).train(source.chunks(3))
    assert algorithm.weight.item() == pytest.approx(3)


def test_few_tensors_are_kept_between_rare_summaries():
    learner = Learner(_Regression(lambda self, experience, info: LossInfo(info)), optimizer=SGD, learning_rate=0.0)
    num_tensors = []
    for _ in range(2):
        for _ in range(120):
            learner.train([_chunk([1.0])], summarize=False)
        gc.collect()  # else those of earlier tests disappear meanwhile
        num_tensors.append(sum(isinstance(found, torch.Tensor) for found in gc.get_objects()))
    assert max(num_tensors) - min(num_tensors) < 100


@pytest.mark.parametrize("max_records", [1000, 2])
def test_losses_are_averages_over_all_updates_since_the_last_summary(monkeypatch, max_records):
    """What is not finite does not count, and extras are those of the call that asks for a summary."""
    monkeypatch.setattr("alfish.learner.update_means.MAX_RECORDS", max_records)

    def calc_loss(self, experience, info):
        return LossInfo(info, extra={"seen": experience.time_step.observation})

    learner = Learner(_Regression(calc_loss), optimizer=SGD, learning_rate=0.0)
    for observation in (1.0, math.nan, 2.0, 3.0):
        assert learner.train([_chunk([observation])], summarize=False) == {}
    assert learner.train([], summarize=True) == {}
    summary = learner.train([_chunk([4.0])])
    assert summary["loss"] == pytest.approx((1 + 4 + 9 + 16) / 2 / 4)
    assert summary["grad_norm"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert summary["seen"] == 4 and summary["nonfinite_updates"] == 1
    assert learner.train([_chunk([5.0])])["loss"] == pytest.approx(12.5)
