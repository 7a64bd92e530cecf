"""Population-based training in one run: who continues from whom, exact resumes, and mistakes."""

import csv
import functools

import gin
import numpy as np
import pytest
import torch
from toy_games import Dash, Kept

from alfish.algorithms.dqn import DQN
from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.ppo import PPO
from alfish.configuration import opening
from alfish.environments.games import make_games
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.training.game_evaluator import GameEvaluator
from alfish.training.joint_population import CSV, JointPopulation
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer

EPOCHS = functools.partial(EpochBatches, num_epochs=1, minibatch_size=16)
REPLAY = functools.partial(ReplayBatches, batch_size=16, warmup_env_steps=60, capacity=1000, updates_per_env_step=0.1)
RATE = "Learner.learning_rate"


@pytest.fixture(autouse=True)
def small():
    gin.parse_config("MLP.layers = (8,)\nLearner.compile = False")


def trainer_of(root_dir, population=None, game=Kept, policies=None, listeners=(), **changed):
    """Returns a trainer of four policies, and of a population if one is given."""
    given = {"algorithm": PPO, "batches": EPOCHS, "num_iterations": 12, "unroll_length": 16, "device": "cpu"}
    given |= {"listeners": [*listeners, *([population] if population else [])], "summary_period": 10**9, **changed}
    given.setdefault("environment", functools.partial(make_games, game, num_games=4))
    return Trainer(root_dir, policies=policies or {"p": ("*", 4)}, **given)


def members_of(trainer):
    return {member.name: member for member in trainer.unroller.members}


def rows_of(root_dir):
    return list(csv.DictReader((root_dir / CSV).read_text().splitlines()))


def state_of(trainer):
    state = trainer.state_dict()
    tensors = {key: state[key] for key in ("algorithm", "transforms", "learner")}
    return tensors, [state["listeners"]["JointPopulation"], state["settings"]]


POPULATION = functools.partial(JointPopulation, {RATE: "1e-6..1e-1", "PPO.entropy_coef": "0..0.1"}, period=200)


def test_the_worst_continue_from_the_best_with_perturbed_settings(tmp_path):
    trainer = trainer_of(tmp_path, POPULATION(), listeners=[CheckpointSaver()])
    sources, rebuild = [], trainer.unroller.rebuild

    def recorded(policy, bindings, parent):
        sources.append((policy.name, parent.name))
        rebuild(policy, bindings, parent)

    trainer.unroller.rebuild = recorded
    report = trainer.train()
    rows = rows_of(tmp_path)
    last = max(int(row["generation"]) for row in rows)
    assert len(rows) == 4 * (last + 1) and {row["parent"] for row in rows[:4]} == {""}
    by_place = {(int(row["generation"]), row["member"]): row for row in rows}
    copies = [row for row in rows if row["parent"] not in ("", row["member"])]
    assert len({row["member"] for row in copies}) > 1
    assert [pair for pair in sources if pair[0] != pair[1]] == [(row["member"], row["parent"]) for row in copies]
    for row in copies:
        before = int(row["generation"]) - 1
        values = {name: float(by_place[before, name]["value"]) for name in ("p0", "p1", "p2", "p3")}
        assert row["member"] == min(values, key=values.get) and row["parent"] == max(values, key=values.get)
        factor = float(row[RATE]) / float(by_place[before, row["parent"]][RATE])
        assert round(factor, 3) in (0.8, 1.25)
    assert report.scalars["train/p0/learning_rate"] == float(by_place[last, "p0"][RATE])
    for name, member in members_of(trainer).items():
        assert member.bindings == {key: by_place[last, name][key] for key in (RATE, "PPO.entropy_coef")}
        assert member.algorithm is trainer.algorithm.get_submodule(name)


@pytest.mark.parametrize(
    "algorithm, batches, stops", [(PPO, EPOCHS, (60, 200, 210)), (DQN, REPLAY, (210,))], ids=["PPO", "DQN"]
)
def test_a_run_stopped_at_any_point_resumes_bit_for_bit(tmp_path, algorithm, batches, stops):
    make = functools.partial(JointPopulation, {RATE: "1e-6..1e-1"}, period=150)
    saver = functools.partial(CheckpointSaver, period=10**9)
    given = {"algorithm": algorithm, "batches": batches, "num_iterations": 8}
    whole = trainer_of(tmp_path / "whole", make(), listeners=[saver()], **given)
    whole.train()
    for stop_at in (*stops, None):
        own = make(), [saver()]
        parts = trainer_of(tmp_path / "parts", own[0], listeners=own[1], stop_at=stop_at, **given)
        parts.train()
    torch.testing.assert_close(state_of(parts)[0], state_of(whole)[0], rtol=0, atol=0)
    assert state_of(parts)[1] == state_of(whole)[1]
    assert parts.metrics.results() == whole.metrics.results()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert any(row["parent"] not in ("", row["member"]) for row in rows_of(tmp_path / "whole"))


