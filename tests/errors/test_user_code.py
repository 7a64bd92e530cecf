"""Errors of code outside alfish, in one sentence that says which call and where."""

import functools
import inspect
import pickle
import traceback
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from toys import OneState

import alfish
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.environments import Environment, make_environment
from alfish.errors import RunError, UsageError
from alfish.errors.user_code import CodeError, calling, refuse
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, Torso
from alfish.training.listener import Listener
from alfish.training.listeners import checked_listeners
from alfish.training.trainer import Trainer
from alfish.transforms import Transform


def raises(error):
    raise error


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_messages_name_the_call_the_error_and_the_users_line():
    def physics():
        np.linalg.inv(np.zeros((2, 2)))  # below it are frames of numpy

    with pytest.raises(CodeError) as caught, calling("Robot.step"):
        physics()
    place = f"({__file__}:{line_of(physics, 'linalg')}, in physics)"
    assert str(caught.value) == f"Robot.step raised LinAlgError: Singular matrix {place}"
    assert isinstance(caught.value, RunError)
    trace = "".join(traceback.format_exception(caught.value))
    assert "physics()" in trace and "np.linalg.inv" in trace and "linalg.py" in trace


def test_a_library_is_named_only_without_user_code():
    with pytest.raises(CodeError, match=r"^made raised .*registration.py:\d+, in \w+\)$"), calling("made"):
        gymnasium.make("NoSuchEnvironment-v0")

    class Raises(gymnasium.Wrapper):
        def step(self, action):
            return self.env.step(action)  # CartPole asserts that the action is valid

    env = Raises(gymnasium.make("CartPole-v1"))
    env.reset()
    with pytest.raises(CodeError, match=rf"AssertionError: .* \({__file__}:\d+, in step\)$"), calling("step"):
        env.step(7)


def test_the_first_line_without_control_characters():
    with pytest.raises(CodeError, match=r"^f raised ValueError: red  \(.*, in raises\)$"), calling("f"):
        raises(ValueError("red\x1b\nand more"))
    with pytest.raises(CodeError, match=r"^f raised ValueError \(.*, in raises\)$"), calling("f"):
        raises(ValueError())


def test_wrong_call_arguments_are_errors_of_the_called_code():
    with pytest.raises(CodeError, match=r"^f raised TypeError: .*raises.. takes 1 positional argument"), calling("f"):
        raises(1, 2)


def test_sys_exit_is_named_with_its_place():
    words = rf"^sys.exit\(3\) was called in raises \({__file__}:\d+\), but code that runs inside alfish may not"
    with pytest.raises(CodeError, match=words), calling("f"):
        raises(SystemExit(3))

    def leaves():
        exit()

    with pytest.raises(CodeError, match=rf"^sys.exit\(\) was called in leaves \({__file__}:\d+\)"), calling("f"):
        leaves()


@pytest.mark.parametrize("error", [UsageError("mend it"), RunError("the disk is full"), KeyboardInterrupt()])
def test_sentences_and_signals_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, calling("f"):
        raises(error)
    assert caught.value is error


def test_an_error_of_alfish_passes_unchanged():
    from alfish import nest
    from alfish.runs.files import make_directory

    with pytest.raises(ValueError), calling("f"):
        nest.map(max, [1, 2], [1])  # below alfish's frame there are only frames of optree
    with pytest.raises(TypeError), calling("f"):
        make_directory(None)


def test_failed_assertions_of_alfish_are_not_wrapped():
    from alfish.environments.sequential import SequentialVectorEnv

    def users():
        SequentialVectorEnv([], gymnasium.vector.AutoresetMode.SAME_STEP)

    with pytest.raises(AssertionError), calling("f"):
        users()

    def asserts():
        assert torch.zeros(1)[0] == 1

    with pytest.raises(CodeError, match=r"^f raised AssertionError"), calling("f"):
        asserts()


def test_an_error_is_described_once():
    with pytest.raises(CodeError, match=r"^inner raised"), calling("outer"), calling("inner"):
        raises(ValueError("x"))


def test_what_the_user_chained_stays_in_the_traceback():
    def chained():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(CodeError) as caught, calling("f"):
        chained()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_handler_is_free_and_gives_the_same_message():
    with pytest.raises(CodeError, match=r"^f raised ValueError: x"):
        try:
            raises(ValueError("x"))
        except BaseException as error:
            refuse(error, "f")
            raise
    assert str(pickle.loads(pickle.dumps(CodeError("words")))) == "words"


# In runs.


