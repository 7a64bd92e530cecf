"""An exported policy acts as the policy of the run, from raw observations to actions, in every format."""

import functools
import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_confs import TASKS, skip_where_an_extra_is_missing, tiny
from torch import nn

import alfish
from alfish import specs
from alfish.__main__ import main
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.configuration import reading
from alfish.configuration.runs import configured_trainer
from alfish.errors import RunError, UsageError
from alfish.exporting import exporting, numpy_file, onnx_file
from alfish.exporting.graph import NotExportable, PolicyGraph
from alfish.exporting.policy_step import PolicyStep
from alfish.exporting.verification import Step, from_environment
from alfish.networks import (
    GRU,
    ActorCritic,
    AttentionWindow,
    Encoder,
    MinGRU,
    OneHotGrid,
    PolicyHead,
    QNetwork,
    StackedMemory,
)
from alfish.networks.encoders import Torso
from alfish.policies.networks import make_networks
from alfish.training.policy import Policy
from alfish.transforms import ObservationNormalizer, PreviousStep

pytestmark = [
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
]
BY_NAME = {path.stem: path for path in TASKS}
# Squashing and gradient-free noise; normalizer; masks; frame stack and convolutions; memory; dict observations.
FEW = ["sac_pendulum", "ppo_hopper", "dqn_masked", "ppo_pong", "sac_recall", "student_halfcheetah", "dqn_bitflip"]


def of_conf(name, tmp_path):
    """Returns the Trainer of a shipped conf, small and untrained."""
    skip_where_an_extra_is_missing(BY_NAME[name])
    params = [one.removeprefix("--gin_param=") for one in tiny(BY_NAME[name], tmp_path)]
    return configured_trainer(tmp_path / "run", reading.read([str(BY_NAME[name])], params))


def sampled(policy, count, seed=0):
    """Returns observations of the space, in episodes of seven."""
    policy.observation_space.seed(seed)
    shape = policy.algorithm.reward_spec.shape
    return [
        Step(policy.observation_space.sample(), t % 7 == 0, np.full(shape, 0.1 * t, np.float32)) for t in range(count)
    ]


def loaded(path):
    spec = importlib.util.spec_from_file_location("policy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Policy


@pytest.fixture(autouse=True)
def gin_is_left_as_it_was():
    with reading.preserved():
        yield


@pytest.mark.parametrize("name", FEW)
def test_some_confs_act_equally_in_numpy_and_onnx(name, tmp_path):
    policy = of_conf(name, tmp_path).policy()
    for suffix, sample in ((".py", False), (".onnx", True)):
        found = exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 30), sample)
        assert found.difference <= exporting.LIMIT and found.from_program in (None, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name, sample", [("sac_recall", True), ("ppo_pong", False)])
def test_some_confs_act_equally_as_a_torch_program(name, sample, tmp_path):
    policy = of_conf(name, tmp_path).policy()
    assert exporting.export(policy, tmp_path / "policy.pt2", sampled(policy, 20), sample).difference < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
def test_every_conf_acts_equally_on_1000_recorded_observations(name, tmp_path):
    trainer = of_conf(name, tmp_path)
    policy, steps = trainer.policy(), from_environment(trainer, 1000, seed=0)
    for suffix in exporting.FORMATS:
        for sample in (False, True):
            found = exporting.export(policy, tmp_path / f"policy{suffix}", steps, sample)
            assert found.difference <= exporting.LIMIT and found.from_program in (None, 0.0)


OBSERVATION = spaces.Dict({
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "kind": spaces.Discrete(4, start=3),
    "bits": spaces.MultiBinary(3),
    "joints": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "two": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(0, 9, (2,), np.int32))),
})  # fmt: skip
ACTION = spaces.Dict({
    "grip": spaces.Discrete(3, start=-1),
    "move": spaces.Tuple((spaces.Box(-2, 5, (2, 1), np.float64), spaces.Box(0, 4, (), np.int32))),
    "keys": spaces.MultiBinary((2, 2)),
    "dials": spaces.MultiDiscrete([3, 4]),
})  # fmt: skip


