"""Several policies whose games workers step: equal to separate runs without interaction, no row lost or doubled."""

import functools
import os
import signal
import time

import gin
import numpy as np
import pytest
import torch
import worker_games
from toy_games import Kept, Meeting
from worker_games import Constant, Faulty, Marked, NotCorrecting, OffPolicyWalker, RememberingWalker, Walker

from alfish import nest
from alfish.algorithms.appo import APPO
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import StepType, trainable
from alfish.environments.games import make_games
from alfish.errors import RunError, UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble
from alfish.training.joint_population import JointPopulation
from alfish.training.leagues import Snapshots
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer
from alfish.unrollers import AsyncUnroller, SyncUnroller, Workers

EPOCHS = functools.partial(EpochBatches, num_epochs=1, minibatch_size=16)
REPLAY = functools.partial(ReplayBatches, batch_size=16, warmup_env_steps=60, capacity=1000, updates_per_env_step=0.25)
QUICK = functools.partial(Workers, close_timeout=2.0)


def workers(num_workers=2, mode="lockstep", **settings):
    return functools.partial(AsyncUnroller, num_workers=num_workers, mode=mode, workers=QUICK, **settings)


@pytest.fixture
def made():
    """Builds trainers, and closes them."""
    trainers = []

    def make(root_dir, game=Meeting, policies="each", game_kwargs=None, num_games=2, **changed):
        given = {"algorithm": Walker, "batches": EPOCHS, "unroller": workers(), "num_iterations": 8}
        given |= {"unroll_length": 16, "listeners": [], "device": "cpu", "summary_period": 10**9}
        environment = functools.partial(make_games, game, num_games=num_games, game_kwargs=game_kwargs)
        trainers.append(Trainer(root_dir, environment=environment, policies=policies, **{**given, **changed}))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


def run(trainer):
    for report in trainer.iterate():
        last = report
    return last


def in_settings(**by_policy):
    """Binds settings of policies: `in_settings(x={"algorithm": DQN})`."""
    for name, values in by_policy.items():
        for key, value in values.items():
            gin.bind_parameter(f"{name}/PolicySettings.{key}", value)


def state_of(trainer):
    parts = trainer.algorithm.state_dict(), trainer.transforms.state_dict(), trainer.learner.state_dict()
    return parts, trainer.metrics.results()


def members_of(trainer):
    return {member.name: member for member in trainer.unroller.members}


SMALL_SAC = functools.partial(
    SAC, actor_mlp=functools.partial(MLP, layers=(8,)), critic=functools.partial(CriticEnsemble, layers=(8,))
)
CASE = {"pole": (SMALL_SAC, REPLAY), "cart": (APPO, EPOCHS)}


def test_policies_of_separate_environments_equal_lockstep_runs_of_their_own(tmp_path):
    given = {"transforms": [ObservationNormalizer], "learner": functools.partial(Learner, learning_rate=1e-3)}
    given |= {"num_iterations": 5, "unroll_length": 16, "listeners": [], "device": "cpu", "summary_period": 10**9}
    given |= {"unroller": workers()}
    for seed, (name, (algorithm, batches)) in enumerate(CASE.items(), 3):
        in_settings(**{name: {"seed": seed, "algorithm": algorithm, "batches": batches}})
    environments = functools.partial(worker_games.side_by_side, list(CASE))
    together = Trainer(tmp_path / "joint", environment=environments, policies="each", algorithm=APPO, **given)
    again = Trainer(tmp_path / "again", environment=environments, policies="each", algorithm=APPO, **given)
    for trainer in (together, again):
        run(trainer)
        trainer.close()
    torch.testing.assert_close(state_of(again), state_of(together), rtol=0, atol=0, equal_nan=True)
    gin.clear_config()
    for seed, (name, (algorithm, batches)) in enumerate(CASE.items(), 3):
        made = functools.partial(worker_games.environment, name)
        alone = Trainer(tmp_path / name, environment=made, algorithm=algorithm, batches=batches, seed=seed, **given)
        run(alone)
        alone.close()
        member = members_of(together)[name]
        for found, expected in ((member.algorithm, alone.algorithm), (member.transforms, alone.transforms)):
            both = [{key: value for key, value in each.state_dict().items() if key != "progress"}
                    for each in (found, expected)]  # fmt: skip
            torch.testing.assert_close(*both, rtol=0, atol=0)
        torch.testing.assert_close(member.learner.state_dict(), alone.learner.state_dict(), rtol=0, atol=0)
        assert member.metrics.results() == alone.metrics.results()
        assert (member.learner.updates, member.num_steps) == (alone.clock.updates, alone.clock.env_steps)
        assert alone.clock.updates > 0