def test_a_policy_can_take_over_networks_but_not_rows(tmp_path):
    gin.bind_parameter("p1/Learner.learning_rate", 1e-2)
    trainer = trainer_of(tmp_path, algorithm=DQN, batches=REPLAY)
    for _ in trainer.iterate():
        pass
    one, other = (members_of(trainer)[name] for name in ("p0", "p1"))
    before = one.batches.stored(), one.metrics.results(), one.num_steps, one.learner.updates, one.stream.state_dict()
    rows = [leaf.clone() for leaf in before[0].values() if isinstance(leaf, torch.Tensor)]
    trainer.unroller.rebuild(one, {RATE: "0.5"}, other)
    networks = [dict(member.algorithm.named_parameters()) for member in (one, other)]
    torch.testing.assert_close(*networks, rtol=0, atol=0)
    optimizers = [member.learner.state_dict()["optimizers"] for member in (one, other)]
    torch.testing.assert_close(*optimizers, rtol=0, atol=0)
    after = one.batches.stored()
    for mine, kept in zip([leaf for leaf in after.values() if isinstance(leaf, torch.Tensor)], rows, strict=True):
        assert torch.equal(mine, kept)
    assert (one.metrics.results(), one.num_steps, one.learner.updates) == before[1:4]
    torch.testing.assert_close(one.stream.state_dict(), before[4], rtol=0, atol=0)
    assert gin.query_parameter("p1/Learner.learning_rate") == 1e-2
    with pytest.raises(ValueError):
        gin.query_parameter("p0/Learner.learning_rate")


def test_a_copy_takes_the_value_of_a_measured_learning_rate(tmp_path):
    gin.parse_config("""
        Learner.learning_rate = @Feedback()
        Feedback.scalar = 'train/p0/entropy'
        Feedback.target = 0.0
        Feedback.initial = 1e-3
        Feedback.rate = -0.5
    """)
    trainer = trainer_of(tmp_path, summary_period=64)
    trainer.train()
    one, other = (members_of(trainer)[name] for name in ("p0", "p1"))
    rate = float(other.learner.learning_rates["all"].value)
    assert rate < 9e-4
    trainer.unroller.rebuild(one, {"PPO.lambda_": "0.9"}, other)
    assert float(one.learner.learning_rates["all"].value) == rate


def test_a_failed_copy_changes_nothing(tmp_path):
    trainer = trainer_of(tmp_path)
    one, other = trainer.unroller.members[:2]
    parts = dict(vars(one))
    with pytest.raises(UsageError, match="PPO.gamma is 2.0"):
        trainer.unroller.rebuild(one, {"PPO.gamma": "2.0"}, other)
    assert all(vars(one)[name] is part for name, part in parts.items())


def test_a_run_that_is_opened_to_act_has_the_settings_of_the_population(tmp_path):
    """Its learner has default settings, so it reads no learning rate."""
    trainer = trainer_of(tmp_path, learner=opening._without_settings)
    policy = members_of(trainer)["p0"]
    with pytest.raises(UsageError, match="no part of p0 reads Learner.learning_rate"):
        policy.rebuild({RATE: "0.1"})
    with opened_to_act():
        policy.rebuild({RATE: "0.1"})
    assert policy.bindings == {RATE: "0.1"}


def test_results_of_a_copy_begin_again(tmp_path):
    class Windows(Listener):
        def after_iteration(self, run, report):
            for name, member in members_of(trainer).items():
                found[name].append(member.metrics.windows()["average_return"].mean_and_variance())

    found = {name: [] for name in ("p0", "p1", "p2", "p3")}
    population = POPULATION(first=200, period=10**6)
    trainer = trainer_of(tmp_path, population, extra_listeners=[Windows()])
    trainer.train()
    (copy,) = [row["member"] for row in rows_of(tmp_path) if row["parent"] not in ("", row["member"])]
    for name, windows in found.items():
        first = next(index for index, one in enumerate(windows) if one is not None)
        assert (None in windows[first:]) == (name == copy)


