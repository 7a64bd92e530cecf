"""Updates that another process compiles beside training: the same bits, whenever it is ready, and however it ends.

The other process is `InThisProcess`, which sends and receives what it would and runs graphs operation by operation.
`tests/compiler/test_background.py` has the process itself.
"""

import csv
import functools
import logging
import pickle

import pytest
import torch
from torch import nn
from toy_games import Kept

from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.td3 import TD3
from alfish.compiler import background, inductor
from alfish.compiler.background import Compiled, NotSendable
from alfish.compiler.inductor import CompiledFunction, NotCompilable
from alfish.environments import make_environment
from alfish.environments.games import make_games
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner import compiled_later, compiled_updates
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, CriticEnsemble, DeterministicActor, QNetwork, Torso
from alfish.training.listeners import CheckpointSaver
from alfish.training.summaries import Summaries
from alfish.training.trainer import Trainer

SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=SMALL)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
FIRST = 30  # the update from which on updates shall be compiled
RECIPES = {
    "ppo": {
        "algorithm": functools.partial(
            PPO, network=functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
        ),
        "environment": functools.partial(make_environment, "CartPole-v1", num_envs=2),
        "batches": functools.partial(EpochBatches, 2, 8),
        "unroll_length": 8,
    },
    "dqn": {
        "algorithm": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO), target_period=10),
        "environment": functools.partial(make_environment, "CartPole-v1", num_envs=2),
        "batches": functools.partial(
            ReplayBatches, capacity=200, batch_size=8, warmup_env_steps=20, updates_per_env_step=0.5
        ),
        "unroll_length": 4,
    },
    "td3": {
        "algorithm": functools.partial(
            TD3,
            actor=functools.partial(DeterministicActor, mlp=SMALL),
            critic=functools.partial(CriticEnsemble, layers=(8,)),
        ),
        # Its state is saved, so a run that continues has the same bits.
        "environment": functools.partial(make_environment, TensorPointMass, num_envs=2, env_kwargs={"length": 6}),
        "batches": functools.partial(
            ReplayBatches, capacity=200, batch_size=8, warmup_env_steps=20, updates_per_env_step=0.5
        ),
        "unroll_length": 4,
    },
}


class InThisProcess:
    """Stands in for `BackgroundCompiler`.

    Attributes:
      ready: whether a compilation is complete before it is waited for.
      failure: error of every compilation, if any.
      num_requests, num_closed: calls.
    """

    ready, failure = True, ""
    num_requests = num_closed = num_waits = 0

    def request(self, function, arguments, precision):
        InThisProcess.num_requests += 1
        layouts = background.nest.map(background.TensorLayout.of, arguments)
        storages = {background.storage_id(leaf) for leaf in background.nest.leaves(arguments)}
        data = background._to_bytes(background.Request(function, layouts, precision, 1, torch.float32, False), storages)
        return _Result(data)

    def close(self):
        InThisProcess.num_closed += 1


class _Result:
    def __init__(self, data):
        self._data, self.is_ready = data, InThisProcess.ready

    def wait(self):
        self.is_ready = True
        InThisProcess.num_waits += 1

    def result(self):
        assert self.is_ready
        if InThisProcess.failure:
            raise NotCompilable(InThisProcess.failure)
        request = pickle.loads(self._data)
        function = CompiledFunction(request.function, request.arguments, request.precision)
        return Compiled(function, request.function.notes, 2.0)


def inexact(graph, *_):
    """Stands in for the compiler, and makes other rounding errors, so that it shows which updates were compiled."""

    def call(leaves):
        arguments = leaves[:]
        leaves.clear()
        versions = [tensor._version for tensor in arguments]
        results = graph(*arguments)
        for tensor, version in zip(arguments, versions):
            if tensor._version != version and tensor.ndim:
                tensor.mul_(1 + 1e-5)
        return results

    return call


@pytest.fixture(autouse=True)
def other_process(monkeypatch):
    monkeypatch.setattr(inductor, "_compile", inexact)
    monkeypatch.setattr(compiled_updates, "BackgroundCompiler", InThisProcess)
    monkeypatch.setattr(compiled_later, "first_compiled_update", lambda work: FIRST)
    monkeypatch.setattr(compiled_later, "pays_beside", lambda num_updates, work: True)
    for name, value in {"ready": True, "failure": "", "num_requests": 0, "num_closed": 0, "num_waits": 0}.items():
        monkeypatch.setattr(InThisProcess, name, value)


def run(root, recipe="dqn", compile="auto", **settings):
    """A trained run: its trainer, and metrics.csv without times."""
    trainer = Trainer(
        root,
        learner=functools.partial(Learner, compile=compile),
        listeners=[Summaries([]), CheckpointSaver(period=10**6)],
        **{**RECIPES[recipe], "num_env_steps": 200, "summary_period": 16, **settings},
    )
    trainer.train()
    with open(root / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return trainer, [{k: v for k, v in row.items() if "time" not in k and k != "wall_seconds"} for row in rows]


def parameters(trainer):
    return [*trainer.algorithm.parameters(), *trainer.algorithm.buffers()]


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(parameters(one), parameters(other), strict=True))