def ppo(**arguments):
    batches = functools.partial(EpochBatches, num_epochs=1)
    parts = {"algorithm": functools.partial(PPO, network=NETWORK), "batches": batches, "listeners": []}
    return Trainer(**{**parts, "num_env_steps": 300, "unroll_length": 8, **arguments})


def small(spec):
    return Torso(spec, mlp=functools.partial(MLP, layers=(4,)))


NETWORK = functools.partial(ActorCritic, actor_torso=small, critic_torso=small)


one_state = functools.partial(make_environment, OneState)


class Counting(Listener):
    def after_iteration(self, trainer, report):
        raise KeyError("steps")


class Measure:
    name = "measure"

    def update(self, rows):
        raise IndexError("no rows")

    def result(self):
        return {}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Game(Environment):
    """An environment of the user's own, not gymnasium's."""

    def __init__(self, num_envs=1, seed=0, evaluation=False, fails="step"):
        self._inner = make_environment(OneState)
        inner = self._inner
        super().__init__(1, inner.observation_space, inner.action_space, inner.reward_spec)
        self.fails = fails

    def reset(self, seeds=None, rows=None):
        if self.fails == "reset":
            raise LookupError("no board")
        return self._inner.reset()

    def step(self, action):
        if self.fails == "step":
            raise LookupError("no such move")
        return self._inner.step(action)

    def close(self):
        self._inner.close()


class Careless(PPO):
    def calc_loss(self, experience, info):
        raise KeyError("no loss")


class Forgetful(Transform):
    def transform(self, time_step, state):
        return time_step

    def observe(self, time_step):
        raise IndexError("no statistics")


class Behind(Listener):
    def is_behind(self, run):
        raise KeyError("clock")


class Puts(Listener):
    def __init__(self, name, value):
        self.name, self.value = name, value

    def after_iteration(self, run, report):
        report.scalars[self.name] = self.value


class Result(Measure):
    def __init__(self, result):
        self._result = result

    def update(self, rows):
        pass

    def result(self):
        return self._result


def torso(spec):
    raise NotImplementedError("no torso yet")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"listeners": [Counting()]}, "Counting.after_iteration raised KeyError: 'steps'"),
        ({"metrics": [Measure()]}, "Measure.update raised IndexError: no rows"),
        ({"algorithm": functools.partial(Careless, network=NETWORK)}, "Careless.calc_loss raised KeyError: 'no loss'"),
        ({"transforms": [Forgetful]}, "Forgetful.observe raised IndexError: no statistics"),
        ({"listeners": [Behind()]}, "Behind.is_behind raised KeyError: 'clock'"),
        ({"listeners": [Puts("speed", "fast")]}, "Report.scalars after Puts.after_iteration has 'fast' as 'speed'; it"),
        ({"listeners": [Puts("speed", torch.zeros(2))]}, "Report.scalars after Puts.after_iteration has tensor("),
        ({"listeners": [Puts(5, 1.0)]}, "Report.scalars after Puts.after_iteration has 1.0 as 5; it must be a dict"),
        ({"listeners": [Puts("speed", 10**400)]}, "Report.scalars after Puts.after_iteration has 1000"),
        (
            {"metrics": [Result(None)], "summary_period": 1},
            "the result of Result is None; it must be a dict",
        ),
        (
            {"metrics": [Result({"a": "b"})], "summary_period": 1},
            "the result of Result has 'b' as 'a'; it must",
        ),
        ({"environment": Game}, "Game.step raised LookupError: no such move"),
        ({"environment": functools.partial(Game, fails="reset")}, "Game.reset raised LookupError: no board"),
        ({"environment": functools.partial(Game, fails=1 / 3, board=8)}, "Trainer.environment cannot be called as"),
    ],
)
def test_each_part_of_a_run_is_named_in_its_error(tmp_path, arguments, words):
    arguments = {"environment": one_state, **arguments}
    with pytest.raises((CodeError, UsageError)) as caught:
        ppo(root_dir=tmp_path / "run", **arguments).train()
    assert str(caught.value).startswith(words)
    if isinstance(caught.value, CodeError):
        assert f"({__file__}:" in str(caught.value)
        log = (tmp_path / "run" / "log.txt").read_text()
        assert "Traceback (most recent call last)" in log and str(caught.value) in log


def test_networks_in_user_code_are_named_by_their_setting(tmp_path):
    network = functools.partial(ActorCritic, actor_torso=torso)
    with pytest.raises(CodeError, match=r"ActorCritic.actor_torso raised NotImplementedError: no torso yet \("):
        ppo(root_dir=tmp_path, environment=one_state, algorithm=functools.partial(PPO, network=network))


