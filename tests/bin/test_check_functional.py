"""`alfish check-env`: what it says of functional environments."""

import re

import pytest
import torch

from alfish.__main__ import main
from alfish.bin import check_functional
from alfish.environments.functional import CartPole, Catch, FunctionalEnvironment

pytestmark = [
    pytest.mark.usefixtures("untried_training", "interpreted"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's compiler, at import
]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(check_functional, "SECONDS", 0.01)
    monkeypatch.setattr(check_functional, "CHECKED_STEPS", 30)


@pytest.mark.parametrize("env_id", ["alfish/CartPole-v1", "alfish/DeepSea-v0", "test_check_functional:Catch"])
def test_a_good_environment_has_no_problem_and_two_speeds(capsys, env_id):
    assert main(["check-env", f"--env_id={env_id}", "--num_steps=100"]) == 0
    words = capsys.readouterr().out
    assert re.search(r"^tensors +1,024 environments at once: about [\d,]+ plain, [\d,]+ compiled steps/s$", words, re.M)
    assert "problem" not in words and "steps/s in one environment" not in words
    assert re.search(r"^algorithms   .*\bPPO\b", words, re.M)


class Branching(CartPole):
    def terminal(self, state, rng, params=None):
        return super().terminal(state, rng) | bool(state.angle.max() > 0.2)


class Drawing(CartPole):
    def transition(self, state, action, rng, params=None):
        after = super().transition(state, action, rng)
        return after._replace(spin=after.spin + 0.01 * torch.randn_like(after.spin))


class Counting(CartPole):
    count = 0

    def reward(self, state, action, next_state, rng, params=None):
        self.count += 1
        return torch.full_like(state.angle, self.count)


class Late(CartPole):
    """Writes to a state that has moved away from the middle."""

    def transition(self, state, action, rng, params=None):
        if (state.position.abs() > 0.1).any():
            state.velocity.zero_()
        return super().transition(state, action, rng)


class Outside(CartPole):
    def observation(self, state, rng, params=None):
        return super().observation(state, rng) + 5


class Broken(CartPole):
    def reward(self, state, action, next_state, rng, params=None):
        return 1 / (state.position > 0)


def checked(kind, capsys):
    status = main(["check-env", f"--env_id=test_check_functional:{kind.__name__}", "--num_steps=300"])
    return status, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "kind, sentence",
    [
        (
            Branching,
            r"^problem      Branching cannot be compiled, so its steps stay slow: .*functional.py:\d+ ",
        ),
        (Outside, r"^problem      an observation is outside its space: "),
        (Broken, r"^problem      a reward is not finite: "),
    ],
)
def test_a_problem_is_reported_in_one_sentence(capsys, kind, sentence):
    status, words = checked(kind, capsys)
    assert status == 1 and re.search(sentence, words, re.M), words


@pytest.mark.parametrize(
    "kind, sentence",
    [
        (Drawing, "two calls of Drawing.transition with the same arguments give different results; draw random numb"),
        (Counting, "two calls of Counting.reward with the same arguments give different results; draw random numbers"),
        (
            Late,
            "Late.transition writes to a tensor in its arguments, which is still used elsewhere; compute a new tensor",
        ),
    ],
)
def test_a_method_that_is_not_pure_is_refused(capsys, kind, sentence):
    status, words = checked(kind, capsys)
    assert status != 0 and sentence in words, words


def test_another_result_of_the_compiled_step_is_a_problem(monkeypatch):
    class Wrong(check_functional.CompiledFunction):
        def __call__(self, arguments):
            result = super().__call__(arguments)
            return result._replace(reward=result.reward + 1)

    monkeypatch.setattr(check_functional, "CompiledFunction", Wrong)
    sentences, speed = check_functional.examine(FunctionalEnvironment(CartPole(), [0]))
    assert sentences == ["the reward of CartPole differs between compiled and plain execution; report this bug"]
    assert speed > 0


assert Catch  # which a test names
