"""Several learners: what they divide and agree on, and that they train what one learner trains.

Learners are processes joined by gloo, as torchrun joins them. Each takes seconds to import torch, so one pair of
processes runs many cases.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from alfish.__main__ import main
from alfish.errors import RepeatedError, UsageError
from alfish.processes import replicas
from alfish.runs.checkpoints import Checkpoints
from benchmarks import PROJECT, stragglers
from benchmarks.replicas import ALGORITHMS, LEARNING_RATE, TABLE, Case, differences, of_learners, start, table
from benchmarks.tables import read_rows

TESTS = Path(__file__).parents[1]
PATH = os.pathsep.join(map(str, (TESTS.parent, TESTS / "tools", TESTS / "training")))
SECONDS = 240  # of a pair that hangs


class TestOneLearner:
    def test_single_learner_is_the_first_and_sums_return_their_arguments(self):
        values = torch.ones(3)
        assert replicas.total(values) is values and replicas.mean(values, values > 0) is values
        assert (replicas.rank(), replicas.size(), replicas.is_joined()) == (0, 1, False)
        assert replicas.gather(1, 2.5) == [[1, 2.5]] and replicas.of_first("text") == "text"
        assert replicas.fraction(7, "x") == 7 and replicas.seed_of(3) == 3
        replicas.check_equal({"weight": values})

    def test_variables_of_a_scheduler_do_not_start_learners(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with replicas.joined():
            assert not replicas.is_joined()

    def test_a_torch_without_functional_collectives_is_reported_in_one_sentence(self, monkeypatch):
        for name, value in zip(replicas.VARIABLES, ("0", "1", "0", "localhost", "0"), strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "torch.distributed._functional_collectives", None)
        monkeypatch.delattr(torch.distributed, "_functional_collectives", raising=False)
        with pytest.raises(UsageError, match="several learners need torch's functional collectives, which torch"):
            replicas.joined().__enter__()


class TestTwoLearners:
    @pytest.fixture(autouse=True)
    def group(self, monkeypatch):
        """The second of two learners, without another process: sums are twice the argument."""

        class Group:
            rank, size = 1, 2

            def sum(self, values):
                return 2 * values

        monkeypatch.setattr(replicas, "_group", Group())

    def test_a_number_of_the_run_is_divided(self):
        assert replicas.fraction(8, "x") == 4

    @pytest.mark.parametrize("count, nearest", [(7, "6 or 8"), (1, "2")])
    def test_an_indivisible_number_is_refused_with_the_nearest(self, count, nearest):
        with pytest.raises(
            UsageError, match=f"^A.b is {count}, which 2 learners cannot divide equally; set it to {nearest}$"
        ):
            replicas.fraction(count, "A.b")

    def test_seeds_differ_from_the_run_s_and_from_each_other(self, monkeypatch):
        seeds = {replicas.seed_of(0), replicas.seed_of(1), 0, 1}
        monkeypatch.setattr(replicas._group, "rank", 2, raising=False)
        assert len(seeds | {replicas.seed_of(0)}) == 5

    def test_apart_sums_are_their_own(self):
        values = torch.ones(3)
        with replicas.apart():
            assert replicas.total(values) is values and not replicas.is_joined()
        assert replicas.total(values)[0] == 2

    def test_a_mean_counts_rows(self):
        assert replicas.mean(torch.tensor(3.0), torch.tensor([True, False])) == 3


class TestRestarts:
    @pytest.mark.parametrize(
        "shared, restarts, refused", [("True", "3", True), ("True", "0", False), ("False", "3", False)]
    )
    def test_a_store_that_restarts_would_share_is_refused(self, monkeypatch, shared, restarts, refused):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        for rank, expected in (("0", UsageError), ("1", RepeatedError)):
            monkeypatch.setenv("RANK", rank)
            if not refused:
                replicas._refuse_shared_store()
                continue
            with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") as error:
                replicas._refuse_shared_store()
            assert error.type is expected


def of(*scenarios):
    """Names the scenarios that a test reads."""

    def named(test):
        test.scenarios = scenarios
        return test

    return named


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """Directory and results of two learners for the scenarios in `learners.py` that the chosen tests read, by name."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pair"
    directory.mkdir(exist_ok=True)
    with open(directory / "lock", "w") as lock:  # tests may be spread over processes; one runs the pair
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "1.json").exists():
            run_pair(directory, request.session.items)
    first, second = (json.loads((directory / f"{k}.json").read_text()) for k in range(2))
    return directory, {name: (first[name], second[name]) for name in first}