def log_of(root):
    return (root / "log.txt").read_text()


@pytest.mark.parametrize("recipe", [slow("ppo"), "dqn", slow("td3")])
def test_a_run_whose_compiler_is_slow_has_the_same_bits(recipe, tmp_path, monkeypatch):
    quick, rows = run(tmp_path / "quick", recipe)
    assert InThisProcess.num_requests == (2 if recipe == "td3" else 1) and not InThisProcess.num_waits
    monkeypatch.setattr(InThisProcess, "ready", False)
    slow, others = run(tmp_path / "slow", recipe)
    assert InThisProcess.num_waits and rows == others and len(rows) > 4
    assert_equal(quick, slow)
    assert "for the compiled update" in log_of(tmp_path / "slow") and "Waiting" not in log_of(tmp_path / "quick")
    plain, _ = run(tmp_path / "plain", recipe, compile=False)
    assert not all(torch.equal(a, b) for a, b in zip(parameters(plain), parameters(quick)))


def test_policies_that_switch_in_the_same_iteration_wait_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(InThisProcess, "ready", False)
    game = functools.partial(make_games, Kept, num_games=2)
    trainer, _ = run(tmp_path, "ppo", environment=game, policies="each", num_env_steps=700)
    assert InThisProcess.num_waits == 3
    assert not any(member.learner.is_plain for member in trainer.unroller.members)


@pytest.mark.parametrize("recipe", [slow("ppo"), "dqn"])
def test_updates_before_the_switch_are_plain_and_those_after_it_compiled(recipe, tmp_path, monkeypatch):
    kinds = []
    updates = compiled_updates.CompiledUpdates.__call__
    monkeypatch.setattr(compiled_updates.CompiledUpdates, "__call__", lambda *a: kinds.append("graph") or updates(*a))
    trainer, _ = run(tmp_path, recipe)
    num_plain = trainer.learner.updates - len(kinds)
    assert FIRST <= num_plain < FIRST + 8  # the first iteration that begins at this update or after it
    assert f"compiled update of {recipe.upper()} from update {num_plain + 1} on" in log_of(tmp_path)
    assert f"beside training; it is used after update {FIRST}" in log_of(tmp_path)
    assert InThisProcess.num_closed == 2 and not trainer.learner.is_plain  # at the switch, and at the end


@pytest.mark.parametrize("stops", [(60, 80), slow((88, 120))], ids=str)
def test_runs_resumed_around_the_switch_are_bit_identical(stops, tmp_path):
    whole, _ = run(tmp_path / "whole", "td3", num_env_steps=140)
    for stop_at in stops:
        InThisProcess.num_requests = 0
        first, _ = run(tmp_path / str(stop_at), "td3", num_env_steps=140, stop_at=stop_at)
        assert first.clock.updates == {60: 21, 80: 32, 88: 35, 120: 52}[stop_at]
        rest, _ = run(tmp_path / str(stop_at), "td3", num_env_steps=140)
        assert_equal(whole, rest)
        assert InThisProcess.num_requests == (4 if stop_at == 60 else 2)


def test_a_process_that_fails_leaves_updates_plain_after_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(InThisProcess, "failure", "the process that compiles ended by SIGKILL")
    with caplog.at_level(logging.WARNING):
        trainer, _ = run(tmp_path / "failed")
    assert trainer.learner.is_plain and trainer.learner.state_dict()["fell_back"]
    [warning] = [record.getMessage() for record in caplog.records if "compile" in record.getMessage()]
    assert warning == (
        "DQN cannot be compiled, so its updates run as plain Python: the process that compiles ended by SIGKILL"
    )
    plain, _ = run(tmp_path / "plain", compile=False)
    assert_equal(trainer, plain)


@pytest.mark.parametrize("pays", [True, False])
def test_an_unsendable_update_is_compiled_locally_in_long_runs(pays, tmp_path, monkeypatch, caplog):
    class Local(DQN):
        """Cannot be imported by another process."""

    monkeypatch.setattr(compiled_later, "pays_in_foreground", lambda num_updates, work: pays)
    monkeypatch.setitem(RECIPES["dqn"], "algorithm", functools.partial(Local, **RECIPES["dqn"]["algorithm"].keywords))
    trainer, _ = run(tmp_path / "local")
    assert trainer.learner.is_plain != pays
    words = log_of(tmp_path / "local") if pays else caplog.text
    assert "it cannot be sent to another process" in words and "Local" in words