def of_spaces(observation, action, transforms=(), critic_torso=Torso, **settings):
    """Returns an untrained policy of PPO for any spaces; `settings` are of the actor's torso."""
    head = functools.partial(PolicyHead, gain=1.0)
    torso = functools.partial(Torso, **settings)
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=critic_torso, policy_head=head)
    algorithm = functools.partial(PPO, network=network)
    leaves = specs.observation_spec(observation), specs.action_spec(action), specs.reward_spec()
    return Policy(*make_networks(algorithm, transforms, *leaves, "cpu"), observation, action)


@pytest.mark.parametrize("suffix", [".py", ".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_a_grid_of_symbols_acts_equally(suffix, tmp_path):
    torch.manual_seed(0)
    encoder = functools.partial(Encoder, leaves={"": functools.partial(OneHotGrid, sizes=(5, 3, 2))})
    policy = of_spaces(spaces.Box(0, 4, (7, 7, 3), np.uint8), spaces.Discrete(3), encoder=encoder)
    assert exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 20)).difference <= exporting.LIMIT


@pytest.mark.parametrize("suffix", [".py", ".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sample", [False, True])
def test_exported_policies_act_equally_for_any_spaces_with_memory(suffix, sample, tmp_path):
    torch.manual_seed(0)
    policy = of_spaces(OBSERVATION, ACTION, [PreviousStep, ObservationNormalizer], memory=GRU)
    found = exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 20), sample)
    assert found.difference <= exporting.LIMIT
    program = PolicyGraph(policy, sample)
    assert {"first", "reward", "state.memory.actor"} <= {leaf.name for leaf in program.inputs}
    assert [leaf.name for leaf in program.state if "prev_action" in leaf.name]


@pytest.mark.parametrize("suffix", [".py", ".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_a_stack_of_memories_acts_equally(suffix, tmp_path):
    """Episodes of seven fill the window, and empty it."""
    torch.manual_seed(0)
    memory = functools.partial(StackedMemory, layers=[MinGRU, functools.partial(AttentionWindow, length=5), GRU])
    policy = of_spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float32), memory=memory)
    found = exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 30))
    assert found.difference <= exporting.LIMIT
    assert [leaf.name for leaf in PolicyGraph(policy).state] == [
        "state.memory.actor.0", "state.memory.actor.1.0", "state.memory.actor.1.1", "state.memory.actor.2"
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".py", ".onnx", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_unstable_memories_are_compared_step_by_step(suffix, tmp_path):
    torch.manual_seed(0)
    action = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    policy = of_spaces(spaces.Box(-1, 1, (3,), np.float32), action, [PreviousStep], memory=GRU)
    with torch.no_grad():
        for parameter in policy.algorithm.parameters():
            parameter.mul_(3)
    steps = [
        step._replace(first=t == 0, reward=np.zeros((), np.float32)) for t, step in enumerate(sampled(policy, 300))
    ]
    assert exporting.export(policy, tmp_path / f"policy{suffix}", steps).difference <= exporting.LIMIT


@pytest.mark.parametrize("leaf", ["state.memory.actor", "state.prev_action"])
def test_a_state_that_differs_is_a_difference(leaf, tmp_path, monkeypatch):
    torch.manual_seed(0)
    action = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    policy = of_spaces(spaces.Box(-1, 1, (3,), np.float32), action, [PreviousStep], memory=GRU)
    run = exporting.verification.run_onnx

    def changed(program, path, inputs):
        names = [one.name for one in (*program.actions, *program.state)]
        results = run(program, path, inputs)
        results[names.index(leaf)][2] += 1e-3
        return results

    monkeypatch.setitem(exporting.FORMATS, ".onnx", exporting.FORMATS[".onnx"]._replace(run=changed))
    with pytest.raises(RunError, match=r"by up to 0.001 .*policy's step enlarges"):
        exporting.export(policy, tmp_path / "policy.onnx", sampled(policy, 5))


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return of_spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32), memory=GRU)


