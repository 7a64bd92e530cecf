"""Several policies in one run: with games in which no agent affects another, each is bit-equal to a run of its own."""

import functools

import gin
import pytest
import torch
from calls import python_calls
from gymnasium import spaces
from toy_games import Dash, Kept, Meeting

from alfish.algorithms.appo import APPO
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.environments import make_environment
from alfish.environments.games import ParallelGames, SideBySide, make_games
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.metrics import AverageReturn, EnvInfo
from alfish.offline import OfflineBuffer
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer
from alfish.unrollers import AsyncUnroller, CompiledUnroller, HostUnroller

EPOCHS = functools.partial(EpochBatches, num_epochs=1, minibatch_size=16)
REPLAY = functools.partial(ReplayBatches, batch_size=16, warmup_env_steps=60, capacity=1000, updates_per_env_step=0.1)
TASKS = {"cart": ("CartPole-v1", 4), "pole": ("Pendulum-v1", 2), "car": ("MountainCar-v0", 3)}
CASES = {
    "two of PPO": {"cart": (PPO, EPOCHS), "pole": (PPO, EPOCHS)},
    "PPO and DQN": {"cart": (PPO, EPOCHS), "car": (DQN, REPLAY)},
    "SAC, PPO and DQN": {"pole": (SAC, REPLAY), "cart": (PPO, EPOCHS), "car": (DQN, REPLAY)},
}


def environment(name, **_):
    env_id, num_envs = TASKS[name]
    return make_environment(env_id, num_envs=num_envs, seed=len(name))


def games_of(names):
    def make(seed=0, num_envs=None, evaluation=False, render_mode=None):
        return SideBySide({name: environment(name) for name in names})

    return make


def settings(root_dir, **changed):
    transforms = [ObservationNormalizer]
    given = {"num_iterations": 12, "unroll_length": 16, "listeners": [], "transforms": transforms, "device": "cpu"}
    given["summary_period"] = 10**9  # the losses since the last summary are in a learner's state
    return {"root_dir": root_dir, "learner": functools.partial(Learner, learning_rate=1e-3), **given, **changed}


def joint(root_dir, case, **changed):
    """Returns a trainer of all policies of a case."""
    for number, (name, (algorithm, batches)) in enumerate(case.items()):
        gin.bind_parameter(f"{name}/PolicySettings.seed", number + 3)
        gin.bind_parameter(f"{name}/PolicySettings.algorithm", algorithm)
        gin.bind_parameter(f"{name}/PolicySettings.batches", batches)
    first = next(iter(case.values()))[0]
    return Trainer(environment=games_of(case), policies="each", algorithm=first, **settings(root_dir, **changed))


def separate(root_dir, case, name, **changed):
    """Returns a trainer of one policy of a case."""
    algorithm, batches = case[name]
    made = functools.partial(environment, name)
    seed = list(case).index(name) + 3
    given = settings(root_dir / name, **changed)
    return Trainer(environment=made, algorithm=algorithm, batches=batches, seed=seed, **given)


def run(trainer):
    for report in trainer.iterate():
        last = report
    return last


def check_equal(together, alone, name):
    member = next(one for one in together.unroller.members if one.name == name)
    for found, expected in ((member.algorithm, alone.algorithm), (member.transforms, alone.transforms)):
        expected = {key: value for key, value in expected.state_dict().items() if key != "progress"}
        found = {key: value for key, value in found.state_dict().items() if key != "progress"}
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(member.learner.state_dict(), alone.learner.state_dict(), rtol=0, atol=0)
    assert member.metrics.results() == alone.metrics.results()
    assert (member.learner.updates, member.num_steps) == (alone.clock.updates, alone.clock.env_steps)


@pytest.mark.parametrize("case", CASES)
def test_policies_of_separate_environments_equal_runs_of_their_own(tmp_path, case):
    case = CASES[case]
    together = joint(tmp_path / "joint", case, num_iterations=4)
    run(together)
    assert together.clock.updates == sum(member.learner.updates for member in together.unroller.members)
    gin.clear_config()
    for name in case:
        alone = separate(tmp_path, case, name, num_iterations=4)
        run(alone)
        check_equal(together, alone, name)
        assert alone.clock.updates > 0


def test_the_order_of_policies_changes_no_bit(tmp_path):
    case = CASES["PPO and DQN"]
    one = joint(tmp_path / "one", case, num_iterations=4)
    run(one)
    gin.clear_config()
    reverse = dict(reversed(case.items()))
    other = joint(tmp_path / "other", reverse, num_iterations=4)
    for member in one.unroller.members:
        gin.bind_parameter(f"{member.name}/PolicySettings.seed", list(case).index(member.name) + 3)
    other = Trainer(
        environment=games_of(reverse), policies="each", algorithm=PPO, **settings(tmp_path / "third", num_iterations=4)
    )
    run(other)
    torch.testing.assert_close(one.algorithm.state_dict(), other.algorithm.state_dict(), rtol=0, atol=0)


