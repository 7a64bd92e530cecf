"""What a hook returns in place of what it should is named in one sentence, with the hook and what is asked for."""

import functools
from typing import ClassVar

import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.contract import check_step
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, LossInfo
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.learner.batches import EpochBatches
from alfish.learner.updates import EARLY
from alfish.training.listeners import Listener
from alfish.training.trainer import Trainer
from alfish.transforms import Transform

B = 4


class Right(RLAlgorithm):
    """Does what the contract asks for."""

    on_policy = True

    def __init__(self, *specs):
        super().__init__(*specs)
        self.linear = torch.nn.Linear(4, 2)

    def rollout_step(self, time_step, state):
        return AlgStep(self.linear(time_step.observation).argmax(-1), state, {"zero": time_step.reward})

    def train_step(self, experience, state):
        return AlgStep(info=self.linear(experience.time_step.observation).sum(-1))

    def calc_loss(self, experience, info):
        return LossInfo(info, extra={"value": info})


def train(tmp_path, algorithm, transforms=(), num_iterations=2):
    """Returns the number of updates."""
    environment = functools.partial(make_environment, "CartPole-v1", num_envs=B)
    options = {
        "num_iterations": num_iterations,
        "unroll_length": 8,
        "listeners": [],
        "summary_period": 1,
        "transforms": transforms,
        "device": "cpu",
    }
    trainer = Trainer(tmp_path, algorithm=algorithm, environment=environment, batches=EpochBatches, **options)
    trainer.train()
    return trainer.clock.updates


def returns(hook, value):
    """`Right`, whose hook returns something else: a value, or a function of what it should be."""

    def changed(self, *arguments):
        right = getattr(Right, hook)(self, *arguments)
        return value(right) if callable(value) else value

    return type("Wrong", (Right,), {hook: changed})


def output(change):
    return lambda step: step._replace(output=change(step.output))


WRONG = {
    "nothing": ("rollout_step", None, r"rollout_step of Wrong returned None; it must return AlgStep\(action, state"),
    "a bare action": ("rollout_step", lambda step: step.output, "returned a tensor of shape .4. and dtype int64; it"),
    "too few actions": ("rollout_step", output(lambda action: action[:1]), r"tensor of shape \[1\] and dtype int64"),
    "a column of actions": ("rollout_step", output(lambda action: action[:, None]), r"asks for .* shape \[4\] and"),
    "bools": ("rollout_step", output(torch.Tensor.bool), "dtype bool as action; Discrete.2. asks for .* dtype int64"),
    "real numbers": ("rollout_step", output(torch.Tensor.float), "float32 as action; Discrete.2. asks for .* int64"),
    "numpy": ("rollout_step", output(torch.Tensor.numpy), "returned a ndarray as action"),
    "a choice that is none": ("rollout_step", output(lambda action: action + 100), "outside Discrete.2.; choices"),
    "another nest": ("rollout_step", output(lambda action: {"arm": action}), "action.arm; the action space asks for a"),
    "a state from nowhere": ("rollout_step", lambda step: step._replace(state=torch.zeros(B, 3)),
                             r"a state of state \[4, 3\] float32, but initial_state returned a state of none"),
    "no experience": ("preprocess_experience", None, "preprocess_experience of Wrong returned None"),
    "columns first": ("preprocess_experience", lambda rows: rows._replace(info={"a": torch.zeros(B, 8)}),
                      r"returned info\.a, a tensor of shape \[4, 8\] and .*; its shape must begin with \[8, 4\]"),
    "text for an info": ("preprocess_experience", lambda rows: rows._replace(info="x"), "returned info, a str; its"),
    "text carried": ("rollout_step", lambda step: step._replace(info={"a": "x"}), r"returned a str as info.a; it must"),
    "an info of others": ("rollout_step", lambda step: step._replace(info=torch.zeros(B + 1)), r"shape \[5\] .* \[4\]"),
    "no initial state": ("initial_state", 5, r"initial_state\(2\) of Wrong returned a int as state; it must be"),
    "one initial state": ("initial_state", torch.zeros(1, 3), r"of shape \[1, 3\] .* tensor whose first dimension"),
    "a list of groups": ("parameter_groups", lambda groups: list(groups), "parameter_groups of Wrong returned a list;"),
    "a module for a group": ("parameter_groups", {"all": torch.nn.Linear(1, 1)}, "it must return a dict from a group"),
    "no step": ("train_step", None, "train_step of Wrong returned None; it must return AlgStep"),
    "no loss": ("calc_loss", None, r"calc_loss of Wrong returned None; it must return LossInfo\(loss"),
    "a bare loss": ("calc_loss", lambda info: info.loss, "calc_loss of Wrong returned a tensor of shape"),
    "extras in a list": ("calc_loss", LossInfo(torch.zeros(1), extra=[]), "a list as LossInfo.extra; it must be"),
    "a loss of None": ("calc_loss", LossInfo(None), "calc_loss of Wrong returned None as LossInfo.loss; it must be"),
    "a complex loss": ("calc_loss", lambda info: info._replace(loss=info.loss * 1j), "complex64 as LossInfo.loss; it"),
    "a loss of no row": ("calc_loss", lambda info: info._replace(loss=info.loss[:0]), r"shape \(0, 32\) for rows of"),
    "many scalars": ("calc_loss", lambda info: info._replace(scalar={"all": info.loss}), "LossInfo.scalar.'all'.;"),
    "a bare scalar": ("calc_loss", lambda info: info._replace(scalar=3.0), "a float as LossInfo.scalar; it must be"),
    "one stop": ("calc_loss", lambda info: info._replace(stop=info.loss.sum()), "a tensor .* as LossInfo.stop; it"),
    "many stops": ("calc_loss", lambda info: info._replace(stop=torch.ones(3, 5)), "LossInfo.stop of .* one number"),
    "a detached loss": ("calc_loss", lambda info: LossInfo(info.loss.detach()), "'all' of Wrong does not depend on"),
    "a number for summaries": ("calc_loss", lambda info: info._replace(extra={"size": 1.0}), "'size'. is a float"),
    "a summary of columns": ("calc_loss", lambda info: info._replace(extra={"size": torch.zeros(3)}),
                             r"'size'. has shape \[3\]; it must be 0-d, or its shape must begin with \[1, 32\]"),
}  # fmt: skip


