"""A policy's episodes are recorded to the bit, with their origin."""

import hashlib
import json
import sys

import gymnasium
import numpy as np
import pytest
from data_sets import NEEDS_MINARI, about, assert_same, left_by, read
from gymnasium.envs.registration import EnvSpec
from toys import OneState

import alfish
from alfish.__main__ import main
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.offline import OfflineBuffer, open_source
from alfish.runs.files import sha256

pytestmark = pytest.mark.usefixtures("home")

ENV_IDS = {"ppo_cartpole.gin": "CartPole-v1", "sac_pendulum.gin": "Pendulum-v1"}
TINY = {
    "ppo_cartpole.gin": ["MLP.layers=(8,)", "EpochBatches.num_epochs=1", "Trainer.num_env_steps=600"],
    "sac_pendulum.gin": [
        "MLP.layers=(8,)", "CriticEnsemble.layers=(8,)", "Trainer.num_env_steps=400", "ReplayBatches.capacity=400",
        "ReplayBatches.warmup_env_steps=100", "ReplayBatches.batch_size=8", "ReplayBatches.updates_per_env_step=0.05",
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=list(ENV_IDS))
def run(request, tmp_path_factory):
    """A finished run, and the id of its environment."""
    root_dir = tmp_path_factory.mktemp("runs") / "run"
    parameters = [*TINY[request.param], "Evaluate.num_episodes=1", "CheckpointSaver.period=200"]
    command = ["train", f"--gin_file={request.param}", f"--root_dir={root_dir}"]
    assert main([*command, *(f"--gin_param={one}" for one in parameters)]) == 0
    return root_dir, ENV_IDS[request.param]


@pytest.fixture
def output(run, home, tmp_path):
    """A place for a data set: in Minari for CartPole, in a directory for Pendulum; `test_outputs` has the others."""
    if run[1] != "CartPole-v1":
        return str(tmp_path / "set")
    pytest.importorskip("minari", reason="needs the extra 'minari'")
    return "minari:test/recorded-v0"


def recorded(root_dir, output, *flags):
    assert main(["record", f"--root_dir={root_dir}", f"--output={output}", *flags]) == 0
    return output if output.startswith("minari:") else f"alfish:{output}"


def assert_replays(episodes, seeds, env_id):
    """A fresh environment that is reset with the episode's seed does the same again."""
    assert len(episodes) == len(seeds) > 0
    for episode, seed in zip(episodes, seeds):
        env = gymnasium.make(env_id)
        observations, rows = [env.reset(seed=seed)[0]], []
        assert episode.actions.dtype == env.action_space.dtype
        for action in episode.actions:
            observation, *row, _ = env.step(action)
            observations.append(observation)
            rows.append(row)
        rewards, terminated, truncated = (np.array(part) for part in zip(*rows))
        assert np.array_equal(np.array(observations), episode.observations)
        assert np.array_equal(rewards.astype(np.float32), episode.rewards)
        assert np.array_equal(terminated, episode.terminated)
        assert np.array_equal(truncated & ~terminated, episode.truncated)


@pytest.mark.parametrize("flags", [(), ("--sample",)])
def test_what_is_recorded_happens_again(run, output, flags):
    root_dir, env_id = run
    name = recorded(root_dir, output, "--num_episodes=3", "--seed=30", *flags)
    episodes = read(name)
    assert about(name)["seeds"] == list(range(30, 33)) and about(name)["sample"] == bool(flags)
    assert_replays(episodes, about(name)["seeds"], env_id)
    source = open_source(name)
    env = gymnasium.make(env_id)
    assert source.spaces == (env.observation_space, env.action_space)
    OfflineBuffer([name]).check_spaces(env.observation_space, env.action_space)


def test_the_number_of_environments_changes_nothing(run, tmp_path):
    sets = [
        read(recorded(run[0], str(tmp_path / str(n)), "--num_episodes=3", "--sample", f"--num_envs={n}"))
        for n in (1, 2)
    ]
    assert_same(*sets)


def test_a_data_set_states_its_origin(run, output, capsys):
    root_dir, env_id = run
    name = recorded(root_dir, output, "--num_episodes=4", "--checkpoint=latest")
    told = about(name)
    *_, path = sorted((root_dir / "checkpoints").glob("*.pt"))
    assert told["algorithm"] == {"CartPole-v1": "PPO", "Pendulum-v1": "SAC"}[env_id]
    assert told["config"] == (root_dir / "operative_config.gin").read_text()
    assert told["alfish_version"] == alfish.__version__
    assert told["checkpoint"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.name == f"checkpoint-{told['checkpoint']['steps']:012d}.pt"
    assert EnvSpec.from_json(json.dumps(told["env_spec"])).id == env_id
    assert (told["seed"], told["sample"], told["min_return"]) == (1_000_000, False, None)  # not those of evaluations
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={root_dir}", "--num_episodes=4", "--seed=1000000", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert told["checkpoint"]["env_steps"] == summary["env_steps"]
    expected = {key: pytest.approx(summary[key]) for key in ("num_episodes", "mean", "min", "max")}
    assert told["reference_scores"] == expected
    assert told["report"]["num_transitions"] == sum(summary["lengths"])


@NEEDS_MINARI
def test_minari_opens_what_is_written_and_makes_the_environment_again(run):
    import minari

    root_dir, env_id = run
    recorded(root_dir, "minari:deep/er/name-v3", "--num_episodes=3", "--seed=8")
    data_set = minari.load_dataset("deep/er/name-v3")
    assert data_set.spec.total_episodes == 3 and data_set.env_spec.id == env_id
    assert data_set.storage.metadata["algorithm_name"] in ("PPO", "SAC")
    assert not data_set.storage.jpeg_encoding
    seeds = [episode["seed"] for episode in data_set.storage.get_episode_metadata(range(3))]
    assert seeds == [8, 9, 10]
    env = data_set.recover_environment()
    for episode, seed in zip(data_set.iterate_episodes(), seeds):
        observation, _ = env.reset(seed=seed)
        for t, action in enumerate(episode.actions):
            assert np.array_equal(observation, episode.observations[t])
            observation, reward, terminated, truncated, _ = env.step(action)
            assert np.float32(reward) == episode.rewards[t]
        assert np.array_equal(observation, episode.observations[-1])
        assert (terminated, truncated) == (episode.terminations[-1], episode.truncations[-1])
    assert list(minari.list_local_datasets()) == ["deep/er/name-v3"]
    assert "deep/er" in minari.namespace.list_local_namespaces()


def test_only_good_episodes_are_kept_and_counts_are_printed(run, output, capsys):
    root_dir, env_id = run
    whole = read(
        recorded(root_dir, f"{output.removesuffix('-v0')}_whole-v0", "--num_episodes=5", "--seed=0", "--sample")
    )
    returns = [float(episode.rewards.sum(dtype=np.float64)) for episode in whole]
    least = sorted(returns)[3]
    good = [k for k in range(5) if returns[k] >= least]
    capsys.readouterr()
    name = recorded(root_dir, output, "--num_episodes=5", "--seed=0", "--sample", f"--min_return={least!r}")
    words = capsys.readouterr().out
    assert f"5 episodes run from seed 0, {len(good)} written; {5 - len(good)} returned less" in words
    assert_same(read(name), [whole[k] for k in good])
    told = about(name)
    assert told["seeds"] == good and told["min_return"] == least
    assert told["reference_scores"]["num_episodes"] == 5
    assert told["reference_scores"]["min"] == min(returns) < least  # of those left out too
    assert_replays(read(name), good, env_id)


def test_without_good_episodes_nothing_is_written(run, output, tmp_path, refused):
    words = refused("record", f"--root_dir={run[0]}", f"--output={output}", "--num_episodes=3", "--min_return=1e6")
    assert "none of 3 episodes returned --min_return=1e+06 or more, the best returned" in words
    assert left_by(tmp_path) == []


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--output=x"], "--root_dir is missing"),
        (["--root_dir=x"], "--output is missing: give a directory to create, or a data set such as minari:"),
        (["--root_dir=x", "--output=d4rl:x"], "'d4rl:x' can only be read; a data set can be written to"),
        (["--root_dir=nowhere", "--output=x"], "nowhere is not a run"),
        pytest.param(
            ["--root_dir=x", "--output=minari:"], "'' is not the name of a Minari data set", marks=NEEDS_MINARI
        ),
        pytest.param(["--root_dir=x", "--output=minari:a/b"], "'a/b' is not the name of a", marks=NEEDS_MINARI),
        pytest.param(["--root_dir=x", "--output=minari:../b-v0"], "'../b-v0' is not the name", marks=NEEDS_MINARI),
    ],
)
def test_mistakes_are_reported_in_one_sentence(flags, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused("record", *flags)
    assert left_by(tmp_path) == []


def test_an_older_checkpoint_is_recorded_and_no_other(run, tmp_path, capsys):
    first, *others = sorted(int(path.stem.partition("-")[2]) for path in (run[0] / "checkpoints").glob("*.pt"))
    assert others
    name = recorded(run[0], str(tmp_path / "set"), "--num_episodes=3", "--seed=0", f"--checkpoint={first}")
    assert about(name)["checkpoint"]["steps"] == first
    means = []
    for which in (first, "latest"):
        capsys.readouterr()
        assert main(["evaluate", f"--root_dir={run[0]}", "--num_episodes=3", f"--checkpoint={which}", "--json"]) == 0
        means.append(json.loads(capsys.readouterr().out)["mean"])
    assert means[0] != means[1] or run[1] == "CartPole-v1"  # whose returns are few
    assert about(name)["reference_scores"]["mean"] == pytest.approx(means[0])


def test_a_missing_checkpoint_is_refused(run, tmp_path, refused):
    words = refused("record", f"--root_dir={run[0]}", f"--output={tmp_path}/set", "--checkpoint=7")
    assert "There is no checkpoint at 7 steps" in words and left_by(tmp_path) == []


def test_without_minari_the_install_command_is_reported(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "minari", None)
    assert "pip install 'alfish[minari]'" in refused("record", "--root_dir=x", "--output=minari:a/b-v0")


SPOILING = """
import gymnasium
import numpy as np

class Spoiling(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._seed, self._step = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._step += 1
        bad = self._seed == 2 and self._step == 3  # a policy that acts on it would refuse it
        return np.full(1, np.nan if bad else 0.5, np.float32), float(self._step), self._step == 3, False, {}

gymnasium.register("Spoiling-v0", Spoiling)
"""


def test_an_unusable_episode_is_named_and_nothing_is_written(tmp_path, monkeypatch, refused):
    (tmp_path / "spoiling.py").write_text(SPOILING)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["make_environment.env_id='spoiling:Spoiling-v0'", *TINY["ppo_cartpole.gin"], "Evaluate.num_episodes=1"]
    command = ["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path}/run"]
    assert main([*command, *(f"--gin_param={one}" for one in settings)]) == 0
    before = left_by(tmp_path)
    command = "record", f"--root_dir={tmp_path}/run", f"--output={tmp_path}/set", "--num_episodes=5", "--seed=0"
    words = refused(*command, status=1)
    assert "observation is not finite (1 episode: 2)" in words
    assert left_by(tmp_path) == before


def test_actions_are_written_as_they_were_executed(tmp_path):
    """In these bounds a rounding of the stretched action would leave them."""
    (tmp_path / "edges.py").write_text(EDGES)
    sys.path.insert(0, str(tmp_path))
    try:
        settings = ["make_environment.env_id='edges:Edges-v0'", *TINY["ppo_cartpole.gin"], "Evaluate.num_episodes=1"]
        command = ["train", "--gin_file=ppo_pendulum.gin", f"--root_dir={tmp_path}/run"]
        assert main([*command, *(f"--gin_param={one}" for one in settings)]) == 0
        name = recorded(tmp_path / "run", str(tmp_path / "set"), "--num_episodes=2", "--seed=5", "--sample")
        num_at_bounds = 0
        for k, episode in enumerate(open_source(name).episodes()):
            env = gymnasium.make("Edges-v0")
            env.reset(seed=5 + k)
            for action, reward in zip(episode.actions, episode.rewards):
                assert np.float32(env.step(action)[1]) == reward
            assert all(env.action_space.contains(action) for action in episode.actions)
            low, high = env.action_space.low, env.action_space.high
            num_at_bounds += sum((action == low) | (action == high) for action in episode.actions).sum()
        assert num_at_bounds > 0
    finally:
        sys.path.remove(str(tmp_path))


EDGES = """
import gymnasium
import numpy as np

class Edges(gymnasium.Env):
    '''Rewards with a number that tells neighbouring actions apart.'''

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(np.float32([-0.4, 0.1]), np.float32([0.7, 0.3]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self.np_random.random(1).astype(np.float32), {}

    def step(self, action):
        self._step += 1
        reward = float(action.view(np.int32).sum() % 100_003)
        return self.np_random.random(1).astype(np.float32), reward, False, self._step == 20, {}

gymnasium.register("Edges-v0", Edges)
"""


def test_spaces_and_spec_equal_those_of_single_environments():
    assert make_environment("CartPole-v1", 2, evaluation=True).env_spec.id == "CartPole-v1"
    assert make_environment(OneState).env_spec is None
    assert make_environment(TensorPointMass).env_spec is None


def test_a_checkpoint_of_any_size_has_its_own_checksum(tmp_path):
    content = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "file").write_bytes(content)
    assert sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()
