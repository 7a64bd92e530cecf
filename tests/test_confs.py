"""Every shipped conf says what it is, and runs as it stands, by the shipped command."""

import contextlib
import importlib.util
import json
import re

import gin
import pytest
from shown_names import is_documented, names_in

import alfish
from alfish.__main__ import main
from alfish.bin.check_env import algorithms
from alfish.bin.confs import read
from alfish.configuration import reachability, reading
from alfish.configuration.locating import confs_directory
from alfish.training.trainer import Trainer
from benchmarks.fingerprints import recorded

# Box2D's SWIG types are deprecated; made an error while the module is being imported, the warning is a crash.
pytestmark = [
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),  # in mo-gymnasium
]

CONFS = sorted(confs_directory().glob("*.gin"))
TASKS = [path for path in CONFS if read(path).task]
EXAMPLES = sorted((confs_directory().parent / "examples" / "confs").glob("*.gin"))  # never trained, so not shipped
BASES = [algorithm.__name__.lower() for algorithm in algorithms()]
ADDITIONS = [confs_directory() / "async.gin"]  # put after the conf of a task
ON_A_CLUSTER = [confs_directory() / "ray.gin"]  # the same; tests/unrollers/test_ray_workers.py trains with it
NEEDS = {
    r"(HalfCheetah|Hopper|Walker2d|Ant|Humanoid|Swimmer|Reacher|Inverted\w+)-v\d": "mujoco",
    r"(LunarLander|BipedalWalker|CarRacing)": "Box2D",
    r"ALE/": "ale_py",
    r"mo_gymnasium": "mo_gymnasium",
    r"gymnax:": "gymnax",
    r"minigrid:": "minigrid",
    r"gymnasium_robotics:": "gymnasium_robotics",
    r"mpe2\.": "mpe2",
    r"EnvPool": "envpool",
    r"CartPole|Pendulum|Acrobot|MountainCar|Recall|BitFlip|MaskedIdentity|Catch": "gymnasium",
}
TINY = [
    "Trainer.num_env_steps=None",
    "Trainer.num_updates=None",
    "Trainer.num_iterations=2",
    "Trainer.unroll_length=8",
    "make_environment.num_envs=2",
    "MLP.layers=(8,)",
    "Evaluate.num_episodes=1",
    "Trainer.max_evaluation_length=40",
    "Trainer.summary_period=1",
]
# By what a conf configures: whatever is bound must be read.
TINY_WHERE = {
    # Values in the scope of a policy replace those of all policies.
    "chaser/EpochBatches": ["chaser/EpochBatches.minibatch_size=8", "runner/EpochBatches.minibatch_size=8"],
    "EpochBatches.num_epochs = 10": ["EpochBatches.num_epochs=2"],  # of ppo.gin and appo.gin; A2C has 1
    "EpochBatches.minibatch_size": ["EpochBatches.minibatch_size=8"],
    "@PhasicBatches": [
        "PhasicBatches.num_epochs=1",
        "PhasicBatches.minibatch_size=8",
        "PhasicBatches.num_unrolls=2",
        "PhasicBatches.num_auxiliary_epochs=1",
        "PhasicBatches.auxiliary_minibatch_size=8",
    ],
    # An iteration is 16 environment steps, so the first one trains already.
    "@ReplayBatches": [
        "ReplayBatches.warmup_env_steps=8",
        "ReplayBatches.updates_per_env_step=0.25",
        "ReplayBatches.batch_size=8",
        "ReplayBatches.capacity=64",
    ],
    "ReplayBatches.offline_updates": ["ReplayBatches.offline_updates=2"],
    "@ApprenticeshipRounds": ["ApprenticeshipRounds.num_episodes=2", "ApprenticeshipRounds.period=16"],
    "@OfflineBatches": ["OfflineBatches.batch_size=8", "OfflineBatches.updates_per_iteration=2"],
    # A window of stacks reaches further back.
    "dqn_atari.gin": ["ReplayBatches.warmup_env_steps=10"],
    # A state every so many rows of an environment: windows start no more often.
    "ReplayBatches.state_period": [
        "ReplayBatches.state_period=8",
        "ReplayBatches.burn_in=1",
        "ReplayBatches.warmup_env_steps=24",
        "ReplayBatches.updates_per_env_step=0.5",
    ],
    "ReplayBatches.window_length": ["ReplayBatches.window_length=3"],
    "ReplayBatches.updates_per_env_step = 20": ["ReplayBatches.updates_per_env_step=2", "SAC.actor_period=4"],
    "Learner.compile": ["Learner.compile=False"],  # takes seconds, and has tests of its own
    "@CompiledUnroller": ["CompiledUnroller.compile=False"],  # the same
    "CriticEnsemble.layers": ["CriticEnsemble.layers=(8,)"],
    # Games run for thousands of frames, and nothing stands between their CNN and the heads.
    "@preprocess_atari": [
        "NatureCNN.output_size=8",
        "MLP.layers=()",
        "make_environment.env_kwargs={'frameskip': 1, 'max_num_frames_per_episode': 60}",
        "make_environment.num_envs=1",  # each loads its game for 0.2 s
        "make_environment.vectorization='sync'",
        "Trainer.unroll_length=16",
    ],
}
EXPERT = {
    "num_iterations": 1,
    "unroll_length": 16,
    "make_environment.num_envs": 1,
    "EpochBatches.num_epochs": 1,
    "EpochBatches.minibatch_size": 8,
    "Evaluate.num_episodes": 1,
    "max_evaluation_length": 40,
}
EVALUATED = {"ppo_cartpole", "bc_pendulum", "dqn_recall"}  # by the command