def test_new_policies_have_their_own_value_kept_policies_the_configured_one(tmp_path):
    gin.parse_config(f"{RATE} = 0.5\np1/{RATE} = 2e-3\nPPO.gamma = 0.97")
    population = JointPopulation({RATE: "1e-3..1e-2", "PPO.gamma": "0.9..0.99"}, period=200, keeps="p0")
    trainer = trainer_of(tmp_path, population, num_iterations=6)
    trainer.train()
    first = {row["member"]: row for row in rows_of(tmp_path) if row["generation"] == "0"}
    assert (first["p0"][RATE], first["p0"]["PPO.gamma"], first["p1"][RATE]) == ("0.5", "0.97", "0.002")
    assert len({row[RATE] for row in first.values()}) == 4 and 1e-3 <= float(first["p2"][RATE]) <= 1e-2
    kept = [row for row in rows_of(tmp_path) if row["member"] == "p0"]
    assert {row["parent"] for row in kept} == {"", "p0"} and {row[RATE] for row in kept} == {"0.5"}


def test_a_perturbed_list_entry_affects_the_copy(tmp_path):
    gin.parse_config("PPO.reward_weights = [1.0, 0.5]")
    rewards = {"own": "reward", "time": "info:time"}
    environment = functools.partial(make_games, Kept, num_games=4, rewards=rewards)
    name = "PPO.reward_weights[1]"
    population = JointPopulation({name: "0.01..1"}, "metrics/average_return/time", period=200)
    trainer = trainer_of(tmp_path, population, listeners=[CheckpointSaver()], environment=environment, num_iterations=6)
    trainer.train()
    assert any(row["parent"] not in ("", row["member"]) for row in rows_of(tmp_path))
    for member in trainer.unroller.members:
        expected = torch.tensor([1.0, float(member.bindings[name])])
        torch.testing.assert_close(member.algorithm.reward_weights.cpu(), expected, rtol=1e-6, atol=0)
    again = trainer_of(tmp_path, JointPopulation({name: "0.01..1"}, "metrics/average_return/time", period=200),
                       listeners=[CheckpointSaver()], environment=environment)  # fmt: skip
    again.load_policy()
    assert [one.bindings for one in again.unroller.members] == [one.bindings for one in trainer.unroller.members]
    torch.testing.assert_close(again.algorithm.state_dict(), trainer.algorithm.state_dict(), rtol=0, atol=0)
    assert gin.query_parameter("PPO.reward_weights") == [1.0, 0.5]


def test_policies_are_compared_by_evaluations(tmp_path):
    evaluate = functools.partial(Evaluate, period=200, num_episodes=8, num_envs=4)
    make = functools.partial(JointPopulation, {RATE: "1e-6..1e-1"}, "evaluation/mean_return", period=200)
    trainer_of(tmp_path / "whole", make(), listeners=[evaluate(), CheckpointSaver()], num_iterations=8).train()
    for stop_at in (200, None):
        given = {"listeners": [evaluate(), CheckpointSaver()], "num_iterations": 8, "stop_at": stop_at}
        trainer_of(tmp_path / "parts", make(), **given).train()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole") != []
    returns = {}
    for row in csv.DictReader((tmp_path / "whole/eval/evaluation-000000000200.csv").read_text().splitlines()):
        for name in ("p0", "p1", "p2", "p3"):
            if row[f"return/{name}"]:
                returns.setdefault(name, []).append(float(row[f"return/{name}"]))
    shown = {row["member"]: float(row["value"]) for row in rows_of(tmp_path / "whole") if row["generation"] == "1"}
    assert shown == pytest.approx({name: np.mean(own) for name, own in returns.items()})


def test_agents_of_their_own_are_groups_of_their_own(tmp_path):
    policies = {"x": ("a", 2), "y0": ["b", "c"], "y1": ["b", "c"]}
    trainer = trainer_of(tmp_path, POPULATION(share=0.5), policies=policies, num_iterations=6)
    trainer.train()
    assert {row["parent"][:1] for row in rows_of(tmp_path) if row["member"].startswith("x")} == {"", "x"}
    assert {row["parent"][:1] for row in rows_of(tmp_path) if row["member"].startswith("y")} == {"", "y"}


