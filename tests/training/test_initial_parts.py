"""New runs that start with parts of other runs."""

import contextlib
import functools
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.algorithms.appo import APPO
from alfish.algorithms.composition import RND, Composed
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.configuration.opening import open_run
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, QNetwork, Torso
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import sha256
from alfish.training.initial_parts import PartSource
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer
from alfish.unrollers import AsyncUnroller

TORSO = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
PPO8 = functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO))
APPO8 = functools.partial(APPO, network=functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO))
DQN8 = functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO))
REPLAY = functools.partial(ReplayBatches, capacity=500, batch_size=8, warmup_env_steps=16)
ACTOR = "network.actor_torso"


def make(root_dir, algorithm=PPO8, seed=0, num_iterations=3, **settings):
    on_policy = getattr(getattr(algorithm, "func", algorithm), "on_policy", True)
    batches = functools.partial(EpochBatches, num_epochs=1, minibatch_size=8) if on_policy else REPLAY
    return Trainer(
        root_dir,
        **{
            "algorithm": algorithm,
            "environment": functools.partial(make_environment, "CartPole-v1", num_envs=2),
            "batches": batches,
            "listeners": [],
            "unroll_length": 8,
            "num_iterations": num_iterations,
            "device": "cpu",
            "seed": seed,
            **settings,
        },
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A finished run of PPO with three checkpoints, of which the second is the best."""
    trainer = make(tmp_path_factory.mktemp("runs") / "source", transforms=[ObservationNormalizer], seed=5)
    trainer.start()
    for report in trainer.iterate():
        trainer.save(best=report.iterations == 2)
    trainer.close()
    return trainer.directory.path


def saved(root_dir, which="latest", name="algorithm"):
    return Checkpoints(Path(root_dir) / "checkpoints").load(which)[1][name]


def below(state, part):
    return {name: value for name, value in state.items() if name.startswith(f"{part}.")}


def started(trainer):
    """The state of a trainer after its start."""
    trainer.start()
    trainer.close()
    return trainer.algorithm.state_dict()


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], expected[name]) for name in found)


class TestValues:
    @pytest.mark.parametrize("suffix, which", [("", "latest"), (":best", "best"), (":latest", "latest"), ("first", 0)])
    def test_only_the_loaded_part_equals_its_source(self, tmp_path, source, suffix, which):
        if suffix == "first":
            which = Checkpoints(source / "checkpoints").steps()[0]
            suffix = f":{which}"
        state = started(make(tmp_path / "run", initial_parts={ACTOR: f"{source}{suffix}"}))
        assert_equal(below(state, ACTOR), below(saved(source, which), ACTOR))
        fresh = started(make(tmp_path / "fresh"))
        others = [name for name in state if not name.startswith(ACTOR)]
        assert_equal({name: state[name] for name in others}, {name: fresh[name] for name in others})

    def test_a_part_may_have_another_name_there(self, tmp_path, source):
        parts = {"q_network.torso": f"{ACTOR}@{source}"}
        state = started(make(tmp_path / "run", DQN8, initial_parts=parts))
        expected = below(saved(source), ACTOR)
        assert [t.tolist() for t in below(state, "q_network.torso").values()] == [t.tolist() for t in expected.values()]

    def test_target_networks_begin_with_the_loaded_values(self, tmp_path, source):
        parts = {"q_network.torso": f"{ACTOR}@{source}"}
        state = started(make(tmp_path / "run", DQN8, initial_parts=parts))
        online, target = below(state, "q_network"), below(state, "target.network")
        assert [t.tolist() for t in online.values()] == [t.tolist() for t in target.values()]

    def test_the_empty_name_is_everything_and_includes_statistics_of_transforms(self, tmp_path, source):
        trainer = make(tmp_path / "run", transforms=[ObservationNormalizer], initial_parts={"": str(source)})
        state = started(trainer)
        expected = saved(source)
        assert_equal(below(state, "network"), below(expected, "network"))
        assert float(state["progress"]) == 0 < float(expected["progress"])
        assert_equal(trainer.transforms.state_dict(), saved(source, name="transforms"))

    @pytest.mark.parametrize("calibration, changes", [(0.5, False), (0.0, False), (None, True)])
    @pytest.mark.parametrize("places", [("",), (ACTOR, "transforms"), (ACTOR, "transforms._chain.0")])
    def test_a_calibration_keeps_loaded_statistics(self, tmp_path, source, places, calibration, changes):
        parts = {place: str(source) for place in places}
        settings = {"initial_parts": parts, "transforms": [ObservationNormalizer], "calibration": calibration}
        settings["listeners"] = [CheckpointSaver()]
        for num_iterations in (1, 3):  # also in a resumed run
            make(tmp_path / "run", num_iterations=num_iterations, **settings).train()
        own, loaded = (saved(root_dir, name="transforms") for root_dir in (tmp_path / "run", source))
        assert all(torch.equal(own[name], loaded[name]) for name in loaded) != changes

    @pytest.mark.parametrize("places, is_noted", [((ACTOR,), True), (("",), False), ((ACTOR, "transforms"), False)])
    def test_the_run_notes_statistics_that_are_not_loaded(self, tmp_path, source, capsys, places, is_noted):
        parts = {place: str(source) for place in places}
        started(make(tmp_path / "run", initial_parts=parts, transforms=[ObservationNormalizer]))
        words = (
            "The statistics of ObservationNormalizer are not those with which these parts were trained; to load the "
            "matching statistics"
        )
        assert (f"{words}, add 'transforms': '{source}' to" in capsys.readouterr().err) == is_noted

    def test_a_later_entry_overwrites_an_earlier_one(self, tmp_path, source):
        parts = {"network": str(source), f"{ACTOR}.mlp.0.bias": f"network.critic_torso.mlp.0.bias@{source}:best"}
        state = started(make(tmp_path / "run", initial_parts=parts))
        assert_equal(below(state, "network.critic_torso"), below(saved(source), "network.critic_torso"))
        bias = saved(source, "best")["network.critic_torso.mlp.0.bias"]
        assert torch.equal(state[f"{ACTOR}.mlp.0.bias"], bias)

    def test_the_random_numbers_of_the_run_stay_the_same(self, tmp_path, source):
        trainer = make(tmp_path / "run", initial_parts={ACTOR: str(source)})
        fresh = make(tmp_path / "fresh")
        for each in (trainer, fresh):
            torch.manual_seed(3)
            started(each)
            each.following = torch.rand(4)
        assert torch.equal(trainer.following, fresh.following)


class TestComposed:
    def test_an_algorithm_moves_between_a_plain_run_and_one_with_parts(self, tmp_path):
        plain = make(tmp_path / "plain")
        state = started(plain)
        plain.save()
        composed = functools.partial(Composed, algorithm=PPO8, rewards=[functools.partial(RND, layers=(4,))])
        with_parts = make(
            tmp_path / "composed", composed, seed=1, initial_parts={"algorithm": f"@{tmp_path / 'plain'}"}
        )
        inside = {name.removeprefix("algorithm."): value for name, value in started(with_parts).items()}
        assert_equal(below(inside, "network"), below(state, "network"))
        with_parts.save()
        back = make(tmp_path / "back", seed=2, initial_parts={"": f"algorithm@{tmp_path / 'composed'}"})
        assert_equal(below(started(back), "network"), below(state, "network"))


class TestRuns:
    def test_a_resumed_run_does_not_load_its_parts_again(self, tmp_path, source):
        moved = source.rename(tmp_path / "source")
        settings = {"initial_parts": {ACTOR: str(moved)}, "learner": functools.partial(Learner, learning_rate=0.1)}
        trainer = make(tmp_path / "run", **settings)
        trainer.start()
        next(trainer.iterate())
        trainer.save()
        trainer.close()
        moved.rename(source)  # where the resumed run does not find it
        state = started(make(tmp_path / "run", **settings))
        assert_equal(state, saved(tmp_path / "run"))
        assert not torch.equal(state[f"{ACTOR}.mlp.0.weight"], saved(source)[f"{ACTOR}.mlp.0.weight"])

    def test_a_frozen_part_ends_with_the_bits_of_its_source(self, tmp_path, source):
        learner = functools.partial(Learner, frozen_parts=[ACTOR], learning_rate=0.1)
        trainer = make(tmp_path / "run", initial_parts={ACTOR: str(source)}, learner=learner)
        trainer.train()
        state = trainer.algorithm.state_dict()
        assert_equal(below(state, ACTOR), below(saved(source), ACTOR))
        fresh = started(make(tmp_path / "fresh"))
        assert not torch.equal(state["network.policy_head.heads.0.linear.weight"],
                               fresh["network.policy_head.heads.0.linear.weight"])  # fmt: skip

    def test_workers_act_with_the_loaded_values(self, tmp_path, source):
        workers = functools.partial(AsyncUnroller, num_workers=1, mode="lockstep")
        trainer = make(tmp_path / "run", APPO8, unroller=workers, initial_parts={"network": str(source)})
        trainer.start()
        rows = nest.tensors(trainer.unroller.unroll(8))
        trainer.close()
        with torch.no_grad():
            expected = trainer.algorithm.rollout_step(nest.at(rows.time_step, 0), None).info
        assert all(torch.allclose(a[0], b, atol=1e-6) for a, b in zip(nest.leaves(rows.info), nest.leaves(expected)))

    def test_the_run_logs_its_start_conditions(self, tmp_path, source, capsys):
        make(tmp_path / "run", initial_parts={ACTOR: str(source)}, num_iterations=1).train()
        printed = capsys.readouterr().err
        steps = Checkpoints(source / "checkpoints").steps()[-1]
        assert f"{ACTOR} from {source} at {steps} steps: 2 tensors, 40 numbers\n" in printed
        assert f"  {ACTOR}.mlp.0.weight [8, 4]\n" in printed
        assert f"{ACTOR}.mlp.0.weight [8, 4]\n" in (tmp_path / "run" / "log.txt").read_text()
        (entry,) = json.loads((tmp_path / "run" / "provenance.json").read_text())
        (origin,) = entry["initial_parts"]
        assert origin["sha256"] == sha256(source / "checkpoints" / f"checkpoint-{steps:012d}.pt")
        assert (origin["run"], origin["steps"], origin["place"]) == (str(source), steps, ACTOR)
        assert origin["run_id"] == (source / "run_id").read_text().strip()

    def test_a_saved_run_opens_without_its_source(self, tmp_path, source):
        settings = {"initial_parts": {ACTOR: str(source)}, "listeners": [CheckpointSaver()]}
        make(tmp_path / "run", num_iterations=1, **settings).train()
        moved = source.rename(tmp_path / "away")
        try:
            with open_run(tmp_path / "run") as trainer:
                trainer.load_policy()
                assert_equal(below(trainer.algorithm.state_dict(), ACTOR), below(saved(tmp_path / "run"), ACTOR))
        finally:
            moved.rename(source)


class TestMistakes:
    @pytest.mark.parametrize(
        "parts, words",
        [
            ({"actor_torso": "{source}"}, "PPO has no part 'actor_torso'; close ones are network.actor_torso"),
            ({ACTOR: "actor_torso@{source}"}, "source has no part 'actor_torso'; close ones are network.actor_torso"),
            ({"nothing.of": "{source}"}, "PPO has no part 'nothing.of'; its parts are network"),
            ({ACTOR: "{source}/../absent"}, "absent is not a run, because it has no checkpoints; there are .*source"),
            ({ACTOR: "network.policy_head@{source}"}, r"has no network.policy_head.mlp.0.weight \(4 differences"),
            ({"network.value_head": "network.actor_torso.mlp.0@{source}"},
             r"value_head.weight is \[1, 8\] float32 in this run, but network.actor_torso.mlp.0.weight is \[8, 4\] f"),
            ({ACTOR: "{source}:7"}, "no checkpoint at 7 steps"),
            ({ACTOR: ""}, "it must be a run's directory"),
        ],
    )  # fmt: skip
    def test_faults_are_one_sentence_and_nothing_is_loaded(self, tmp_path, source, parts, words):
        parts = {"network.critic_torso": str(source)} | {
            place: text.format(source=source) for place, text in parts.items()
        }
        with pytest.raises(UsageError, match=words):
            make(tmp_path / "run", initial_parts=parts).train()
        trainer = make(tmp_path / "other")
        before = {name: value.clone() for name, value in trainer.algorithm.state_dict().items()}
        assert_equal(started(trainer), before)

    def test_nothing_changes_if_the_second_part_does_not_fit(self, tmp_path, source):
        parts = {ACTOR: str(source), "network.value_head": f"network.policy_head@{source}"}
        trainer = make(tmp_path / "run", initial_parts=parts)
        before = {name: value.clone() for name, value in trainer.algorithm.state_dict().items()}
        with pytest.raises(UsageError, match="does not fit"):
            trainer.start()
        trainer.close()
        assert_equal(trainer.algorithm.state_dict(), before)

    def test_another_dtype_is_refused(self, tmp_path, source):
        class Half(DQN):
            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, **keywords)
                self.small = nn.Linear(4, 8).half()

            def parameter_groups(self):
                return {"all": self.q_network.parameters(), "small": self.small.parameters()}

        parts = {"small": f"network.actor_torso.mlp.0@{source}"}
        trainer = make(tmp_path / "run", Half, batches=REPLAY, initial_parts=parts)
        with pytest.raises(UsageError, match=r"small.weight is \[8, 4\] float16 in this run"):
            trainer.start()
        trainer.close()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("runs/x", (None, "runs/x", "latest")),
        ("a.b@runs/x:best", ("a.b", "runs/x", "best")),
        ("@runs/x:20480", ("", "runs/x", 20480)),
        ("runs/of@me/x", (None, "runs/of@me/x", "latest")),
        ("a@/runs/10:30", ("a", "/runs/10", 30)),
        ("runs/10:30/x", (None, "runs/10:30/x", "latest")),
    ],
)
def test_sources_are_read_from_their_text(text, expected):
    found = PartSource.parsed(text, "x")
    assert (found.part, str(found.run), found.checkpoint) == expected


def train(file, name):
    """Trains a conf for some steps into `runs/NAME` of the working directory, and returns its last state."""
    parameters = ["Trainer.num_env_steps=600", "Evaluate.num_episodes=1", "Trainer.seed=3", "MLP.layers=(8,)"]
    command = ["train", f"--gin_file={file}", f"--root_dir=runs/{name}"]
    assert main([*command, *(f"--gin_param={one}" for one in parameters)]) == 0
    return saved(f"runs/{name}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with the run `runs/catch`."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train("ppo_catch.gin", "catch")
    return home


class TestExamples:
    """The gin files of docs/compose.md, as they stand there, with fewer steps."""

    @pytest.fixture
    def files(self, runs, monkeypatch):
        monkeypatch.chdir(runs)
        page = (Path(__file__).parents[2] / "docs" / "compose.md").read_text()
        blocks = re.findall(r"((?:^    .*\n|^\n)+)", page, re.MULTILINE)
        texts = [textwrap.dedent(block).strip() for block in blocks]
        for text in texts:
            if found := re.search(r"^# (\w+\.gin)", text, re.MULTILINE):
                (runs / found[1]).write_text(text[found.start() :])

    def test_a_frozen_part_equals_its_source(self, files):
        state = train("mirrored.gin", "mirrored")
        encoder = f"{ACTOR}.encoder"
        assert_equal(below(state, encoder), below(saved("runs/catch"), encoder))

    def test_a_part_with_a_small_learning_rate_stays_near_its_source(self, files):
        state = train("finetune.gin", "finetune")
        there, encoder = saved("runs/catch"), f"{ACTOR}.encoder"
        moves = {name: float((state[name] - there[name]).abs().max()) for name in state if name.startswith(ACTOR)}
        assert 0 < max(move for name, move in moves.items() if name.startswith(encoder)) < 1e-2
        assert max(move for name, move in moves.items() if not name.startswith(encoder)) > 2e-2

    def test_features_equal_the_source_features(self, files):
        train("features.gin", "features")
        own = saved("runs/features", name="transforms")
        there = below(saved("runs/catch"), f"{ACTOR}.encoder.encoders.0")
        assert [value.tolist() for value in own.values()] == [value.tolist() for value in there.values()]
        assert alfish.load("runs/features").observation_space.shape == (10, 5, 1)


@pytest.mark.slow
def test_an_encoder_of_another_task_can_be_reused(tmp_path):
    """The images are the same, and the second task exchanges left and right; only the rest of the network trains."""
    encoder = f"{ACTOR}.encoder"
    common = {"conf": "ppo_catch", "num_env_steps": 5000, "listeners": [CheckpointSaver()]}
    alfish.train(root_dir=tmp_path / "source", seed=100, **common)
    parts = {"initial_parts": {encoder: str(tmp_path / "source")}, "Learner.frozen_parts": [encoder]}
    alfish.train(root_dir=tmp_path / "second", seed=101, **common, **parts, **{"Catch.mirrored": True})
    with open_run(tmp_path / "second") as trainer:
        trainer.load_policy()
        with contextlib.closing(trainer.evaluator(50)) as evaluator:
            assert evaluator.evaluate(50).mean >= 0.9
