"""Diagnostics and custom summaries: their numbers, and that they change nothing of a run."""

import csv
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from resuming import assert_same, tensors_of
from shown_names import names_in
from test_resume import make
from test_vector_runs import TradeOff

from alfish.algorithms.dqn import DQN
from alfish.algorithms.flashsac import FlashSAC
from alfish.algorithms.ppo import PPO
from alfish.algorithms.pqn import PQN
from alfish.algorithms.reppo import REPPO
from alfish.algorithms.retrace import RetraceSAC
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import AlgStep, Batch, Experience
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.functional.return_distributions import Bins, ImplicitQuantiles, Quantiles
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, ImplicitQNetwork, QNetwork, Torso
from alfish.runs.writers import Histogram, Image, Writer
from alfish.training.diagnostics import (
    Diagnostic,
    DormantUnits,
    ExplainedVariance,
    GradientNoise,
    ModuleNorms,
    MonteCarlo,
)
from alfish.training.diagnostics.estimates import _returns
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver
from alfish.training.summaries import Summaries
from alfish.training.trainer import Trainer

POINT_MASS = TensorPointMass, {"length": 6}, 8
SMALL = functools.partial(MLP, layers=(8,))
SMALL_CRITIC = functools.partial(CriticEnsemble, layers=(8,))
SMALL_SAC = functools.partial(SAC, actor_mlp=SMALL, critic=SMALL_CRITIC)
REPLAY = functools.partial(ReplayBatches, capacity=400, batch_size=8, warmup_env_steps=32, updates_per_env_step=0.25)
EVERY = {"summary_period": 1}


def ppo(root_dir, summaries, **options):
    return make(root_dir, *POINT_MASS, listeners=[summaries], **{**EVERY, **options})


def sac(root_dir, summaries, **options):
    return ppo(root_dir, summaries, **{"algorithm": SMALL_SAC, "batches": REPLAY, **options})


def recurrent(root_dir, summaries, **options):
    torso = functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=4))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    algorithm = functools.partial(PPO, network=network)
    return ppo(root_dir, summaries, algorithm=algorithm, **options)


def everything(**options):
    """Returns summaries that look at everything after each iteration, and draw random numbers beside it."""

    def custom(run):
        return {"noise": torch.rand(()), "bits": np.random.default_rng().integers(2, size=8)}

    defaults = Summaries()._diagnostics
    return Summaries(
        [*defaults, MonteCarlo(2), GradientNoise(2)], diagnostics_period=1, custom_summary=custom, **options
    )


def table(directory):
    with open(directory / "metrics.csv") as file:
        return list(csv.DictReader(file))


class Keeper(Diagnostic):
    """Keeps the last update."""

    def measure(self, run, update):
        self.update, self.batch = update, update.batch
        return {}


class Recorder(Writer):
    def __init__(self):
        self.shown = {}

    def start(self, run):
        self.run = run

    def describe(self, settings, texts, provenance):
        self.settings, self.texts, self.provenance = settings, texts, provenance

    def histogram(self, name, histogram, steps):
        self.shown.setdefault(name, []).append((steps, histogram))

    image = film = histogram


class Differentiating(PPO):
    """Takes gradients inside `train_step`, as an algorithm with an action gradient does."""

    def train_step(self, experience, state):
        step = super().train_step(experience, state)
        torch.autograd.grad(step.info.value.sum(), list(self.parameters()), retain_graph=True, allow_unused=True)
        return step


def test_diagnostics_read_an_algorithm_that_differentiates_in_train_step(tmp_path):
    ppo(tmp_path, everything(), algorithm=Differentiating, num_iterations=2).train()
    shown = table(tmp_path)[-1]
    assert all(shown[name] for name in ("dormant_units/all", "values/explained_variance", "monte_carlo/value"))


