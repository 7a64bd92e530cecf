"""Directories that came from somebody else: a command ends with one sentence that names the damaged file."""

import json
import os
import shutil
import signal

import pytest
import toy_confs

import alfish
from alfish.__main__ import main
from alfish.sweeps.base import Base
from alfish.sweeps.population import PopulationSpecification
from alfish.sweeps.sweep import SweepSpecification

SETTINGS = {
    "num_env_steps": 96, "unroll_length": 16, "make_environment.num_envs": 2, "MLP.layers": (4,),
    "EpochBatches.minibatch_size": 16, "Evaluate.period": 48, "Evaluate.num_episodes": 2, "CheckpointSaver.period": 64,
}  # fmt: skip
SECONDS = 30  # after which a command hangs


def replaced(path):
    path.unlink() if path.is_symlink() or path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def text(content):
    return lambda path, elsewhere: replaced(path).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def link(target):
    return lambda path, elsewhere: replaced(path).symlink_to(target or elsewhere)


def sparse(path, elsewhere):
    with open(replaced(path), "wb") as file:
        file.truncate(2**41)


# Of any file.
PLACES = {
    "a directory": lambda path, elsewhere: replaced(path).mkdir(),
    "a pipe": lambda path, elsewhere: os.mkfifo(replaced(path)),
    "/dev/zero": link("/dev/zero"),
    "a link to nothing": link("nothing"),
    "a link out of the run": link(None),
    "2 TB": sparse,
}
JSON = {
    "deep": text("[" * 100_000),
    "40 levels": text("[" * 40 + "]" * 40),
    "no JSON": text("{"),
    "not UTF-8": text(b'{"reason": "\xff"}'),
    "half a surrogate": text('{"reason": "\\ud800"}'),
    "a number of 5,000 digits": text("7" * 5000),
    "a number": text("7"),
    "a list": text("[7]"),
    "other types": text(
        '{"reason": [], "env_steps": "x", "command": 7, "steps": {}, "first_steps": null, "clock": []}'
    ),
    "1e999": text('{"reason": 1e999, "env_steps": 1e999, "command": 1e999, "clock": 1e999, "first_steps": 1e999}'),
}
CLOCKS = "steps,env_steps,iterations,updates,wall_seconds"
METRICS = {
    "not UTF-8": text(b"\xff\xfe\n"),
    "empty": text(""),
    "a huge cell": text(f"{CLOCKS},evaluation/mean_return\n1,1,1,1,1,{'7' * 200_000}\n"),
    "nan steps": text(f"{CLOCKS},evaluation/mean_return\nnan,nan,nan,nan,nan,1\n"),
    "1e308 steps": text(f"{CLOCKS},evaluation/mean_return\n1e308,1e308,1,1,1e308,1\n"),
    "steps below 0": text(f"{CLOCKS},evaluation/mean_return\n-1,-1,-1,-1,-1,1\n"),
    "a NUL": text(f"{CLOCKS},evaluation/mean_return\n1,1,1,1,1,\0\n"),
    "words": text(f"{CLOCKS},evaluation/mean_return\n1,1,1,1,1,one\n"),
}
EPISODES = {
    "not UTF-8": text(b"\xff\xfe\n"),
    "a huge cell": text(f"episode,seed,return,length\n0,0,{'7' * 200_000},1\n"),
    "words": text("episode,seed,return,length\n0,zero,one,two\n"),
    "a short row": text("episode,seed,return,length\n0,0\n"),
    "no rows": text("episode,seed,return,length\n"),
}
CONFIG = {
    "not UTF-8": text(b"PPO.gamma = 0.5\xff\n"),
    "macros that double": text("".join(f"m{k} = [%m{k + 1}, %m{k + 1}]\n" for k in range(40)) + "m40 = 1\nA.b = %m0\n"),
    "a chain of macros": text("".join(f"m{k} = %m{k + 1}\n" for k in range(5000)) + "m5000 = 1\nA.b = %m0\n"),
}
WATCHED = "eval/watch/evaluation-000000000064.json"
# File, command, and the damages that it names.
CASES = [
    ("done", "report", {**PLACES, **JSON}),
    ("provenance.json", "report", {**PLACES, **JSON}),
    ("provenance.json", "pack", JSON),
    ("metrics.csv", "plot", {**PLACES, **METRICS}),
    ("metrics.csv", "compare", {**PLACES, **METRICS}),
    ("metrics.csv", "report", {**PLACES, **METRICS}),
    ("metrics.csv", "pack", PLACES),
    ("operative_config.gin", "plot", {**PLACES, **CONFIG}),
    ("operative_config.gin", "compare", PLACES),
    ("operative_config.gin", "report", {**PLACES, **CONFIG}),
    ("eval/evaluation-000000000048.csv", "report", {**PLACES, **EPISODES}),
    ("eval/evaluation-000000000048.csv", "pack", {**PLACES, **EPISODES}),
    (WATCHED, "plot", {**PLACES, **JSON}),
    (WATCHED, "watch", {**PLACES, **JSON}),
    ("eval/watch/evaluation.json", "watch", {**PLACES, **JSON}),
    ("log.txt", "report", {name: one for name, one in PLACES.items() if name != "2 TB"}),  # its end is read
    ("films/a.mp4", "pack", {name: PLACES[name] for name in ("a link out of the run",)}),
    ("run_id", "pack", {name: PLACES[name] for name in ("a pipe", "/dev/zero", "a link out of the run")}),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root_dir = tmp_path_factory.mktemp("runs") / "ppo"
    alfish.train("PPO", "CartPole-v1", root_dir=root_dir, **SETTINGS)
    (root_dir / "films").mkdir()
    (root_dir / "films" / "a.mp4").write_bytes(b"film")
    return root_dir


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Directories of a sweep and of a population, without a run that has begun."""
    root = tmp_path_factory.mktemp("groups")
    (root / "toy.gin").write_text(toy_confs.PPO)
    search = {"PPO.gamma": "grid(0.9, 0.99)"}
    bindings = ["Evaluate.period=128", "Trainer.num_env_steps=256"]
    base = Base.read([str(root / "toy.gin")], bindings, [["PPO.gamma=0.9"]])
    sweep = SweepSpecification.completed({"search": search, "seed": 0}, base)
    population = PopulationSpecification.completed(
        {"perturb": {"PPO.gamma": "0.5..0.9"}, "seed": 0, "members": 4, "generations": 2, "steps": 128}, base
    )
    for one in (sweep, population):
        base.write(root / one.group)
        one.write(root / one.group)
    (root / "sweep" / "000").mkdir()
    content = {"trial": 0, "bindings": {"PPO.gamma": "0.9"}, "seed": 0, "seen": []}
    (root / "sweep" / "000" / "trial.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def ends(capsys):
    """Runs a command; returns its exit status and what it wrote to standard error, and fails if it hangs."""

    def call(*arguments):
        before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("it hangs"))
        signal.alarm(SECONDS)
        try:
            capsys.readouterr()
            return main(list(map(str, arguments))), capsys.readouterr().err
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return call


def command(name, root_dir, output):
    return {
        "plot": ["plot", root_dir, f"--output={output}.png"],
        "compare": ["compare", root_dir],
        "report": ["report", f"--root_dir={root_dir}", f"--output={output}.html"],
        "pack": ["pack", f"--root_dir={root_dir}", f"--output={output}.zip"],
        "watch": ["watch", f"--root_dir={root_dir}", "--idle_seconds=0"],
        "sweep": ["sweep", f"--root_dir={root_dir}", "--show"],
        "population": ["population", f"--root_dir={root_dir}"],
    }[name]


@pytest.mark.parametrize(
    "file, name, damage",
    [(file, name, one) for file, name, damages in CASES for one in damages.items()],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_damaged_file_of_a_run_is_named(run, tmp_path, ends, file, name, damage):
    root_dir, secret = shutil.copytree(run, tmp_path / "run"), tmp_path / "secret"
    secret.write_text("the key of somebody")
    damage[1](root_dir / file, secret)
    status, words = ends(*command(name, root_dir, tmp_path / "out"))
    assert status in (1, 2) and words.count("\n") == 1 and f"/run/{file}" in words, words
    assert not list(tmp_path.glob("out.*"))


GROUPS = [
    ("sweep", "sweep.json", {**PLACES, **JSON, "10^9 seeds": None, "other kinds": None}),
    ("sweep", "000/trial.json", {**PLACES, **JSON}),
    ("sweep", "000/failed", {**PLACES, **JSON}),
    ("sweep", "000/pruned", {**PLACES, **JSON, "another clock": text('{"clock": 7}')}),
    ("sweep", "000/eval/evaluation-000000000064.csv", {**PLACES, **EPISODES}),
    ("population", "population.json", {**PLACES, **JSON, "10^9 members": None}),
    ("population", "g000/m0/member.json", JSON),
    ("population", "g000/m0/failed", JSON),
]


@pytest.mark.parametrize(
    "name, file, damage",
    [(name, file, one) for name, file, damages in GROUPS for one in damages.items()],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_damaged_file_of_a_group_is_named(groups, tmp_path, ends, name, file, damage):
    root_dir, secret = shutil.copytree(groups / name, tmp_path / name), tmp_path / "secret"
    secret.write_text("{}")
    if damage[1] is not None:
        damage[1](root_dir / file, secret)
    else:
        other = {"10^9 seeds": {"seeds": 10**9}, "10^9 members": {"members": 10**9}, "other kinds": {"prune": "x"}}
        (root_dir / file).write_text(json.dumps(json.loads((root_dir / file).read_text()) | other[damage[0]]))
    status, words = ends(*command(name, root_dir, tmp_path / "out"))
    said = [line for line in words.splitlines() if line.startswith(f"alfish {name}: ")]
    assert status in (1, 2) and len(said) == 1 and f"/{name}/{file}" in said[0], words


def test_a_file_instead_of_tensorboards_directory_is_named(run, tmp_path, ends):
    root_dir = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(root_dir / "tensorboard")
    (root_dir / "tensorboard").write_text("mine")
    status, words = ends("watch", f"--root_dir={root_dir}", "--idle_seconds=0", "--name=other")
    assert status == 2 and f"{root_dir}/tensorboard is not a directory" in words
