"""Several learners: what they divide and agree on, and that they train what one learner trains.

Learners are processes joined by gloo, as torchrun joins them. Each takes seconds to import torch, so one pair of
processes runs many cases.
"""

import pytest
import torch

from alfish import replicas
from alfish.errors import UsageError
from benchmarks.replicas import ALGORITHMS, Case, differences, of_learners


class TestOneLearner:
    def test_it_is_the_first_of_one_and_sums_are_their_arguments(self):
        values = torch.ones(3)
        assert replicas.total(values) is values and replicas.mean(values, values > 0) is values
        assert (replicas.rank(), replicas.size(), replicas.is_joined()) == (0, 1, False)
        assert replicas.gather(1, 2.5) == [[1, 2.5]] and replicas.of_first("text") == "text"
        assert replicas.fraction(7, "x") == 7 and replicas.seed_of(3) == 3
        replicas.check_equal({"weight": values})

    def test_a_scheduler_s_variables_alone_start_none(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with replicas.joined():
            assert not replicas.is_joined()


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

    @pytest.mark.parametrize("count, nearest", [(7, "6 and 8"), (1, "2")])
    def test_a_number_that_they_cannot_divide_is_refused_with_the_nearest(self, count, nearest):
        with pytest.raises(
            UsageError, match=f"^A.b is {count}, which 2 learners cannot divide; they can divide {nearest}$"
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
        if not refused:
            replicas._refuse_shared_store()
            return
        with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            replicas._refuse_shared_store()


@pytest.mark.slow
def test_two_learners_train_what_one_trains():
    """Rounding apart: no farther from one learner than the same rows in another order, and the same bits in both."""
    cases = [Case(name, dtype) for dtype in ("float64", "float32") for name in ALGORITHMS]
    for case, of_ranks in zip(cases, of_learners(cases), strict=True):
        found = differences(case, of_ranks)
        assert found["moved"] > 0.02, found
        assert found["between_learners"] == 0, found
        if case.dtype == "float64":
            assert found["two_learners"] < 1e-12, found
        else:
            assert found["two_learners"] < 10 * found["other_order"] + 1e-6, found