def test_a_numpy_file_acts_like_the_policy_call_by_call(policy, tmp_path):
    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 10))
    mine = loaded(tmp_path / "policy.py")()
    policy.reset()
    for step in sampled(policy, 15, seed=1):
        expected = policy.act(step.observation, first=step.first)
        found = mine.act(step.observation, first=bool(step.first))
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-6)
    one = mine.act(np.ones(3), first=True)
    mine.act(np.zeros(3))
    mine.reset()
    assert np.array_equal(mine.act(np.ones(3)), one)


def test_the_caller_of_a_numpy_file_may_write_to_an_action(tmp_path):
    torch.manual_seed(0)
    policy = of_spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-np.inf, np.inf, (2,)), [PreviousStep])
    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 10))
    found = []
    for writes in (False, True):
        mine = loaded(tmp_path / "policy.py")()
        for _ in range(4):
            action = mine.act(np.ones(3), reward=0.5)
            found.append(action.tolist())
            if writes:
                action += 5
    assert found[:4] == found[4:] and found[0] != found[1]


def test_the_state_of_a_step_is_the_callers(policy, tmp_path):
    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 10))
    mine = loaded(tmp_path / "policy.py")()
    state = mine.initial_state()
    assert {name: leaf.shape for name, leaf in state.items()} == {"state.memory.actor": (64,)}
    first, after = mine.step(np.ones(3), state)
    again, _ = mine.step(np.ones(3), state)
    later, _ = mine.step(np.ones(3), after)
    reset, _ = mine.step(np.ones(3), after, first=True)
    assert np.array_equal(first, again) and np.array_equal(first, reset) and not np.array_equal(first, later)


def test_a_policy_without_memory_has_no_state(tmp_path):
    policy = of_spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
    program = PolicyGraph(policy)
    assert [leaf.name for leaf in program.inputs] == ["observation"] and program.state == []


def test_state_that_no_action_depends_on_is_not_carried():
    torso = functools.partial(Torso, memory=GRU)
    spaces_of_both = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    policy = of_spaces(*spaces_of_both, critic_torso=torso, memory=GRU)
    program = PolicyGraph(policy, sample=True)
    assert "state.memory.critic" in PolicyStep(policy, True).state_names
    assert [leaf.name for leaf in program.state] == ["state.memory.actor"]


class Layers(nn.Sequential):
    """Layers that no shipped configuration has."""

    def __init__(self, spec):
        image = [nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.LeakyReLU(0.1)]
        image += [nn.Conv2d(4, 4, 2, bias=False)]
        flat = [nn.Flatten(), nn.Linear(36, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 12), nn.ELU()]
        more = [nn.LayerNorm(12, elementwise_affine=False), nn.SiLU(), nn.Softplus(beta=2), nn.Hardtanh(0.5, 1)]
        super().__init__(*image, *flat, *more, nn.Linear(12, 8), nn.Softmax(-1))
        self.output_size = 8

    def forward(self, leaf):
        images = leaf.flatten(0, -4).float().movedim(-1, 1) / 255 - 0.5
        return super().forward(images).exp().log1p().rsqrt().unflatten(0, leaf.shape[:-3])


@pytest.mark.parametrize("suffix", [".py", ".onnx"])
def test_custom_layers_act_equally(suffix, tmp_path):
    torch.manual_seed(0)
    encoder = functools.partial(Encoder, leaves={"": Layers})
    observation, action = spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(-1, 1, (3,), np.float32)
    policy = of_spaces(observation, action, encoder=encoder)
    assert exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 20)).difference < 1e-6
    actions = exporting.verification.results_of(policy, PolicyGraph(policy), sampled(policy, 20), sample=False)[0]
    assert actions.std(0).min() > 1e-4  # else nothing was compared