@pytest.mark.parametrize("kind", [ppo, sac, recurrent])
def test_diagnostics_do_not_change_a_run(tmp_path, kind):
    plain = kind(tmp_path / "plain", Summaries([]), num_iterations=4)
    plain.train()
    watched = kind(tmp_path / "watched", everything(), num_iterations=4)
    watched.train()
    assert {"monte_carlo/return", "custom/noise", "dormant_units/all"} < names_in(tmp_path / "watched")
    assert_same(tensors_of(plain), tensors_of(watched))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_updates_have_the_same_bits_with_diagnostics(tmp_path):
    learner = functools.partial(Learner, compile=True)
    states = []
    for k, summaries in enumerate([Summaries([]), everything()]):
        trainer = sac(tmp_path / str(k), summaries, learner=learner)
        trainer.train()
        assert not trainer.learner.is_plain
        states.append(tensors_of(trainer))
    assert "gradient_norm/critic.body" in names_in(tmp_path / "1")
    assert_same(*states)


def test_a_measurement_that_is_due_at_a_pause_follows_with_the_next_summary(tmp_path):
    def clocks_of(root_dir, *stops):
        clocks, looks = [], Keeper()
        measure = looks.measure
        looks.measure = lambda run, update: (clocks.append(run.clock.value), measure(run, update))[1]
        for stop_at in (*stops, None):
            listeners = [Summaries([looks], diagnostics_period=120), CheckpointSaver()]
            options = {"num_iterations": 16, "summary_period": 100, "stop_at": stop_at}
            make(tmp_path / root_dir, *POINT_MASS, listeners=listeners, **{**EVERY, **options}).train()
        return clocks

    assert clocks_of("paused", 130) == clocks_of("whole")


def test_updates_are_inspected_only_when_due(tmp_path):
    looks = Keeper(), Keeper()
    trainer = ppo(tmp_path / "a", Summaries([looks[0]], diagnostics_period=100), num_iterations=8)
    seen, clocks = [], []
    measure = looks[0].measure
    looks[0].measure = lambda run, update: (clocks.append(run.clock.value), measure(run, update))[1]
    trainer.start()
    before_update = trainer.learner.before_update

    def counted(chunk, index):
        made = before_update(chunk, index)
        seen.append(made is not None)
        return made

    trainer.learner.before_update = counted
    trainer.train()
    assert clocks == [28, 112, 220]  # iterations have 24 to 28 steps: the first, and the first of each hundred
    assert sum(seen) == len(seen) * 3 / 8
    none = ppo(tmp_path / "b", Summaries([]))
    none.start()
    assert none.learner.before_update is None
    none.close()