def run_pair(directory, items):
    """Runs the scenarios that the chosen tests read."""
    tests = (item.function for item in items)
    names = dict.fromkeys(name for test in tests for name in getattr(test, "scenarios", ()))
    command = [str(TESTS / "tools" / "learners.py"), str(directory), *names]
    processes = start(command, environment=os.environ | {"PYTHONPATH": PATH}, stderr=subprocess.PIPE)
    try:
        errors = [process.communicate(timeout=SECONDS)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


@pytest.mark.slow
class TestPair:
    @of("nonfinite", "nonfinite in graphs")
    @pytest.mark.parametrize("name", ["nonfinite", "nonfinite in graphs"])
    def test_a_non_finite_row_skips_the_update_of_both_learners(self, pair, name):
        first, second = pair[1][name]
        assert first == second
        assert first["counts"] == [0, 1, 1] and first["moved"] == [False, True]

    @of("kl", "kl in graphs")
    @pytest.mark.parametrize("name", ["kl", "kl in graphs"])
    def test_the_mean_kl_of_both_stops_both(self, pair, name):
        first, second = pair[1][name]
        together, alone = zip(*first.values()), [second[shift][1] for shift in second]
        assert list(next(together)) == [second[shift][0] for shift in second] == [1, 1, 0]
        assert alone == [1, 0, 0], "one of them alone would have stopped at the shift between"

    @of("rate")
    def test_learning_rates_follow_the_mean_kl_of_both(self, pair):
        first, second = pair[1]["rate"]
        assert first == second
        assert list(first.values()) == pytest.approx([1e-3 / 1.5] * 2)

    @of("forgot")
    def test_a_side_module_without_the_rows_of_others_is_named(self, pair):
        for mindful, forgetful in pair[1]["forgot"]:
            assert mindful == ""
            assert re.match(r"average differs between learners 0 and 1; .* alfish.processes.replicas.total", forgetful)

    @of("parts")
    def test_statistics_of_parts_count_the_rows_of_all_learners(self, pair):
        for found in pair[1]["parts"]:
            rows = found["iterations"] * 8 * 4  # of four environments together, the first row of a run not counted
            assert found["counts"] == [rows, found["env_steps"]]

    @of("weights")
    def test_lagrangian_weights_follow_the_steps_of_all_learners(self, pair):
        expected = np.array([1.0, 2.0])
        for (means, n, found), (others, m, same) in zip(*pair[1]["weights"], strict=True):
            assert means == [-1, 2] and others == [3, -4] and n > m > 0
            mean = (n * np.array(means) + m * np.array(others)) / (n + m)
            expected *= np.exp(0.2 * (np.array([0.5, -1.0]) - mean))
            assert found == same == pytest.approx(expected, rel=1e-5)

    @of("sequences")
    def test_sequences_shorter_than_the_unroll_train_as_with_one_learner(self, pair):
        first, second = pair[1]["sequences"]
        assert first == second and first["updates"] == 2 * 4 * 12 / 16
        assert first["from_one_learner"] < 1e-6 < 1e-3 < first["moved"]

    @of("resume")
    @pytest.mark.parametrize(
        "run, iterations, columns", [("on_policy", 8, 2), ("curious", 8, 2), ("off_policy", 16, 2)]
    )
    def test_a_resumed_run_of_two_is_bit_identical(self, pair, run, iterations, columns):
        first, second = (found[run] for found in pair[1]["resume"])
        assert first["differs"] == second["differs"] == []
        assert first["iterations"] == second["iterations"] == iterations
        assert first["columns"] == second["columns"] == columns
        assert first["env_steps"] == second["env_steps"] and first["sum"] == second["sum"]
        assert first["rows"] != second["rows"]

    @of("sigterm")
    def test_a_signal_to_one_ends_both_with_the_same_iteration(self, pair):
        first, second = pair[1]["sigterm"]
        assert first["iterations"] == second["iterations"] == 4, "it came after the third"
        assert first["signal"] == second["signal"] == signal.SIGTERM and first["finished"]
        assert first["env_steps"] == second["env_steps"]
        assert first["saved"] == second["saved"] == [first["env_steps"]]

    @of("hang")
    def test_a_hanging_environment_is_interrupted_in_both_learners(self, pair):
        first, second = pair[1]["hang"]
        assert first == second and first["signal"] == signal.SIGTERM and 0 < first["iterations"] < 100

    @of("late")
    def test_an_interrupted_learner_waits_for_the_other_learner(self, pair):
        first, second = pair[1]["late"]
        assert first == second and len(first["saved"]) == 1 and 0 < first["iterations"] < 100

    @of("stop")
    def test_a_stop_by_a_listener_of_the_first_stops_both(self, pair):
        directory, found = pair
        first, second = found["stop"]
        assert first == second and first["iterations"] == 3 and first["reason"] == "solved"
        assert json.loads((directory / "stop" / "done").read_text())["reason"] == "solved"

    @of("seconds")
    def test_seconds_come_from_the_first_learner(self, pair):
        first, second = pair[1]["seconds"]
        assert first == second and first["seconds"] >= 0.5

    @of("moments")
    def test_moments_cover_all_rows(self, pair):
        assert max(pair[1]["moments"]) < 1e-6

    @of("plain")
    def test_two_learners_train_what_one_trains(self, pair):
        cases = [Case(*fields) for fields in pair[1]["plain"][0]]
        of_both = [torch.load(pair[0] / "plain" / f"{rank}.pt") for rank in range(2)]
        assert [case.algorithm for case in cases] == [*ALGORITHMS]
        for case, *of_ranks in zip(cases, *of_both, strict=True):
            assert_trained_alike(case, of_ranks, 1e-12)

    @of("graphs")
    def test_graphs_of_two_learners_equal_graphs_of_one(self, pair):
        first, second = pair[1]["graphs"]
        assert first == second and max(difference for difference, _ in first.values()) < 1e-12

    @of("graphs", "other graphs")
    @pytest.mark.long
    def test_graphs_with_two_learners_equal_single_learner_graphs(self, pair):
        few, others = pair[1]["graphs"][0], pair[1]["other graphs"][0]
        assert {*few, *others} == {*ALGORITHMS} and max(difference for difference, _ in others.values()) < 1e-12
        assert pair[1]["other graphs"] == (others, others)

    @of("failing graph")
    def test_one_that_cannot_compile_keeps_both_plain(self, pair):
        first, second = pair[1]["failing graph"]
        assert first == second and first["is_plain"] and first["updates"] == 1

    @of("priorities")
    def test_two_learners_use_the_largest_weight_and_priority_of_both(self, pair):
        (first, largest), (second, same) = pair[1]["priorities"]
        assert [max(pair) for pair in zip(first, second)] == [1] * 4 and min(*first, *second) < 1
        assert largest == same > 5

    @of("stragglers")
    def test_a_slow_learner_is_cut_and_both_train_on_available_rows(self, pair):
        first, second = pair[1]["stragglers"]
        assert first["lengths"] == [8] * 6 and second["lengths"] == [4] * 6, "vector steps of each unroll"
        assert first["sum"] == second["sum"] and first["env_steps"] == second["env_steps"]
        assert first["env_steps"] == first["own_steps"] + second["own_steps"], "steps that environments made"
        assert first["shapes"] == second["shapes"] == [[9, 2]] * 6
        assert first["from_one_learner"] < 1e-6 < first["moved"]

    @of("stragglers")
    def test_a_resumed_run_with_a_cut_is_bit_identical(self, pair):
        for found in pair[1]["stragglers"]:
            assert found["differs"] == [] and found["lengths_resumed"] == found["lengths"][3:]

    @of("mistakes")
    def test_a_shared_mistake_is_reported_once_a_single_one_with_its_rank(self, pair):
        first, second = pair[1]["mistakes"]
        assert first["both"] == ["UsageError", "no such file"] and second["both"] == ["RepeatedError", "no such file"]
        assert first["own"] == ["UsageError", "no disk"] and second["own"] == ["UsageError", "learner 1: no GPU"]

    @of("workers")
    def test_worker_processes_are_divided(self, pair):
        first, second = pair[1]["workers"]
        assert first == second and first["columns"] == 4

    @of("readiness")
    def test_with_free_workers_both_train_as_soon_as_both_have_windows(self, pair):
        first, second = pair[1]["readiness"]
        # Windows have 8 rows: the second learner has 3, 6 and 14. Then rows are removed, and the first one has 3.
        assert first["trained"] == second["trained"] == [0, 0, 20, 0, 20]
        assert first["run"] == second["run"] and first["run"][1] == first["run"][0] - 16, "updates after warm-up"

    @of("environments")
    def test_environments_and_noise_differ_and_evaluation_has_all(self, pair):
        first, second = pair[1]["environments"]
        assert len({*first["stamps"], *second["stamps"]}) == 4 and first["noise"] != second["noise"]
        assert first["numpy"] != second["numpy"] and first["evaluated"] == second["evaluated"] == 4

    @of("resume")
    def test_only_the_first_writes_the_run(self, pair):
        directory = pair[0] / "resume" / "on_policy whole"
        assert {path.name for path in directory.iterdir()} >= {"checkpoints", "metrics.csv", "done", "ranks", "run_id"}
        own = directory / "ranks" / "rank-001"
        assert {path.name for path in own.iterdir()} == {"checkpoints", "log.txt"}
        steps = [line.split(",")[0] for line in (directory / "metrics.csv").read_text().splitlines()]
        assert len(steps) == len(set(steps)) > 1
        of_first, of_second = (Checkpoints(each / "checkpoints").load()[1] for each in (directory, own))
        assert "algorithm" in of_first and "algorithm" not in of_second and "rng" in of_second


@pytest.mark.slow
def test_with_one_learner_no_collectives_are_imported():
    text = (
        "import sys, alfish.training.trainer; from alfish import replicas\n"
        "with replicas.joined(): print('torch.distributed._functional_collectives' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", text], text=True).split() == ["False"]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 1e-12), ("float32", 1e-6)])