def test_an_evaluation_names_the_environment_whose_step_failed(tmp_path):
    trainer = ppo(root_dir=tmp_path, environment=one_state, evaluation_environment=Game)
    with pytest.raises(CodeError, match=r"^Game.step raised LookupError: no such move \("):
        trainer.evaluator(num_episodes=1, num_envs=1).evaluate(1)


class TakesNoRun(Listener):
    def after_iteration(self, report):
        pass


class Misspelt(Listener):
    def after_iterations(self, run, report):
        pass


@pytest.mark.parametrize(
    ("listener", "words"),
    [
        (TakesNoRun, r"after_iteration of TakesNoRun takes \(report\), but is called with \(run, report\)"),
        (Misspelt, "Misspelt has a method 'after_iterations', which alfish never calls; did you mean after_iteration?"),
    ],
)
def test_a_method_of_a_listener_that_cannot_be_called_is_named_before_training(listener, words):
    with pytest.raises(UsageError, match=words):
        checked_listeners([listener()], [])


def with_method(name, method):
    return type("Overrides", (SAC,), {name: method, "__module__": __name__})


@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("next_value", lambda self, features, experience: None, "has a method 'next_value', which .* mean next_values"),
        ("targets_q", lambda self, q: q, "has a method 'targets_q', which alfish never calls; did you mean target_q"),
        ("target_q", 5, "target_q of Overrides is 5, but alfish calls it; it must be a method"),
        ("target_q", lambda self: None, r"target_q of Overrides takes \(\), but is called with \(q\)"),
    ],
)
def test_methods_of_a_variant_are_checked_against_the_class_that_it_extends(tmp_path, name, method, words):
    with pytest.raises(UsageError, match=words):
        sac(tmp_path, with_method(name, method))


@pytest.mark.parametrize(
    "method",
    [lambda self, *arguments: None, lambda self, q: q[..., :1].squeeze(0), lambda self, q: q.numpy().tolist()],
    ids=["nothing", "shape", "list"],
)
def test_an_error_in_an_update_names_the_methods_that_a_variant_overrides(tmp_path, method):
    trainer = sac(tmp_path, with_method("target_q", method))
    words = "update of Overrides raised .*; the cause may be the result of a method that the class overrides: target_q"
    with pytest.raises(CodeError, match=words):
        trainer.train()


def test_an_error_of_a_variants_own_code_names_its_place(tmp_path):
    def target_q(self, q):
        raise ValueError("in my code")

    with pytest.raises(CodeError, match=r"target_q raised ValueError: in my code \(.*test_user_code.py"):
        sac(tmp_path, with_method("target_q", target_q)).train()


def sac(root_dir, algorithm):
    return Trainer(
        root_dir,
        algorithm=algorithm,
        environment=functools.partial(make_environment, "Pendulum-v1", num_envs=1),
        batches=functools.partial(ReplayBatches, batch_size=4, warmup_env_steps=10),
        learner=functools.partial(Learner, compile=False),
        listeners=[],
        unroll_length=1,
        num_env_steps=20,
    )


class TestBrief:
    @staticmethod
    def files(error):
        return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]

    def test_tracebacks_do_not_show_the_frames_of_alfish_and_gin(self, tmp_path, monkeypatch):
        with pytest.raises(UsageError, match="there is no environment 'CartPole-v9'") as caught:
            alfish.train("PPO", "CartPole-v9", num_env_steps=8, root_dir=tmp_path / "run")
        # A program shows the frame of its call only; pytest adds frames above the function that handles the error.
        assert set(self.files(caught.value)) <= {"test_user_code.py", "user_code.py"}
        monkeypatch.setenv("ALFISH_FULL_TRACEBACKS", "1")
        with pytest.raises(UsageError) as caught:
            alfish.train("PPO", "CartPole-v9", num_env_steps=8, root_dir=tmp_path / "run")
        assert {"runs.py", "checking.py"} <= set(self.files(caught.value))

    def test_frames_of_the_users_code_stay_with_what_they_called(self, tmp_path):
        with pytest.raises(CodeError) as caught:
            alfish.train("PPO", Singular, num_env_steps=64, unroll_length=8, root_dir=tmp_path / "run")
        files = self.files(caught.value)
        assert "_linalg.py" in files and "sequential.py" not in files
        assert [name for name in files if name not in ("user_code.py", "_linalg.py")] == ["test_user_code.py"] * 2


class Singular(OneState):
    def step(self, action):
        return np.linalg.inv(np.zeros((2, 2)))