def transitions(experience):
    """Yields (column, observation, action, observation after it) of each row that trains."""
    step = nest.tensors(experience.time_step)
    for t, column in trainable(step.step_type).nonzero().tolist():
        after = step.observation[t + 1, column].tolist()
        assert after[:3] == (step.observation[t, column, :3] + torch.tensor([0, 0, 1])).tolist()
        assert step.prev_action[t + 1, column] == experience.action[t][column]
        yield int(step.env_id[t, column]), tuple(step.observation[t, column].tolist())


LINEUPS = {"each": "each", "drawn": {"x": "*", "y": "*", "z": "*"}}


@pytest.mark.parametrize("algorithm", [Walker, OffPolicyWalker])
@pytest.mark.parametrize("lineup", LINEUPS)
def test_each_move_trains_once_in_the_policy_that_chose_it(made, tmp_path, lineup, algorithm):
    trainer = made(tmp_path, policies=LINEUPS[lineup], algorithm=algorithm, batches=None)
    found, counted, players = [], 0, {}
    for _ in range(6):
        for name, experience in trainer.unroller.unroll(16).items():
            step_type = experience.time_step.step_type
            assert not ((step_type[:-1] == StepType.PAD) & (step_type[1:] != StepType.PAD)).any()
            rows = list(transitions(experience))
            found += rows
            for column, observation in rows:
                game = column if lineup == "each" else column // 3
                players.setdefault((game, observation[3]), {}).setdefault(observation[0], set()).add(name)
        counted += trainer.unroller.num_steps
        trainer.unroller.publish()
    assert len(set(found)) == len(found)
    # Off-policy, the row after the last move of an unroll is in the next unroll.
    assert counted == len(found) if algorithm.on_policy else 0 < counted - len(found) <= 6 * 12
    assert all(len(names) == 1 for game in players.values() for names in game.values())
    assert {column for column, _ in found} == set(range(4 if lineup == "each" else 12))


def test_rows_of_a_worker_that_filled_several_segments_have_no_gaps(made, tmp_path):
    trainer = made(tmp_path, algorithm=OffPolicyWalker, batches=None, unroller=workers(mode="free", slots=4))
    found, longest, began = [], 0, time.monotonic()
    while longest < 48 and time.monotonic() - began < 60:
        time.sleep(0.3)
        for experience in trainer.unroller.unroll(16).values():
            step_type = experience.time_step.step_type
            longest = max(longest, len(step_type))
            assert not ((step_type[:-1] == StepType.PAD) & (step_type[1:] != StepType.PAD)).any()
            found += list(transitions(experience))
    assert longest >= 48 and len(set(found)) == len(found)


def lineup_of(trainer, num_unrolls):
    """Returns the policy that played each agent (column of all games) in each game (number of its reset)."""
    found = {}
    for _ in range(num_unrolls):
        for name, experience in trainer.unroller.unroll(16).items():
            step = experience.time_step
            for t, column in np.argwhere(step.step_type != StepType.PAD).tolist():
                game = int(step.observation[t, column, 1])
                found.setdefault((int(step.env_id[t, column]), game), set()).add(name)
        trainer.unroller.publish()
    return found


def test_lineups_do_not_depend_on_the_number_of_workers(made, tmp_path):
    policies = {"x": "*", "y": "*", "z": "*"}
    here = made(tmp_path / "a", policies=policies, num_games=4, unroller=SyncUnroller)
    two = made(tmp_path / "b", policies=policies, num_games=2)
    four = made(tmp_path / "c", policies=policies, num_games=2, unroller=workers(4, envs_per_worker=1))
    first, *others = (lineup_of(trainer, 4) for trainer in (here, two, four))
    assert len(first) > 40 and len({name for names in first.values() for name in names}) == 3
    assert others == [first, first]