def test_what_is_right_trains(tmp_path):
    assert train(tmp_path, Right) == 2


@pytest.mark.parametrize("name", WRONG)
def test_the_error_names_the_hook_and_its_wrong_result(tmp_path, name):
    hook, value, words = WRONG[name]
    with pytest.raises(UsageError, match=words):
        train(tmp_path, returns(hook, value))


def test_classes_declare_whether_they_are_on_policy(tmp_path):
    class Silent(RLAlgorithm):
        rollout_step, train_step, calc_loss = Right.rollout_step, Right.train_step, Right.calc_loss

    for kind in (Silent, type("Silent", (Silent,), {"on_policy": "yes"})):
        with pytest.raises(UsageError, match="the class Silent has no attribute on_policy; set on_policy = True to"):
            train(tmp_path, kind)


def test_parts_of_a_wrong_class_are_refused_with_the_parameter_name(tmp_path):
    def linear(*specs):
        return torch.nn.Linear(1, 1)

    class Incomplete(RLAlgorithm):
        on_policy = True

    class Idle(Listener):
        def on_step(self):
            raise AssertionError

    for options, words in (
        (
            {"algorithm": linear},
            "Trainer.algorithm made a Linear; it must be a class, or a function that returns an RLAlgor",
        ),
        ({"algorithm": lambda *specs: None}, "Trainer.algorithm made None; it must be a class, or a function"),
        ({"algorithm": lambda: None}, "Trainer.algorithm cannot be called as an RLAlgorithm is: .* takes 0 positional"),
        (
            {"algorithm": Incomplete},
            "Incomplete does not define calc_loss, rollout_step, train_step; define them",
        ),
        ({"transforms": [linear]}, "Trainer.transforms made a Linear"),
        ({"environment": lambda seed: 3}, "Trainer.environment made an int"),
        ({"environment": dict, "algorithm": Right}, "Trainer.environment made a dict"),
        ({"unroller": linear}, "Trainer.unroller made a Linear"),
        ({"learner": lambda: None}, "Trainer.learner cannot be called as a Learner is"),
        ({"batches": dict}, "Trainer.batches made a dict"),
        ({"extra_listeners": Idle()}, "Trainer.extra_listeners is .*; it must be a list"),
        ({"listeners": [len]}, "Trainer.listeners has <built-in function len>, which is not a Listener"),
        ({"listeners": [Idle()]}, "Idle has no method of Listener, so it would do nothing; define after_iteration"),
        ({"extra_metrics": [object()]}, "object is not a metric; it has no name and no update and no result"),
        ({"device": "meta"}, "Trainer.device is 'meta', which alfish does not use"),
        ({"num_threads": 10**6}, r"Trainer.num_threads is 1000000; it must be an integer in \[1, 1024\]"),
    ):
        environment = functools.partial(make_environment, "CartPole-v1")
        parts = {"algorithm": Right, "environment": environment, "num_iterations": 1, "device": "cpu"}
        with pytest.raises(UsageError, match=words):
            Trainer(tmp_path, **parts | options)
    assert not list(tmp_path.iterdir())