def is_missing(path):
    """The module that this conf needs and that is not installed, or None."""
    task = read(path).task
    needed = [module for pattern, module in NEEDS.items() if re.search(pattern, task)]
    return next((module for module in needed if importlib.util.find_spec(module) is None), None)


def skip_where_an_extra_is_missing(path):
    if is_missing(path):
        pytest.skip(f"{path.name} needs {is_missing(path)}, which is not installed")


def with_included(path):
    included = re.findall(r"^include '([^']+)'", path.read_text(), re.MULTILINE)
    return [path, *(one for name in included for one in with_included(confs_directory() / name))]


def names(paths):
    return [path.stem for path in paths]


def named(path):
    """The name by which a user trains it: a shipped conf from any directory, an example by its path."""
    return path.name if path in TASKS else path


def tiny(path, tmp_path):
    """What makes a run of this conf short."""
    text = "".join(one.read_text() for one in with_included(path))
    chosen = [one for where, more in TINY_WHERE.items() if where in text for one in more]
    if "@ReplayBatches" in text:  # also where an included file has OfflineBatches
        chosen = [one for one in chosen if not one.startswith("OfflineBatches.")]
    env_id = next(iter(re.findall(r"make_environment.env_id = '([^']+)'", text)), "")
    if "@saved_policy" in text:
        alfish.train("PPO", env_id, root_dir=tmp_path / "expert", **EXPERT)
        chosen.append(f"saved_policy.root_dir='{tmp_path / 'expert'}'")
    if "@OfflineBuffer" in text:
        chosen.append(f"OfflineBuffer.sources=['{recorded(env_id, tmp_path / 'data')}']")
    if "@actor/Residual" in text:  # in place of every MLP
        sizes = ["critic/Residual.width=8", "actor/Residual.width=8"]
        chosen += [*sizes, *(one for one in TINY if not one.startswith("MLP"))]
    else:
        chosen += TINY
    if "@make_games" in text:
        chosen = [one.replace("make_environment.num_envs", "make_games.num_games") for one in chosen]
    return [f"--gin_param={one}" for one in chosen]


def policies_of(run):
    """Names of the policies of a run of several; [None] for a run of one."""
    scalars = (run / "metrics.csv").read_text().partition("\n")[0]
    return re.findall(r"\btrain/(\w+)/loss\b", scalars) or [None]


def parts_of(path):
    """Names of the parts that a conf configures, without their scopes."""
    texts = [one.read_text() for one in with_included(path)]
    vector = {"a vector reward"} if "mo_gymnasium" in texts[0] else set()
    return vector | {part.rpartition("/")[2] for text in texts for part in re.findall(r"@([\w/.]+)", text)}


def covering(paths):
    """Returns some of the confs that together have all parts; confs with more parts are chosen first."""
    seen, chosen = set(), []
    for path in sorted(paths, key=lambda path: (path.stem not in EVALUATED, -len(parts_of(path)))):
        if parts_of(path) - seen:
            seen |= parts_of(path)
            chosen.append(path)
    return chosen


TRAINED = covering(TASKS + EXAMPLES)
BUILT = [path for path in TASKS + EXAMPLES if path not in TRAINED]


@pytest.mark.parametrize("path", BUILT, ids=names(BUILT))
def test_all_parts_can_be_built_and_all_bindings_are_read(path, tmp_path):
    skip_where_an_extra_is_missing(path)
    found = reading.read([str(path)], [one.removeprefix("--gin_param=") for one in tiny(path, tmp_path)])
    with contextlib.closing(Trainer("nowhere")) as trainer:
        reachability.refuse_unread(found)
        algorithms = getattr(trainer.algorithm, "algorithms", [trainer.algorithm])  # of each policy in games
        assert {type(one).__name__ for one in algorithms} == {read(path).algorithm.split()[0].strip(",")}