def test_leaves_that_no_action_depends_on_are_not_inputs():
    observation = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32) for name in ("seen", "hidden")})
    policy = of_spaces(observation, spaces.Discrete(2), encoder=lambda spec: Encoder(spec, leaves={"hidden": None}))
    assert [leaf.name for leaf in PolicyGraph(policy).inputs] == ["observation.seen"]


def test_sampled_policies_with_noisy_layers_are_refused_for_what_they_are(tmp_path):
    observation, action = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(5)
    algorithm = functools.partial(DQN, q_network=functools.partial(QNetwork, noisy=True))
    leaves = specs.observation_spec(observation), specs.action_spec(action), specs.reward_spec()
    noisy = Policy(*make_networks(algorithm, (), *leaves, "cpu"), observation, action)
    assert exporting.export(noisy, tmp_path / "mode.py", sampled(noisy, 20)).difference == 0
    with pytest.raises(UsageError, match="NoisyLinear.* cannot be exported"):
        exporting.export(noisy, tmp_path / "sampled.py", sampled(noisy, 20), sample=True)


def test_samples_are_drawn_again_at_each_call(policy, tmp_path):
    import onnxruntime

    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 10), sample=True)
    make = loaded(tmp_path / "policy.py")
    mine, twin, other = make(seed=1), make(seed=1), make(seed=2)
    state = mine.initial_state()
    draws = [one.step(np.ones(3), state)[0] for one in (mine, mine, twin, twin, other)]
    assert np.array_equal(draws[0], draws[2]) and np.array_equal(draws[1], draws[3])
    assert not np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[4])
    exporting.export(policy, tmp_path / "policy.onnx", sampled(policy, 10), sample=True)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    assert {one.name for one in session.get_inputs()} == {"observation", "first", "state.memory.actor"}
    row = {
        "observation": np.ones(3, np.float32),
        "first": np.array(True),
        "state.memory.actor": np.zeros(64, np.float32),
    }
    spread = np.std([session.run(["action"], row)[0] for _ in range(2000)], axis=0)
    np.testing.assert_allclose(spread, np.std([mine.step(np.ones(3), state)[0] for _ in range(2000)], 0), rtol=0.1)


def test_onnx_has_the_initial_state_and_names(policy):
    made = onnx_file.model(PolicyGraph(policy), "mine")
    assert [one.name for one in made.graph.output] == ["action", "next_state.memory.actor"]
    assert json.loads({one.key: one.value for one in made.metadata_props}["initial_state"]) == {
        "state.memory.actor": 0.0
    }


class Reads(nn.Module):
    """Looks at values."""

    def __init__(self, spec):
        super().__init__()
        self.output_size = 3

    def forward(self, leaf):
        return leaf if leaf.sum().item() > 0 else -leaf


class Sorts(Reads):
    """Has no translation."""

    def forward(self, leaf):
        return leaf.sort(-1).values


class Counts(Reads):
    """Depends on the number of calls."""

    calls = 0

    def forward(self, leaf):
        self.calls += 1
        return leaf * self.calls


def with_encoder(module):
    encoder = lambda spec: Encoder(spec, leaves={"": module})  # noqa: E731
    return of_spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(9), encoder=encoder)


@pytest.mark.parametrize("suffix", [".py", ".onnx"])
def test_what_cannot_be_exported_names_the_module(suffix, tmp_path):
    for module, reason in ((Reads, "reads values"), (Sorts, "sort")):
        policy = with_encoder(module)
        with pytest.raises(NotExportable, match=rf"algorithm\..*\({module.__name__}\) cannot be exported: .*{reason}"):
            exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".py", ".onnx"])
def test_a_policy_that_would_act_differently_is_not_written(suffix, tmp_path):
    policy = of_spaces(
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(-1, 1, (2,), np.float32),
        encoder=lambda spec: Encoder(spec, leaves={"": Counts}),
    )
    with pytest.raises(
        RunError, match=r"acts differently.*by up to .*limit 1e-05.* a value that changes between calls"
    ):
        exporting.export(policy, tmp_path / f"policy{suffix}", sampled(policy, 9))
    assert not list(tmp_path.iterdir())