def test_the_benchmark_trains_what_one_learner_trains(dtype, rounding):
    cases = [Case(name, dtype, num_updates=40) for name in ALGORITHMS]
    for case, of_ranks in zip(cases, of_learners(cases), strict=True):
        assert_trained_alike(case, of_ranks, rounding)


def assert_trained_alike(case, of_ranks, rounding):
    """Rounding apart: no farther from one learner than the same rows in another order, and the same bits in both."""
    found = differences(case, of_ranks)
    assert found["moved"] > LEARNING_RATE * case.num_updates / 2, found
    assert found["between_learners"] == 0, found
    assert found["two_learners"] < 10 * found["other_order"] + rounding, found


def test_the_published_table_matches_its_raw_data():
    assert table(TABLE) in (PROJECT / "docs" / "results.md").read_text()


def torchrun(directory, num_env_steps, restarts):
    """Starts two learners of a run by torchrun."""
    params = (
        f"Trainer.num_env_steps={num_env_steps}",
        "CheckpointSaver.period=1000",
        "EpochBatches.num_epochs=5",
        "Evaluate.period=0",
        "Evaluate.num_episodes=2",
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(f"--max-restarts={restarts}", "-m", "alfish", "train", "--gin_file=ppo_cartpole.gin", "--device=cpu"),
        *(f"--root_dir={directory}", *(f"--gin_param={each}" for each in params)),
    ]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def kill_the_second(agent, directory):
    """Kills the second learner once both have a checkpoint."""
    places = directory / "checkpoints", directory / "ranks" / "rank-001" / "checkpoints"
    while not all(Checkpoints(place).steps() for place in places):
        assert agent.poll() is None, agent.stderr.read()
        time.sleep(0.05)
    os.kill(learners_of(agent)[1], signal.SIGKILL)