@pytest.mark.parametrize(
    "bound, given, sentence",
    [
        ("", {"perturb": {RATE: "1e-2..1e-4"}}, "the range is upside down; write 1e-4..1e-2"),
        ("", {"perturb": {RATE: "fast"}}, r"perturb\['Learner.learning_rate'\] = 'fast': bounds are LOW..HIGH"),
        ("", {"perturb": {}}, "JointPopulation.perturb is empty"),
        ("", {"perturb": {"PPO.gama": "0.9..0.99"}}, "PPO.gama is not a parameter .*have a parameter named 'gama'"),
        ("", {"perturb": {"PPO.gamma": "0.9..1.5"}}, r"PPO.gamma is 1.5; it must be a number in \[0, 1\]"),
        ("", {"perturb": {"DQN.gamma": "0.9..0.95"}}, "no part of p0 reads DQN.gamma: no part has this"),
        ("", {"perturb": {"Trainer.unroll_length": "8..16"}}, "no part of p0 reads Trainer.unroll_length"),
        ("", {"perturb": {"PPO.reward_weights[1]": "0.1..1"}}, r"weights\[1\] has no such entry: the value is None"),
        ("p1/Learner.learning_rate = 0.5", {}, "p1 begins with Learner.learning_rate = 0.5, and JointPopulation"),
        ("", {"objective": "metrics/win"}, "objective is 'metrics/win', and the policies have metrics/average_return,"),
        ("", {"objective": "evaluation/mean_return"}, "objective is 'evaluation/mean_return', and the policies have"),
        ("", {"share": 0.2}, r"share is 0.2, which of 4 policies \(p0, p1, p2, p3\) is less than one"),
        ("", {"among": ["p0", "q"]}, "JointPopulation.among names q; the policies are p0, p1, p2, p3"),
        ("p3/PolicySettings.trains = False", {"among": ["p0", "p3"]}, "among names p3, which does not train; leave"),
        ("p3/PolicySettings.trains = False", {"keeps": "p3"}, "keeps names p3, which does not train"),
        ("", {"among": ["p0"]}, "needs two policies that train and may play the same agents"),
        ("", {"perturb": {"MLP.layers[0]": "9..64"}}, r"p0 with another MLP.layers\[0\]: \S+ is"),
        ("p2/MLP.layers = (16,)", {}, r"p2 cannot continue from p0: \S+ is \[8, 4\] float32 in p0 and \[16, 4\]"),
        ("p1/PolicySettings.algorithm = @DQN\np1/PolicySettings.batches = @ReplayBatches", {}, "DQN is not PPO"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_in_one_sentence_at_the_start(tmp_path, bound, given, sentence):
    gin.parse_config(bound)
    with pytest.raises(UsageError, match=sentence) as raised:
        population = JointPopulation(**{"perturb": {RATE: "1e-5..1e-2"}, "period": 200, **given})
        trainer_of(tmp_path, population).train()
    assert "\n" not in str(raised.value)


def test_a_run_of_one_policy_has_no_population(tmp_path):
    with pytest.raises(UsageError, match="JointPopulation needs several policies in one run"):
        trainer_of(tmp_path, POPULATION(), policies={"x": "*"}).train()


@pytest.mark.slow
def test_a_population_lifts_the_policies_with_bad_learning_rates(tmp_path):
    """Each policy against an opponent that acts at random; two equal players of dash have 0."""
    found = {}
    for name, population in (("alone", None), ("population", JointPopulation({RATE: "1e-6..1e-2"}, period=8_000))):
        gin.clear_config()
        gin.parse_config("Learner.compile = False\nEpochBatches.num_epochs = 4\nEpochBatches.minibatch_size = 128")
        for policy, rate in enumerate([1e-6, 3e-6, 2e-3, 1e-5]):
            gin.bind_parameter(f"p{policy}/{RATE}", rate)
        environment = functools.partial(make_games, Dash, num_games=16)
        given = {"batches": EpochBatches, "unroll_length": 64, "num_iterations": None, "num_env_steps": 64_000}
        trainer = trainer_of(tmp_path / name, population, environment=environment, **given)
        trainer.train()
        members, lineup = trainer.unroller.members, trainer.unroller.lineup
        found[name] = []
        for member in members:
            games = make_games(Dash, num_games=16, seed=7)
            evaluator = GameEvaluator(games, members, lineup, {"left": member.name, "right": "random"})
            found[name].append(np.nanmean(evaluator.evaluate(160).by_objective[member.name]))
    print(found)
    assert min(found["population"]) > 0.8 and min(found["alone"]) < 0.7