def test_an_unsendable_update_stays_plain_after_a_resume(tmp_path, monkeypatch):
    class Local(DQN):
        """Cannot be imported by another process."""

    monkeypatch.setattr(compiled_later, "pays_in_foreground", lambda num_updates, work: False)
    monkeypatch.setitem(RECIPES["dqn"], "algorithm", functools.partial(Local, **RECIPES["dqn"]["algorithm"].keywords))
    trainer = Trainer(tmp_path, **RECIPES["dqn"], learner=Learner, listeners=[], num_env_steps=200)
    trainer.start()
    iterations = trainer.iterate()
    while next(iterations).updates < FIRST:
        assert not trainer.learner.state_dict()["fell_back"], "it makes the updates of a compiled run until then"
    state = trainer.learner.state_dict()
    assert not trainer.learner.is_plain and state["fell_back"]
    trainer.close()
    resumed = Trainer(tmp_path / "resumed", **RECIPES["dqn"], learner=Learner, listeners=[], num_env_steps=200)
    resumed.learner.load_state_dict(state)
    assert resumed.learner.is_plain


def test_a_hook_that_cannot_be_traced_is_reported_at_the_switch(tmp_path, caplog):
    trainer = Trainer(
        tmp_path,
        **RECIPES["dqn"] | {"algorithm": functools.partial(_ReadingDQN, **RECIPES["dqn"]["algorithm"].keywords)},
        learner=Learner,
        listeners=[],
        num_env_steps=120,
    )
    trainer.train()
    assert (
        trainer.learner.is_plain and "_ReadingDQN cannot be compiled, so its updates run as plain Python" in caplog.text
    )


class _ReadingDQN(DQN):
    def calc_loss(self, experience, info):
        loss = super().calc_loss(experience, info)
        return loss if float(loss.loss.detach().sum()) else loss


def test_a_run_that_ends_before_the_switch_ends_the_other_process(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_later, "first_compiled_update", lambda work: 10**6)
    run(tmp_path, num_env_steps=60)
    assert (InThisProcess.num_requests, InThisProcess.num_closed) == (1, 1)


def test_a_learner_closed_before_the_switch_requests_its_graph_again(tmp_path):
    trainer = Trainer(tmp_path, **RECIPES["dqn"], learner=Learner, listeners=[], num_env_steps=200)
    trainer.start()
    iterations = trainer.iterate()
    while next(iterations).updates < FIRST // 2:
        pass
    trainer.learner.close()
    *_, report = iterations
    trainer.close()
    assert report.updates > FIRST and not trainer.learner.is_plain and InThisProcess.num_requests == 2


def test_values_that_are_not_arguments_of_the_function_are_sent():
    constant, argument = torch.arange(3.0), torch.ones(4)
    data = background._to_bytes((constant, argument[:2], nn.Parameter(argument)), {background.storage_id(argument)})
    sent, empty, parameter = pickle.loads(data)
    assert torch.equal(sent, constant) and empty.shape == (2,) and isinstance(parameter, nn.Parameter)
    large = torch.ones(10**6)
    assert len(background._to_bytes(large, {background.storage_id(large)})) < 1000


def test_a_class_of_the_program_itself_cannot_be_sent():
    class Local:
        pass

    Local.__module__ = "__main__"
    with pytest.raises(NotSendable, match="Local is defined in the main program; move it into a module"):
        background._to_bytes(Local, set())


class TestPlan:
    """The rule itself; the fixture of this file replaces it for runs."""

    @pytest.fixture(autouse=True)
    def rule(self, other_process, monkeypatch):
        monkeypatch.undo()

    def test_small_updates_are_compiled_in_runs_of_some_sixteen_thousand(self):
        assert not compiled_later.pays_beside(15_000, 10_000)
        assert compiled_later.pays_beside(20_000, 10_000)

    def test_larger_updates_are_compiled_earlier_and_in_shorter_runs(self):
        firsts = [compiled_later.first_compiled_update(work) for work in (0, 10**6, 10**7, 10**8)]
        assert firsts == sorted(firsts, reverse=True) and 4000 < firsts[0] < 8000 and firsts[-1] < 500
        assert compiled_later.pays_beside(2000, 56_000_000) and not compiled_later.pays_beside(1000, 56_000_000)

    def test_a_run_that_waits_for_it_must_be_longer(self):
        for work in (0, 10**6, 10**8):
            number = next(n for n in range(0, 10**6, 100) if compiled_later.pays_beside(n, work))
            assert not compiled_later.pays_in_foreground(number, work)

    def test_the_first_compiled_update_does_not_depend_on_the_budget(self, tmp_path):
        """So a run that is prolonged continues with the same bits."""
        assert compiled_later.first_compiled_update.__code__.co_argcount == 1
        with pytest.raises(UsageError, match="compile"):
            Learner(nn.Module(), compile="sometimes")