def test_norms_cover_parameters_gradient_and_last_step(tmp_path):
    keeper = Keeper()
    trainer = ppo(tmp_path, Summaries([ModuleNorms(depth=1), keeper]), num_iterations=1)
    trainer.train()
    row = {name: float(value) for name, value in table(tmp_path)[-1].items() if value}
    parameters = list(trainer.algorithm.parameters())
    norm = torch.cat([p.detach().reshape(-1) for p in parameters]).norm()
    before = torch.cat([keeper.update.before[name].reshape(-1) for name, _ in trainer.algorithm.named_parameters()])
    step = (torch.cat([p.detach().reshape(-1) for p in parameters]) - before).norm()
    assert row["parameter_norm/network"] == pytest.approx(float(norm), rel=1e-5)
    assert row["update_size/network"] == pytest.approx(float(step / norm), rel=1e-4)
    experience = keeper.batch.experience
    info = trainer.algorithm.train_step(experience, None).info
    loss = trainer.algorithm.calc_loss(experience, info).loss[keeper.batch.mask].mean()
    gradients = torch.autograd.grad(loss, parameters)
    expected = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
    assert row["gradient_norm/network"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("length", [1, 4], ids=["first_rows_have_a_loss", "all_rows_have_a_loss"])
def test_the_gradient_noise_scale_is_estimated_without_bias(length):
    # The gradient of a row x is x: independent, of mean (2, 1) and variance 9 + 1. A row of the four does not train.
    def gradients(batch):
        return {"net.a": batch.experience.action[:length][batch.mask[:length]].mean(0)}

    run = SimpleNamespace(learner=SimpleNamespace(gradients=gradients, num_loss_rows=lambda batch: length))
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(2000):
        x = torch.randn(4, 24, 2, generator=generator) * torch.tensor([3.0, 1.0]) + torch.tensor([2.0, 1.0])
        mask = torch.ones(4, 24, dtype=torch.bool)
        mask[1] = False
        batch = Batch(Experience(None, x, None, None), mask)
        found.append(GradientNoise(4).measure(run, SimpleNamespace(batch=batch)))
    trace, squared_norm = (
        np.mean([shown[f"gradient_{name}/net"] for shown in found]) for name in ("variance", "squared_norm")
    )
    assert trace == pytest.approx(10, rel=0.05) and squared_norm == pytest.approx(5, rel=0.02)
    shown = found[0]
    scale = shown["gradient_variance/net"] / shown["gradient_squared_norm/net"]
    assert shown["gradient_noise_scale/net"] == pytest.approx(scale)


def test_too_few_parts_or_columns_have_no_gradient_noise(tmp_path):
    with pytest.raises(UsageError, match=r"GradientNoise.num_parts is 1; at least 2"):
        GradientNoise(1)
    batch = Batch(Experience(None, torch.ones(4, 3), None, None), torch.ones(4, 3, dtype=torch.bool))
    assert GradientNoise(4).measure(None, SimpleNamespace(batch=batch)) == {}


def test_a_delayed_actor_has_its_numbers_in_each_summary(tmp_path):
    delayed = functools.partial(SMALL_SAC, actor_period=3)
    keeper = Keeper()
    summaries = Summaries([ModuleNorms(), keeper], diagnostics_period=1)
    trainer = sac(tmp_path, summaries, algorithm=delayed, num_iterations=12)
    trainer.train()
    rows = [row for row in table(tmp_path) if float(row["updates"])]
    norms = [name for name in rows[0] if name.startswith("gradient_norm/actor")]
    assert len(rows) > 3 and norms and all(float(row[name]) > 0 for row in rows for name in norms)
    for _ in range(3):
        assert set(trainer.learner.evaluate(keeper.batch)) >= {"loss/critic", "loss/actor", "loss/alpha"}
        trainer.algorithm.num_updates += 1
    turns = []
    for _ in range(3):
        turns.append(trainer.algorithm.trains("actor"))
        trainer.algorithm.num_updates += 1
    assert sum(turns) == 1  # updates keep their turns


def test_units_that_are_zero_everywhere_are_dormant(tmp_path):
    keeper = Keeper()
    trainer = ppo(tmp_path, Summaries([keeper]), num_iterations=1)
    trainer.train()
    layer = trainer.algorithm.network.actor_torso
    linear = next(module for module in layer.modules() if isinstance(module, torch.nn.Linear))
    with torch.no_grad():
        linear.weight[:2] = 0
        linear.bias[:2] = 0
    shown = DormantUnits(threshold=0.0).measure(trainer, keeper.update)
    assert shown == {
        "dormant_units/network.actor_torso": 2 / 8,
        "dormant_units/network.critic_torso": 0,
        "dormant_units/all": 2 / 16,
    }
    assert all(not module._forward_hooks for module in trainer.algorithm.modules())


def test_units_of_each_critic_are_its_own(tmp_path):
    keeper = Keeper()
    trainer = sac(tmp_path, Summaries([keeper]), num_iterations=8)
    trainer.train()
    layer = trainer.algorithm.critic.body[0]  # weight [E, inputs, 8]
    assert layer.bias.shape[0] == 2 and layer.bias.shape[-1] == 8
    with torch.no_grad():
        for member, dead in enumerate((slice(0, 4), slice(4, 8))):
            layer.weight[member][..., dead] = 0
            layer.bias[member][..., dead] = 0
    assert DormantUnits(threshold=0.0).measure(trainer, keeper.update)["dormant_units/critic.body"] >= 0.5


@pytest.mark.parametrize("size", [(9, 9), (7, 10)])
def test_units_of_convolutions_are_channels(size):
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 6, 2), torch.nn.ReLU()
    run = SimpleNamespace(algorithm=torch.nn.Module())
    run.algorithm.encoder = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight[:], layer.bias[:] = 0, 0
            layer.weight[1::2], layer.bias[1::2] = 0.01, 1
    run.algorithm.train_step = lambda *_: AlgStep(info=run.algorithm.encoder(torch.randn(5, 3, *size)))
    update = SimpleNamespace(batch=SimpleNamespace(experience=SimpleNamespace(state=None)))
    assert DormantUnits(threshold=0.0).measure(run, update)["dormant_units/all"] == 0.5


