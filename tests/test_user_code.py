"""Errors of code outside alfish, in one sentence that says which call and where."""

import inspect
import pickle
import traceback

import gymnasium
import numpy as np
import pytest
import torch

from alfish.errors import RunError, UsageError
from alfish.user_code import CodeError, calling, refuse


def raises(error):
    raise error


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_the_sentence_has_the_call_the_error_and_the_place_in_the_users_code():
    def physics():
        np.linalg.inv(np.zeros((2, 2)))  # below it are frames of numpy

    with pytest.raises(CodeError) as caught, calling("Robot.step"):
        physics()
    place = f"({__file__}:{line_of(physics, 'linalg')}, in physics)"
    assert str(caught.value) == f"Robot.step raised LinAlgError: Singular matrix {place}"
    assert isinstance(caught.value, RunError)
    trace = "".join(traceback.format_exception(caught.value))
    assert "physics()" in trace and "np.linalg.inv" in trace and "linalg.py" in trace


def test_a_library_is_named_only_where_no_code_of_the_user_ran():
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


def test_wrong_arguments_of_a_call_are_an_error_of_what_is_called():
    with pytest.raises(CodeError, match=r"^f raised TypeError: .*raises.. takes 1 positional argument"), calling("f"):
        raises(1, 2)


def test_sys_exit_is_named_with_its_place():
    words = rf"^sys.exit\(3\) was called in raises \({__file__}:\d+\), and nothing"
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


def test_a_failed_assertion_of_alfish_passes_although_the_users_code_called_it():
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


def test_a_handler_costs_nothing_and_says_the_same():
    with pytest.raises(CodeError, match=r"^f raised ValueError: x"):
        try:
            raises(ValueError("x"))
        except BaseException as error:
            refuse(error, "f")
            raise
    assert str(pickle.loads(pickle.dumps(CodeError("words")))) == "words"