def test_a_number_that_is_not_one_is_a_difference():
    nan, zero = np.array([np.nan]), np.zeros(1)
    for found in ([nan, zero], [zero, nan]):
        assert not exporting.verification.difference(found, [zero, zero]) <= exporting.LIMIT


def test_a_numpy_file_refuses_other_weights(policy, tmp_path):
    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 5))
    np.savez(tmp_path / "policy.npz", w=np.zeros(1))
    with pytest.raises(ValueError, match=r"policy.npz does not contain the weights of policy.py"):
        loaded(tmp_path / "policy.py")()


def test_a_numpy_file_refuses_an_observation_of_another_shape(policy, tmp_path):
    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 5))
    with pytest.raises(ValueError, match=r"observation has shape \[4\], but \[3\] is expected"):
        loaded(tmp_path / "policy.py")().act(np.zeros(4))


def test_a_numpy_file_refuses_an_observation_that_is_not_finite(policy, tmp_path):
    exporting.export(policy, tmp_path / "policy.py", sampled(policy, 5))
    with pytest.raises(ValueError, match="observation has a value that is not finite; the action would be meaningless"):
        loaded(tmp_path / "policy.py")().act(np.array([0, np.nan, 0]))


def test_the_numpy_file_is_checked_without_torch_and_alfish(policy, tmp_path):
    program = PolicyGraph(policy)
    path = tmp_path / "policy.py"
    numpy_file.write(program, path, "mine")
    path.write_text(path.read_text() + "\nimport torch\n")
    steps = sampled(policy, 2)
    results = exporting.verification.results_of(policy, program, steps, sample=False)
    inputs = exporting.verification.inputs_of(program, steps, results)
    with pytest.raises(RunError, match="torch"):
        exporting.verification.run_numpy(program, path, inputs)


def test_the_command_exports_a_run(tmp_path, capsys):
    run = tmp_path / "run"
    settings = {"num_env_steps": 64, "unroll_length": 16, "make_environment.num_envs": 2, "MLP.layers": (8,),
                "EpochBatches.minibatch_size": 16, "Evaluate.num_episodes": 1}  # fmt: skip
    alfish.train("PPO", "CartPole-v1", root_dir=run, **settings)
    capsys.readouterr()
    for name in ("policy.py", "policy.onnx"):
        assert main(["export-policy", f"--root_dir={run}", f"--output={tmp_path / name}", "--num_steps=40"]) == 0
        words = capsys.readouterr().out
        assert (
            "largest difference from the policy on 40 observations: 0" in words and "PPO policy of the run run" in words
        )
    observation = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    assert loaded(tmp_path / "policy.py")().act(observation) == alfish.load(run).act(observation)
    assert main(["record", f"--root_dir={run}", f"--output={tmp_path / 'data'}", "--num_episodes=9"]) == 0
    command = ["export-policy", f"--root_dir={run}", f"--output={tmp_path / 'more.py'}"]
    assert main([*command, f"--data=alfish:{tmp_path / 'data'}", "--num_steps=30"]) == 0
    capsys.readouterr()
    for arguments, words in (
        (["export-policy"], "--root_dir is missing"),
        (["export-policy", f"--root_dir={run}"], "--output is missing"),
        (["export-policy", f"--root_dir={run}", "--output=policy.pb"], "must end in .onnx, .py or .pt2"),
        ([*command, f"--data=alfish:{tmp_path / 'data'}", "--num_steps=100000"], "100,000 were requested"),
        (["export-policy", f"--root_dir={tmp_path}/none", f"--output={tmp_path}/a.py"], "is not a run"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def test_a_missing_extra_is_reported_in_one_sentence(policy, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"pip install 'alfish\[onnx\]'"):
        exporting.export(policy, tmp_path / "policy.onnx", sampled(policy, 2))