def test_the_last_reported_update_was_made(tmp_path):
    stopping = functools.partial(PPO, target_kl=1e-9)
    batches = functools.partial(EpochBatches, num_epochs=4, minibatch_size=8)
    trainer = ppo(tmp_path, Summaries([ModuleNorms(depth=1)]), algorithm=stopping, batches=batches, num_iterations=1)
    trainer.train()
    row = {name: float(value) for name, value in table(tmp_path)[-1].items() if value}
    assert 0 < row["updates"] < 4 * 12 and row["update_size/network"] > 0


def test_explained_variance_refers_to_the_target(tmp_path):
    keeper = Keeper()
    trainer = ppo(tmp_path, Summaries([ExplainedVariance(), keeper]), num_iterations=1)
    trainer.train()
    experience, mask = keeper.batch.experience, keeper.batch.mask
    value = trainer.algorithm.train_step(experience, None).info.value[mask].detach().numpy()
    target = experience.info.target[mask].numpy()
    expected = 1 - np.var(target - value) / np.var(target)
    assert float(table(tmp_path)[-1]["values/explained_variance"]) == pytest.approx(expected, rel=1e-4)


def test_returns_of_terminated_and_truncated_episodes_by_hand():
    reward, discount = torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.5, 0.0])
    assert _returns(reward, discount, None).tolist() == [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4]
    discount[-1] = 0.5
    assert _returns(reward, discount, torch.tensor(10.0)).tolist() == [1 + 0.5 * (2 + 0.5 * 10), 2 + 0.5 * 10]
    assert _returns(reward[:2], discount[:2], torch.tensor(10.0)).tolist() == []


@pytest.mark.parametrize("kind", [ppo, sac])
def test_estimates_that_are_constant_have_the_bias_of_that_constant(tmp_path, kind):
    trainer = kind(tmp_path, Summaries([MonteCarlo(3)]), num_iterations=4)
    trainer.train()
    diagnostic = trainer.listeners[0]._diagnostics[0]
    diagnostic.start(trainer)
    head = trainer.algorithm.network.value_head if kind is ppo else trainer.algorithm.critic
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    shown = diagnostic.measure(trainer, None)
    diagnostic.close()
    name = "value" if kind is ppo else "q"
    assert shown[f"monte_carlo/{name}"] == 0
    assert shown[f"monte_carlo/{name}_bias"] == pytest.approx(-shown["monte_carlo/return"])
    assert shown["monte_carlo/return"] < 0  # the reward is a distance, negative
    assert shown[f"monte_carlo/{name}_error"] >= -shown["monte_carlo/return"]


SMALL_DQN = functools.partial(DQN, q_network=functools.partial(QNetwork, torso=functools.partial(Torso, mlp=SMALL)))
MEASURED = {
    "bins": ("CartPole-v1", functools.partial(SMALL_DQN, values=Bins), {"q"}),
    "quantiles": ("CartPole-v1", functools.partial(SMALL_DQN, values=Quantiles), {"q"}),
    "implicit": ("CartPole-v1", functools.partial(DQN, q_network=ImplicitQNetwork, values=ImplicitQuantiles), {"q"}),
    "memory": (
        "CartPole-v1",
        functools.partial(
            DQN,
            q_network=functools.partial(
                QNetwork, torso=functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=4))
            ),
        ),
        {"q"},
    ),
    "sac with bins": ("Pendulum-v1", functools.partial(SMALL_SAC, values=Bins), {"q", "value"}),
    "sac with quantiles": ("Pendulum-v1", functools.partial(SMALL_SAC, values=Quantiles), {"q", "value"}),
    "held noise": ("Pendulum-v1", functools.partial(FlashSAC, **SMALL_SAC.keywords), {"q", "value"}),
    "correlated noise": (
        "Pendulum-v1",
        functools.partial(TD3, critic=SMALL_CRITIC, noise_correlation=0.5),
        {"q"},
    ),
    "reppo": ("Pendulum-v1", REPPO, {"q"}),
    "pqn": ("CartPole-v1", PQN, {"q"}),
}