def test_counts_include_all_workers(made, tmp_path):
    in_settings(b={"algorithm": OffPolicyWalker, "batches": REPLAY})
    trainer = made(tmp_path, unroller=workers(3, mode="free", segments_per_unroll=2, envs_per_worker=4))
    columns = {name: member.num_columns for name, member in members_of(trainer).items()}
    assert columns == {"a": 8, "b": 12, "c": 8}  # on-policy of two segments, off-policy of three workers
    assert trainer.unroller.num_envs == 12 and trainer.unroller.num_columns == 24
    unroll = trainer.unroller.unroll(16)
    assert {name: rows.time_step.step_type.shape for name, rows in unroll.items()} == {
        "a": (17, 8),
        "b": (unroll["b"].time_step.step_type.shape[0], 12),
        "c": (17, 8),
    }
    assert all(records.step_type.shape[1] == 12 for records in trainer.unroller.records)


def test_a_run_of_each_kind_of_policy_trains(made, tmp_path):
    in_settings(b={"trains": False}, c={"algorithm": DQN, "batches": REPLAY})
    trainer = made(tmp_path, algorithm=APPO, unroller=workers(mode="free"))
    before = {name: value.clone() for name, value in trainer.algorithm.b.state_dict().items()}
    report = run(trainer)
    members = members_of(trainer)
    assert members["a"].learner.updates and members["c"].learner.updates
    assert all(torch.equal(value, before[name]) for name, value in trainer.algorithm.b.state_dict().items()
               if name != "progress")  # fmt: skip
    assert trainer.clock.env_steps == members["a"].num_steps + members["c"].num_steps
    assert {"metrics/a/average_return", "metrics/b/average_return", "unroller/lag_mean"} <= report.scalars.keys()
    assert members["b"].num_steps > 0


def test_frozen_policies_are_published_once_and_snapshots_each_time(made, tmp_path):
    in_settings(b={"trains": False}, c={"snapshot_of": "a"})
    trainer = made(tmp_path, extra_listeners=[Snapshots(period=50)])
    trainer.unroller.unroll(16)
    sent = trainer.unroller.collector._acting.sent()
    addresses = {tensor.data_ptr() for tensor in sent.tensors()}
    weights = {name: one.algorithm.weight.data_ptr() for name, one in members_of(trainer).items()}
    assert {name for name, address in weights.items() if address in addresses} == {"a", "c"}
    assert len(sent.tensors()) == 3  # two weights, and the progress that all share
    with torch.no_grad():
        for member in members_of(trainer).values():
            member.algorithm.weight.fill_(5.0)
    trainer.unroller.publish()
    for _ in range(3):
        found = trainer.unroller.unroll(16)
    assert set(found["a"].info["weight"].ravel()) == {5.0}
    assert found.keys() == {"a"}


def test_rows_that_are_too_old_are_masked_for_on_policy_policies_that_train(made, tmp_path):
    in_settings(b={"algorithm": OffPolicyWalker, "batches": REPLAY}, c={"trains": False})
    trainer = made(tmp_path, unroller=workers(max_policy_lag=1))
    for _ in range(3):
        unroll = trainer.unroller.unroll(16)
        assert (unroll["a"].time_step.step_type != StepType.PAD).any()
    trainer.unroller.policy_version = 5
    unroll = trainer.unroller.unroll(16)
    assert (unroll["a"].time_step.step_type == StepType.PAD).all() and unroll.keys() == {"a", "b"}
    assert (unroll["b"].time_step.step_type != StepType.PAD).any()
    assert all((records.step_type != StepType.PAD).any() for records in trainer.unroller.records)
    stats = trainer.unroller.stats()
    assert stats["masked_rows"] == stats["a/masked_rows"] == 16 * 4 and "b/masked_rows" not in stats
    assert stats["lag_max"] == 5