def learners_of(agent):
    """Returns the process ids of the learners that torchrun has started, by rank."""
    found = {}
    for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            rank = re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
            found |= {int(rank[1]): int(pid)} if rank else {}
    return found


@pytest.mark.slow
def test_a_killed_learner_ends_all_and_the_run_can_continue(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    with torchrun(two, 8_000, restarts=1) as agent:
        kill_the_second(agent, two)
        errors = agent.communicate()[1]
        assert agent.returncode == 0, errors
    shutil.copytree(two, one)
    (one / "done").unlink()
    assert main(["train", f"--root_dir={one}", "--gin_param=Trainer.num_env_steps=10_000"]) == 0
    for directory, learners, budget in ((two, 2, 8_000), (one, 1, 10_000)):
        done, log = json.loads((directory / "done").read_text()), (directory / "log.txt").read_text()
        assert budget <= done["env_steps"] < budget + 256, "within an iteration of the budget"
        assert log.count("Resuming from") == 3 - learners, "once after the kill, and once with one learner"
        assert ("saved by another number of learners: new episodes begin" in log) == (learners == 1)
    assert not (one / "ranks" / "rank-001").exists() and (one / "ranks" / "rank-001.superseded").exists()


@pytest.mark.long
def test_a_run_whose_learners_are_killed_ten_times_spends_the_same_budget(tmp_path):
    moments, num_kills = random.Random(0), 0
    with torchrun(tmp_path, 200_000, restarts=10) as agent:
        while num_kills < 10:
            time.sleep(moments.uniform(0.0, 12.0))
            assert agent.poll() is None, agent.stderr.read()
            learners = learners_of(agent)
            if len(learners) == 2:  # else torchrun is restarting them
                os.kill(learners[moments.randrange(2)], signal.SIGKILL)
                num_kills += 1
        errors = agent.communicate()[1]
        assert agent.returncode == 0, errors
    done, log = json.loads((tmp_path / "done").read_text()), (tmp_path / "log.txt").read_text()
    assert 200_000 <= done["env_steps"] < 200_256, "within an iteration of the budget"
    assert log.count("Resuming from") > 3 and "FALLING BACK" not in log
    steps = [int(line.split(",")[0]) for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == sorted(set(steps)), "one row of each summary, once"


@pytest.mark.long
def test_the_benchmark_of_stragglers_measures_with_and_without_the_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["stragglers", "--seconds=1", f"--table={tmp_path / 'table.csv'}"])
    stragglers.main()
    rows = read_rows(tmp_path / "table.csv")
    assert [row["sync_fraction"] for row in rows] == ["none", "0.5"] and all(int(row["iterations"]) > 1 for row in rows)