def measured(tmp_path, env_id, algorithm, **env_kwargs):
    """Returns estimates and returns of an episode, by name, the episode, and the trainer."""
    on_policy = getattr(algorithm, "func", algorithm).on_policy
    batches = {} if on_policy else {"batches": functools.partial(REPLAY, window_length=3)}
    trainer = Trainer(
        tmp_path, algorithm=algorithm, unroll_length=8, num_iterations=3, listeners=[], device="cpu", **batches,
        environment=functools.partial(make_environment, env_id, num_envs=2, env_kwargs=env_kwargs),
    )  # fmt: skip
    trainer.start()
    diagnostic = MonteCarlo(1)
    diagnostic.start(trainer)
    [episode] = diagnostic._evaluator.test_episodes(1, 0)
    compared = diagnostic._compared(trainer, episode)
    diagnostic.close()
    trainer.close()
    return compared, episode, trainer


@pytest.mark.parametrize("name", MEASURED)
def test_values_of_every_kind_are_one_number_for_each_step(tmp_path, name):
    env_id, algorithm, names = MEASURED[name]
    compared, episode, _ = measured(tmp_path, env_id, algorithm, max_episode_steps=9)
    assert compared.keys() == names and episode.length == 9
    for estimate, return_ in compared.values():
        assert len(estimate) == len(return_) == (9 if episode.terminated[-1] else 8)
        assert np.isfinite(estimate).all() and np.ptp(estimate) > 0


def test_value_estimate_is_the_mean_of_distributions_and_critics(tmp_path):
    compared, episode, trainer = measured(
        tmp_path, "Pendulum-v1", functools.partial(SMALL_SAC, values=Bins), max_episode_steps=9
    )
    sac, (estimate, return_) = trainer.algorithm, compared["q"]
    observation, action = (torch.from_numpy(each) for each in (episode.observations[:-1], episode.actions / 2))
    means = sac.values.scalarized(sac.critic(observation, action)).mean(0).double()
    assert torch.from_numpy(estimate).numpy() == pytest.approx(means[:-1].detach().numpy(), abs=1e-5)
    last = episode.rewards[-2] + 0.99 * means[-1].item()  # the episode is truncated
    assert return_[-1] == pytest.approx(last, abs=1e-4)


def test_sac_compares_weighted_q_but_not_value_for_vector_rewards(tmp_path):
    algorithm = functools.partial(SMALL_SAC, reward_weights=[1.0, 0.5])
    compared, episode, trainer = measured(tmp_path, TradeOff, algorithm, length=9)
    assert compared.keys() == {"q"} and len(compared["q"][0]) == 8
    sac = trainer.algorithm
    observation, action = (torch.from_numpy(each) for each in (episode.observations[:-1], episode.actions))
    q = sac.values.scalarized(sac.critic(observation, action).mean(0))
    assert compared["q"][0] == pytest.approx(q[:-1].detach().numpy(), abs=1e-5)


def test_the_weighted_value_of_a_vector_reward_is_compared(tmp_path):
    compared, episode, trainer = measured(
        tmp_path, TradeOff, functools.partial(PPO, reward_weights=[1.0, 0.5]), length=9
    )
    network, values = trainer.algorithm.network, trainer.algorithm.values
    step = trainer.environment.reset()._replace(observation=torch.from_numpy(episode.observations[:-1]))
    value = values.scalarized(network.value(step, None))
    assert compared["value"][0] == pytest.approx(value[:-1].detach().numpy(), abs=1e-5)