def test_policies_act_at_random_where_their_batches_ask_for_it(made, tmp_path):
    trainer = made(tmp_path, algorithm=Constant, batches=None)
    rows = [trainer.unroller.unroll(16, at_random) for at_random in (["a"], ["a"], [], [])]
    found = {name: [len(set(each[name].action.ravel())) > 1 for each in rows] for name in "abc"}
    # A segment is granted an iteration before it is taken.
    assert found == {"a": [True, True, True, False], "b": [False] * 4, "c": [False] * 4}


@pytest.mark.parametrize("kind", ["raise", "nan", "shape", "reward"])
def test_a_game_that_fails_is_built_again_as_a_whole(made, tmp_path, kind):
    once = str(tmp_path / "once")
    lines = []
    trainer = made(tmp_path / "run", Faulty, game_kwargs={"kind": kind, "once": once})
    trainer.unroller.log = lines.append
    found = {}
    for _ in range(4):
        for name, experience in trainer.unroller.unroll(16).items():
            step = experience.time_step
            list(transitions(experience))
            for column in range(step.step_type.shape[1]):
                own = found.setdefault((int(step.env_id[0, column]), name), [])
                rows = zip(step.step_type[:-1, column], step.observation[:-1, column].tolist())
                own += [(int(kind), row[:3]) for kind, row in rows if kind != StepType.PAD]
        trainer.unroller.publish()
    assert trainer.unroller.collector.num_env_errors == 1
    (line,) = [line for line in lines if "failed and is replaced" in line]
    game = int(line.split()[1])
    assert line.startswith("game ") and "Traceback" in line
    # Agent b has just appeared. The episodes of the others end with the rows that were acted from.
    for (number, name), rows in found.items():
        place = next(t for t, (_, row) in enumerate(rows) if row[1:] == [1, 2])
        expected = StepType.FIRST if name == "b" else StepType.LAST if number == game else StepType.MID
        following = [1, 3] if number != game else [0, 2] if name == "b" else [0, 0]
        assert rows[place][0] == expected and rows[place + 1][1][1:] == following


def test_too_many_errors_of_games_end_the_run(made, tmp_path):
    trainer = made(tmp_path, Faulty, unroller=workers(max_env_errors=2))
    with pytest.raises(RunError, match="That is error 3 of games in this run, more than AsyncUnroller.max_env_errors"):
        for _ in range(20):
            trainer.unroller.unroll(16)


def test_without_max_env_errors_an_error_ends_the_worker_which_is_started_again(made, tmp_path):
    game_kwargs = {"kind": "raise", "once": str(tmp_path / "once")}
    trainer = made(tmp_path / "run", Faulty, game_kwargs=game_kwargs, unroller=workers(max_env_errors=None))
    for _ in range(4):
        trainer.unroller.unroll(16)
    assert trainer.unroller.stats()["restarts"] == 1


def test_a_worker_that_is_killed_is_replaced(made, tmp_path):
    trainer = made(tmp_path, policies=LINEUPS["drawn"], unroller=workers(mode="free"))
    found = []

    def unroll(number):
        for _ in range(number):
            found.extend(row for experience in trainer.unroller.unroll(16).values() for row in transitions(experience))

    unroll(3)
    os.kill(trainer.unroller.collector._workers.all[0].process.pid, signal.SIGKILL)
    for _ in range(10_000):  # on a fast machine, the other worker fills several unrolls before the death is found
        if trainer.unroller.stats()["restarts"]:
            break
        unroll(1)
    unroll(3)
    assert trainer.unroller.stats()["restarts"] == 1 and len(set(found)) == len(found)


def test_a_run_with_workers_continues_from_its_checkpoint(made, tmp_path):
    in_settings(c={"algorithm": DQN, "batches": REPLAY})
    for stop_at in (150, 400, None):
        trainer = made(tmp_path, Kept, algorithm=APPO, listeners=[CheckpointSaver()], stop_at=stop_at)
        trainer.train()
    assert trainer.clock.iterations == 8
    members = members_of(trainer)
    assert trainer.clock.env_steps == sum(member.num_steps for member in members.values())
    assert trainer.unroller.state_dict()["generation"] == 2 and trainer.unroller.policy_version == 8
    assert all(member.learner.updates > 0 for member in members.values())