def games_trainer(root_dir, game=Kept, policies="each", algorithm=PPO, batches=EPOCHS, **changed):
    given = {**settings(root_dir, **changed), "algorithm": algorithm, "batches": batches}
    environment = functools.partial(make_games, game, num_games=2)
    return Trainer(environment=environment, policies=policies, **given)


def in_settings(**by_policy):
    """Binds settings of policies: `in_settings(x={"algorithm": DQN})`."""
    for name, values in by_policy.items():
        for key, value in values.items():
            gin.bind_parameter(f"{name}/PolicySettings.{key}", value)


@pytest.mark.parametrize("lineup", [{"x": "a", "y": ["b", "c"]}, {"x": "*", "y": "*"}])
def test_a_resumed_run_is_bit_identical(tmp_path, lineup):
    in_settings(y={"algorithm": DQN, "batches": REPLAY})
    saver = functools.partial(CheckpointSaver, period=10**9)
    given = {"policies": lineup, "num_iterations": 6}
    whole = games_trainer(tmp_path / "whole", listeners=[saver()], **given)
    whole.train()
    for stop_at in (100, 300, None):
        parts = games_trainer(tmp_path / "parts", listeners=[saver()], stop_at=stop_at, **given)
        parts.train()
    assert parts.clock.iterations == whole.clock.iterations == 6
    torch.testing.assert_close(parts.algorithm.state_dict(), whole.algorithm.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(parts.transforms.state_dict(), whole.transforms.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(parts.learner.state_dict(), whole.learner.state_dict(), rtol=0, atol=0)
    assert parts.metrics.results() == whole.metrics.results()


def test_games_without_a_state_are_reset_after_a_resume(tmp_path):
    for stop_at in (100, None):
        trainer = games_trainer(tmp_path, Meeting, listeners=[CheckpointSaver()], stop_at=stop_at)
        trainer.train()
    assert trainer.clock.iterations == 12 and trainer.clock.updates > 0


def test_a_policy_that_does_not_train_keeps_its_bits(tmp_path):
    in_settings(b={"trains": False, "algorithm": DQN})  # whose rows would go into replay
    trainer = games_trainer(tmp_path)
    before = {name: value.clone() for name, value in trainer.algorithm.named_parameters()}
    run(trainer)
    after = dict(trainer.algorithm.named_parameters())
    assert {name.partition(".")[0] for name in after if not torch.equal(after[name], before[name])} == {"a", "c"}
    assert trainer.learner.state_dict()["policies"].keys() == {"a", "c"}
    members = {member.name: member for member in trainer.unroller.members}
    assert trainer.clock.env_steps == members["a"].num_steps + members["c"].num_steps


def test_all_policies_have_the_progress_of_the_run(tmp_path):
    trainer = games_trainer(tmp_path)
    report = run(trainer)
    progress = {float(getattr(trainer.algorithm, name).progress) for name in "abc"}
    assert progress == {float(trainer.algorithm.progress)} == {11 / 12} and report.progress == 1.0


def test_settings_in_the_scope_of_a_policy_are_its_own(tmp_path):
    gin.parse_config("Learner.learning_rate = 1e-3\nb/Learner.learning_rate = 5e-4\nc/MLP.layers = (8,)")
    trainer = games_trainer(tmp_path, learner=Learner)
    report = run(trainer)
    rates = {name: report.scalars[f"train/{name}/learning_rate"] for name in "abc"}
    assert rates == {"a": 1e-3, "b": 5e-4, "c": 1e-3}
    sizes = {name: sum(p.numel() for p in getattr(trainer.algorithm, name).parameters()) for name in "abc"}
    assert sizes["a"] == sizes["b"] > 4 * sizes["c"]


def test_replay_of_policies_is_saved_by_policy(tmp_path):
    in_settings(a={"algorithm": DQN, "batches": REPLAY})
    trainer = games_trainer(tmp_path, listeners=[CheckpointSaver()])
    trainer.train()
    assert trainer.batches.stored().keys() == {"a"}


def test_a_run_without_its_replay_collects_before_it_trains(tmp_path):
    num_rows = []

    class Watched(ReplayBatches):
        def chunks(self, steps, for_graph=False):
            for chunk in super().chunks(steps, for_graph):
                num_rows.append(self.buffer.num_rows)
                yield chunk

    replay = functools.partial(Watched, batch_size=16, warmup_env_steps=100, updates_per_env_step=0.25, save=False)
    given = {"game": Dash, "algorithm": DQN, "batches": replay, "num_iterations": 60}
    games_trainer(tmp_path, listeners=[CheckpointSaver()], stop_at=500, **given).train()
    num_rows.clear()
    games_trainer(tmp_path, listeners=[CheckpointSaver()], stop_at=900, **given).train()
    assert num_rows and num_rows[0] >= 100


@pytest.mark.parametrize(
    "changed, sentence",
    [
        (
            {"algorithm": DQN, "batches": REPLAY, "interaction_env_steps": 100},
            "Trainer.interaction_env_steps is for a single policy",
        ),
        (
            {"algorithm": DQN, "batches": functools.partial(REPLAY, offline=OfflineBuffer, offline_updates=3)},
            "the policy a has ReplayBatches.offline_updates, but with several policies all policies act",
        ),
        ({"unroll_length": 0.5}, "Trainer.unroll_length is 0.5; with several policies it must be an integer"),
        ({"extra_metrics": [object()]}, "object is not a metric; it has no name"),
        ({"policies": {"x": "q"}}, "which matches no agent"),
        (
            {"batches": functools.partial(EpochBatches, minibatch_size=4000)},
            "EpochBatches.minibatch_size is 4000, but an unroll has at most",
        ),
        (
            {"game": Dash, "algorithm": DQN, "batches": REPLAY, "num_iterations": 1},
            "Trainer.num_iterations is 1, which ends the run before its first update",
        ),
        ({"unroller": CompiledUnroller}, "Trainer.unroller collects for a single policy"),
        ({"unroller": HostUnroller}, "Trainer.unroller collects for a single policy"),
    ],
)
def test_settings_that_do_not_suit_several_policies_are_refused(tmp_path, changed, sentence):
    with pytest.raises(UsageError, match=sentence):
        games_trainer(tmp_path, **changed).train()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_policy_has_its_own_metrics(tmp_path, num_workers):
    workers = functools.partial(AsyncUnroller, num_workers=num_workers, mode="lockstep")
    given = {"unroller": workers, "algorithm": APPO} if num_workers else {}
    metric = EnvInfo(include=["time"])
    trainer = games_trainer(
        tmp_path, Meeting, num_iterations=3, metrics=[metric], extra_metrics=[AverageReturn()], **given
    )
    report = run(trainer)
    for name, low, high in (("a", 8, 8), ("b", 5, 7), ("c", 7, 7)):  # the times at which each agent's episodes end
        assert low <= report.scalars[f"metrics/{name}/env_info/time"] <= high
        assert f"metrics/{name}/average_return" in report.scalars
        assert f"metrics/{name}/average_episode_length" not in report.scalars  # because `metrics` leaves it out
    assert metric.result() == {}
    trainer.close()


def test_policies_need_games_and_one_that_trains(tmp_path):
    with pytest.raises(UsageError, match="Trainer.policies is set, but Trainer.environment makes CartPole"):
        Trainer(tmp_path, algorithm=PPO, environment=functools.partial(environment, "cart"), policies="each",
                num_iterations=1)  # fmt: skip
    in_settings(a={"trains": False}, b={"trains": False}, c={"trains": False})
    with pytest.raises(UsageError, match="no policy trains"):
        games_trainer(tmp_path)
    in_settings(a={"trains": True, "batches": REPLAY})
    with pytest.raises(UsageError, match="PPO of the policy a is on-policy, but its batches are ReplayBatches"):
        games_trainer(tmp_path)


def test_agents_with_different_spaces_need_policies_of_their_own(tmp_path):
    class Different(Meeting):
        def action_space(self, agent):
            return spaces.Discrete(3 if agent == "a" else 2)

    with pytest.raises(
        UsageError, match=r"different spaces, so one policy cannot play all.*{'p0': \['a'\], 'p1': \['b'"
    ):
        games_trainer(tmp_path, Different, policies=None)


def test_the_only_policy_of_games_is_shared(tmp_path):
    trainer = games_trainer(tmp_path, policies=None)
    run(trainer)
    assert [member.name for member in trainer.unroller.members] == ["shared"]
    assert trainer.policy().act(torch.zeros(4).numpy()) in (0, 1, 2)
    assert isinstance(trainer.environment.games, ParallelGames)


@pytest.mark.parametrize(("case", "most"), [("two of PPO", 1.25), ("PPO and DQN", 1.16), ("SAC, PPO and DQN", 1.18)])
def test_a_joint_step_makes_little_more_calls_than_separate_steps(tmp_path, case, most):
    def of_a_step(trainer):
        trainer.start()
        iterations = trainer.iterate()
        next(iterations), next(iterations)
        few, many = (python_calls(lambda n=n: trainer.unroller.unroll(n)) for n in (4, 20))
        trainer.close()
        return many - few

    together = of_a_step(joint(tmp_path / "joint", CASES[case]))
    apart = sum(of_a_step(separate(tmp_path, CASES[case], name)) for name in CASES[case])
    assert 0.9 * most < together / apart < most


def test_a_budget_in_updates_is_planned_by_the_updates_of_all_policies(tmp_path):
    """A short run stays plain, and its calibration takes a fraction of the steps that the updates need."""
    case = {"cart": (PPO, EPOCHS), "car": (DQN, REPLAY)}
    budget = {"num_updates": 90, "num_iterations": None, "calibration": 0.1}
    trainer = joint(tmp_path, case, learner=Learner, **budget)
    assert all(member.learner.is_plain for member in trainer.unroller.members)
    # An unroll has 16 steps: 4 minibatches of 16 rows in 4 environments, and 0.1 updates for each of 48 rows.
    num_unrolls = 90 / (4 + 0.1 * 48)
    assert trainer._parts.calibration.state_dict()["end"] == pytest.approx(0.1 * num_unrolls * 16 * 7)