def test_a_type_error_of_a_parts_own_names_its_place(tmp_path):
    def breaks(*specs):
        return len(3)

    with pytest.raises(CodeError, match="Trainer.algorithm raised TypeError: object of type 'int'.*in breaks"):
        train(tmp_path, breaks)


def test_an_algorithm_without_parameters_has_nothing_to_train(tmp_path):
    class Empty(Right):
        def __init__(self, *specs):
            RLAlgorithm.__init__(self, *specs)
            self.linear = lambda observation: observation[..., :2]

    with pytest.raises(UsageError, match="Empty has no parameters to train; assign its networks to attributes"):
        train(tmp_path, Empty)


def test_replay_asks_for_the_fields_that_it_is_to_keep(tmp_path):
    class Keeps(Right):
        on_policy, replay_needs = False, ReplayNeeds(info=("log_prob",))

    environment = functools.partial(make_environment, "CartPole-v1", num_envs=B)
    parts = {"algorithm": Keeps, "environment": environment, "num_iterations": 1, "device": "cpu", "listeners": []}
    words = r"rollout_step of Keeps returned a dict as info; it must be a NamedTuple with the fields log_prob"
    with pytest.raises(UsageError, match=words):
        Trainer(tmp_path, **parts).train()


class Halves(Transform):
    def transform(self, time_step, state):
        time_step.reward.mul_(0.5)
        return time_step


class Blind(Right):
    def rollout_step(self, time_step, state):
        time_step.observation.mul_(0)
        return super().rollout_step(time_step, state)


class Columns(Transform):
    def transform(self, time_step, state):
        return time_step._replace(reward=time_step.reward.unsqueeze(-1))


def test_a_transform_whose_rewards_do_not_fit_its_spec_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"Columns returned rewards of shape \(1,\), but its reward_spec has \(\)"):
        train(tmp_path, Right, [Columns])


@pytest.mark.parametrize(("algorithm", "transforms"), [(Right, [Halves]), (Blind, []), (PPO, [Halves])])
def test_nothing_is_written_into_rows_that_are_stored(tmp_path, algorithm, transforms):
    with pytest.raises(UsageError, match="writes to the time step or the state in its arguments"):
        train(tmp_path, algorithm, transforms)


def test_nested_actions_are_compared_leaf_by_leaf():
    spec = {"box": spaces.Box(-1, 1, (2,)), "gears": spaces.MultiDiscrete([2, 3]), "flags": spaces.MultiBinary(2)}
    action = {"box": torch.ones(B, 2), "gears": torch.ones(B, 2).long(), "flags": torch.ones(B, 2).to(torch.int8)}
    check_step(AlgStep(action), None, "rollout_step", spec, B, None)
    wrong = nest.map(torch.clone, action)
    wrong["gears"][1, 0] = 2
    with pytest.raises(UsageError, match=r"returned 2 as action\.gears, which is outside MultiDiscrete\(\[2 3\]\)"):
        check_step(AlgStep(wrong), None, "rollout_step", spec, B, None)


def test_a_state_has_the_dtype_of_the_initial_state():
    step, spec = AlgStep(torch.zeros(B).long(), torch.zeros(B, 1)), spaces.Discrete(2)
    check_step(step, None, "rollout_step", spec, B, torch.zeros(B, 1))
    with pytest.raises(
        UsageError, match=r"a state of state \[4, 1\] float32, but initial_state returned a state of .* int64; make"
    ):
        check_step(step, None, "rollout_step", spec, B, torch.zeros(B, 1).long())


class TwoGroups(Right):
    """Has a second group, `critic`, and a loss for each."""

    def __init__(self, *specs):
        super().__init__(*specs)
        self.critic = torch.nn.Linear(4, 1)

    def parameter_groups(self):
        return {"actor": self.linear.parameters(), "critic": self.critic.parameters()}

    def train_step(self, experience, state):
        value = self.critic(experience.time_step.observation)[..., 0]
        return AlgStep(info={"actor": super().train_step(experience, state).info, "critic": value})

    def calc_loss(self, experience, info):
        return LossInfo(info)