@pytest.mark.parametrize("kinds", [(SyncUnroller, workers()), (workers(), SyncUnroller)])
def test_a_run_continues_with_another_unroller_of_as_many_games(made, tmp_path, kinds):
    kinds = [functools.partial(each, envs_per_worker=1) if each is not SyncUnroller else each for each in kinds]
    for unroller, stop_at in zip(kinds, (100, None)):
        settings = {"algorithm": APPO, "listeners": [CheckpointSaver()], "unroller": unroller, "stop_at": stop_at}
        trainer = made(tmp_path, Kept, **settings)
        trainer.train()
    assert trainer.clock.iterations == 8
    assert trainer.clock.env_steps == sum(member.num_steps for member in trainer.unroller.members)


def test_a_rebuilt_policy_uses_new_settings_in_new_games(made, tmp_path):
    trainer = made(tmp_path, algorithm=Marked)
    members = members_of(trainer)
    first = [trainer.unroller.unroll(16) for _ in range(2)]
    with torch.no_grad():
        members["a"].algorithm.weight.fill_(3.0)
    trainer.unroller.rebuild(members["b"], {"Marked.mark": "2.0"}, parent=members["a"])
    trainer.unroller.rebuild(members["c"], {"Marked.mark": "4.0"}, parent=members["c"])
    found = trainer.unroller.unroll(16)
    assert {name: set(rows.info["mark"].ravel()) for name, rows in found.items()} == {"a": {1}, "b": {2}, "c": {4}}
    assert {name: set(rows.info["weight"].ravel()) for name, rows in found.items()} == {"a": {3}, "b": {3}, "c": {0}}
    assert (found["a"].time_step.observation[0, :, 1:3] == 0).all()
    assert not np.array_equal(found["a"].time_step.observation[0, :, 3], first[0]["a"].time_step.observation[0, :, 3])
    assert trainer.unroller.state_dict()["generation"] == 1
    with torch.no_grad():
        members["b"].algorithm.weight.fill_(7.0)
    trainer.unroller.publish()
    rows = [trainer.unroller.unroll(16)["b"] for _ in range(3)]
    assert set(rows[-1].info["weight"].ravel()) == {7.0}


def test_a_population_trains_with_workers(made, tmp_path):
    population = JointPopulation({"Learner.learning_rate": "1e-4..1e-1"}, period=100, share=0.5)
    settings = {"policies": {"p": ("*", 2)}, "learner": Learner, "extra_listeners": [population]}
    trainer = made(tmp_path, num_iterations=3, **settings)
    trainer.train()
    assert trainer.clock.iterations == 3 and trainer.unroller.state_dict()["generation"] >= 1
    assert len((tmp_path / "members.csv").read_text().splitlines()) > 4


class TestSettings:
    def test_an_on_policy_policy_that_does_not_correct_is_named(self, made, tmp_path):
        in_settings(b={"algorithm": NotCorrecting})
        with pytest.raises(UsageError, match="NotCorrecting of the policy b is on-policy and does not correct"):
            made(tmp_path)
        in_settings(b={"trains": False})
        made(tmp_path)

    def test_ppo_is_named(self, made, tmp_path):
        with pytest.raises(UsageError, match="PPO of the policy a is on-policy .* train with APPO"):
            made(tmp_path, algorithm=PPO)

    @pytest.mark.parametrize("setting", ["overwrite_policy_output", "stagger"])
    def test_settings_of_a_single_policy_are_refused(self, made, tmp_path, setting):
        with pytest.raises(UsageError, match=f"AsyncUnroller.{setting} is for a single policy"):
            made(tmp_path, unroller=workers(**{setting: 1}))

    def test_a_memory_off_policy_beside_an_on_policy_policy_needs_lockstep(self, made, tmp_path):
        in_settings(b={"algorithm": RememberingWalker, "batches": REPLAY})
        with pytest.raises(UsageError, match="RememberingWalker of the policy b is off-policy and has a memory"):
            made(tmp_path, unroller=workers(mode="free"))
        made(tmp_path, unroller=workers(mode="lockstep"))

    def test_lengths_of_segments_and_unrolls_are_equal(self, made, tmp_path):
        with pytest.raises(UsageError, match="on-policy the two must be equal"):
            made(tmp_path, unroller=workers(unroll_length=8))