@pytest.mark.parametrize("path", TRAINED, ids=names(TRAINED))
def test_it_trains_two_iterations_by_the_shipped_command(tmp_path, path, capsys):
    skip_where_an_extra_is_missing(path)
    # Also: whatever it binds is read, or the command would refuse.
    assert main(["train", f"--gin_file={named(path)}", f"--root_dir={tmp_path / 'run'}", *tiny(path, tmp_path)]) == 0
    done = json.loads((tmp_path / "run" / "done").read_text())
    assert done["iterations"] == 2
    assert done["updates"] > 0
    written = names_in(tmp_path / "run")
    policies = policies_of(tmp_path / "run")
    for policy in policies:
        assert alfish.load(tmp_path / "run", policy=policy).env_steps == done["env_steps"]
        units = f"dormant_units/{policy}/all" if policy else "dormant_units/all"
        assert {"time/phase/update_ms", units} < written, "diagnostics are shown for every conf"
    plain = {re.sub(rf"/({'|'.join(map(str, policies))})(?=/)", "", name) for name in written}
    assert [name for name in sorted(plain) if not is_documented(name)] == []
    if path.stem in EVALUATED:
        capsys.readouterr()
        assert main(["evaluate", f"--root_dir={tmp_path / 'run'}", "--num_episodes=1"]) == 0
        clock = f"{done['updates']:,} updates" if done["env_steps"] == 0 else f"{done['env_steps']:,} env steps"
        assert f"checkpoint at {clock}, 1 episode from" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "sac_pendulum",
        pytest.param("appo_cartpole", marks=pytest.mark.slow),
        pytest.param("dqn_recall", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("addition", ADDITIONS, ids=names(ADDITIONS))
def test_an_addition_changes_a_conf_and_it_trains_still(tmp_path, addition, name):
    path = confs_directory() / f"{name}.gin"
    files = [f"--gin_file={path.name}", f"--gin_file={addition.name}"]
    assert main(["train", *files, f"--root_dir={tmp_path / 'run'}", *tiny(path, tmp_path)]) == 0
    assert "AsyncUnroller" in (tmp_path / "run" / "operative_config.gin").read_text()
    assert json.loads((tmp_path / "run" / "done").read_text())["iterations"] == 2


def test_each_task_opens_with_its_task_algorithm_and_result_as_it_configures_them():
    for path in TASKS + EXAMPLES:
        lines = path.read_text().splitlines()
        assert [line.partition(":")[0] for line in lines[:3]] == ["# Task", "# Algorithm", "# Result"], path.name
        assert all(line.partition(":")[2].strip() for line in lines[:3]), path.name
        if is_missing(path):
            continue
        conf = read(path)
        reading.read([str(path)], [])
        is_game = "make_games" in gin.query_parameter("Trainer.environment").selector
        env_id = gin.query_parameter("make_games.game" if is_game else "make_environment.env_id")
        # A class of ours, or a name.
        assert conf.task.split()[0].strip(",") == getattr(env_id, "selector", env_id), path.name
        assert conf.algorithm.split()[0].strip(",") == gin.query_parameter("Trainer.algorithm").selector, path.name


def test_each_conf_has_a_comment_a_source_and_a_use():
    for path in CONFS:
        assert path.read_text().startswith("# "), path.name
        assert any("arxiv.org" in one.read_text() for one in with_included(path)), path.name
        is_included = any(f"include '{path.name}'" in other.read_text() for other in CONFS + EXAMPLES)
        is_base = path.stem in BASES  # `alfish.train` reads it
        assert path in TASKS + ADDITIONS + ON_A_CLUSTER or is_included or is_base, path.name


def test_example_confs_state_that_they_are_untrained():
    assert {"ppo_breakout", "dqn_breakout"} <= set(names(EXAMPLES))
    for path in EXAMPLES:
        assert read(path).result.endswith("never trained"), path.name
        assert path.name not in {conf.name for conf in CONFS}, f"`alfish confs` lists {path.name}"


def test_the_shipped_tasks_are_found():
    assert {"ppo_cartpole", "a2c_cartpole", "appo_cartpole"} <= set(names(TASKS)) and alfish.__file__


def test_the_skip_list_knows_every_task():
    for path in TASKS:
        assert any(re.search(pattern, read(path).task) for pattern in NEEDS), f"which module brings {path.name}?"