def test_q_of_each_step_is_compared_with_the_return_from_that_step(tmp_path):
    dqn = functools.partial(DQN, gamma=0.9)
    trainer = Trainer(
        tmp_path, algorithm=dqn, environment=functools.partial(make_environment, "CartPole-v1", num_envs=2),
        batches=REPLAY, unroll_length=8, num_iterations=4, listeners=[], device="cpu",
    )  # fmt: skip
    trainer.start()
    diagnostic = MonteCarlo(1)
    diagnostic.start(trainer)
    [episode] = diagnostic._evaluator.test_episodes(1, 0)
    estimate, return_ = diagnostic._compared(trainer, episode)["q"]
    diagnostic.close()
    q, _ = trainer.algorithm.q_network(
        trainer.environment.reset()._replace(observation=torch.from_numpy(episode.observations[:-1])), None
    )
    taken = torch.from_numpy(episode.actions).long()
    assert torch.allclose(q.gather(-1, taken[:, None])[:, 0].double(), torch.from_numpy(estimate), atol=1e-5)
    length = episode.length
    assert episode.terminated[-1] and return_ == pytest.approx([(1 - 0.9 ** (length - t)) / 0.1 for t in range(length)])
    trainer.close()


def test_writers_receive_configuration_provenance_histograms_and_images(tmp_path, monkeypatch):
    recorder = Recorder()

    def custom(run):
        return {"frame": np.full((2, 3, 3), 7, np.uint8), "rewards": [1.0, 2.0], "progress": run.clock.progress}

    trainer = ppo(
        tmp_path, Summaries(diagnostics_period=1, custom_summary=custom, writers=[recorder]), num_iterations=2
    )

    class Films(Listener):
        def after_iteration(self, run, report):
            report.films["evaluation/film"], report.nominal_clock["evaluation"] = tmp_path / "film.mp4", 30

    monkeypatch.setattr("alfish.runs.writers.tensorboard.TensorBoardWriter.film", lambda *_: None)  # there is no film
    trainer.listeners.insert(0, Films())
    trainer.train()
    assert recorder.run.directory == tmp_path and recorder.run.id == trainer.directory.checkpoints.origin.run
    assert recorder.settings["Trainer.summary_period"] == "1" and "config.gin" in recorder.texts
    assert recorder.provenance["seed"] == json.loads((tmp_path / "provenance.json").read_text())[-1]["seed"]
    assert {type(shown) for _, shown in recorder.shown["custom/rewards"]} == {Histogram}
    [image, _] = recorder.shown["custom/frame"]
    assert isinstance(image[1], Image) and image[1].pixels.tolist() == np.full((2, 3, 3), 7).tolist()
    assert recorder.shown["evaluation/film"] == [(30, tmp_path / "film.mp4")] * 2
    assert [float(row["custom/progress"]) for row in table(tmp_path)] == [0.5, 1.0]
    assert {"histogram/action", "histogram/observation"} <= recorder.shown.keys()


def broken(run):
    return {"ratio": 1 / (run.clock.iterations - run.clock.iterations)}


def test_an_error_in_a_custom_summary_is_reported_in_one_sentence_with_its_line(tmp_path):
    trainer = ppo(tmp_path, Summaries(custom_summary=broken))
    line = broken.__code__.co_firstlineno + 1
    words = "Summaries.custom_summary broken raised ZeroDivisionError: division by zero"
    with pytest.raises(RunError, match=rf"^{words} \({__file__}:{line}, in broken\)$"):
        trainer.train()


@pytest.mark.parametrize("found", [None, 3, {"name": "text"}, {"name": None}, {"name": {"a": 1}}])
def test_what_a_custom_summary_cannot_return_is_reported_in_one_sentence(tmp_path, found):
    trainer = ppo(tmp_path, Summaries(custom_summary=lambda run: found))
    with pytest.raises(UsageError, match="custom_summary .*returned .*must"):
        trainer.train()


def test_only_diagnostics_and_writers_are_accepted():
    with pytest.raises(UsageError, match="Summaries.diagnostics "):
        Summaries([ModuleNorms])
    with pytest.raises(UsageError, match="writers has .*, which is not a Writer"):
        Summaries(writers=[ModuleNorms()])


def test_monte_carlo_refuses_what_trains_on_more_than_rows(tmp_path):
    trainer = sac(
        tmp_path,
        Summaries([MonteCarlo()]),
        algorithm=functools.partial(RetraceSAC, *SMALL_SAC.args, **SMALL_SAC.keywords, lambda_=0.9),
    )
    with pytest.raises(UsageError, match="MonteCarlo cannot measure RetraceSAC"):
        trainer.train()