class ForgetsTheCritic(TwoGroups):
    def calc_loss(self, experience, info):
        return LossInfo({"actor": info["actor"]})


class DelaysTheCritic(ForgetsTheCritic):
    def graph_key(self):
        return False  # the critic does not train in this update


@pytest.mark.parametrize("algorithm", [TwoGroups, DelaysTheCritic])
def test_a_group_may_have_no_loss_in_updates_of_their_own_graph_key(tmp_path, algorithm):
    assert train(tmp_path, algorithm, num_iterations=EARLY + 2) == EARLY + 2


def test_a_group_that_never_has_a_loss_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match="calc_loss of ForgetsTheCritic returned no loss for the group 'critic' in 10 updates"
    ):
        train(tmp_path, ForgetsTheCritic, num_iterations=EARLY)


class WithPeriods(TwoGroups):
    update_periods: ClassVar = {"actor": 3}

    def calc_loss(self, experience, info):
        return LossInfo({"critic": info["critic"]} | ({"actor": info["actor"]} if self.trains("actor") else {}))


class WithPeriodsForgetsTheCritic(WithPeriods):
    def calc_loss(self, experience, info):
        return LossInfo({"actor": info["actor"]})


def test_a_group_beside_one_with_a_period_must_have_a_loss(tmp_path):
    assert train(tmp_path / "right", WithPeriods, num_iterations=3 * EARLY + 1) == 3 * EARLY + 1
    with pytest.raises(UsageError, match="returned no loss for the group 'critic' in 30 updates"):
        train(tmp_path / "wrong", WithPeriodsForgetsTheCritic, num_iterations=3 * EARLY)


class Holds(Right):
    """Keeps something as an attribute."""

    def __init__(self, *specs, held):
        super().__init__(*specs)
        self.held = held


def test_frozen_modules_in_a_list_are_accepted(tmp_path):
    held = [torch.nn.Linear(4, 2).requires_grad_(False), torch.zeros(3)]
    assert train(tmp_path, functools.partial(Holds, held=held)) == 2


class KeepsAGraph(TwoGroups):
    """Writes an attribute in a hook, and forgets to detach it."""

    def __init__(self, *specs):
        super().__init__(*specs)
        self.average = torch.zeros(())

    def calc_loss(self, experience, info):
        self.average = 0.9 * self.average + 0.1 * info["actor"].mean()
        return LossInfo({**info, "actor": info["actor"] + self.average})


class KeepsADetachedTensor(KeepsAGraph):
    def calc_loss(self, experience, info):
        loss_info = super().calc_loss(experience, info)
        self.average = self.average.detach()
        return loss_info


def test_a_graph_that_outlives_its_update_is_refused(tmp_path):
    with pytest.raises(UsageError, match="KeepsAGraph.average keeps a tensor with the graph .* detach"):
        train(tmp_path, KeepsAGraph)


def test_an_attribute_may_keep_a_detached_tensor(tmp_path):
    assert train(tmp_path, KeepsADetachedTensor) == 2


def test_a_hook_with_other_arguments_is_refused(tmp_path):
    wrong = type("Wrong", (Right,), {"after_update": lambda self, experience: None})
    with pytest.raises(UsageError, match=r"after_update of Wrong takes \(experience\), but is called with \(\)"):
        train(tmp_path, wrong)


def test_a_misspelt_hook_is_refused(tmp_path):
    wrong = type("Wrong", (Right,), {"preprocess_experiance": lambda self, experience: experience})
    with pytest.raises(UsageError, match="method 'preprocess_experiance', .* did you mean preprocess_experience?"):
        train(tmp_path, wrong)


@pytest.mark.parametrize("name", ["_preprocess_experiance", "calc_losses", "value_of_state"])
def test_methods_of_other_names_are_accepted(tmp_path, name):
    named = type("Named", (Right,), {name: lambda self: None, "calc_loss": Right.calc_loss})
    assert train(tmp_path, named) == 2


def test_constructors_that_skip_the_base_constructor_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"the constructor of Wrong does not call super\(\).__init__; call it first"):
        train(tmp_path, type("Wrong", (Right,), {"__init__": lambda self, *specs: None}))
