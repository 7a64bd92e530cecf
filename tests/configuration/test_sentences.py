"""One clear sentence for each mistake in a configuration: what is wrong, where, and what to write."""

import importlib
import inspect
import subprocess
import sys

import gin
import pytest
from commands import TINY, train

from alfish.configuration import reading
from alfish.configuration.sentences import NAMES_ELSEWHERE, NAMES_IN_CLASSES
from alfish.metrics import Metric
from alfish.parameters import gin_internals


def test_an_unknown_gin_name_is_named_with_close_names(refused, tmp_path):
    words = refused(*train(tmp_path / "run", "PPOO.gamma=0.9"))
    assert "--gin_param=PPOO.gamma=0.9" in words and "PPOO" in words and "did you mean PPO" in words
    assert words.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_name_whose_module_was_not_imported_says_what_to_import(refused, tmp_path):
    conf = tmp_path / "mine.gin"
    conf.write_text("Trainer.algorithm = @NoSuchAlgorithm\n")
    words = refused(*train(tmp_path / "run", conf=str(conf)))
    assert "NoSuchAlgorithm" in words and "a conf must import what it configures" in words


def test_a_class_that_gin_does_not_know_is_named_with_its_module(refused, tmp_path, monkeypatch):
    (tmp_path / "unregistered.py").write_text("class NotRegistered:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    conf = tmp_path / "mine.gin"
    conf.write_text("import unregistered\nTrainer.algorithm = @NotRegistered\n")
    words = refused(*train(tmp_path / "run", conf=str(conf)))
    assert "unregistered defines it, but gin does not know it: put @gin.configurable before its definition" in words


def test_a_misspelt_parameter_is_named_with_close_names(refused, tmp_path):
    words = refused(*train(tmp_path / "run", "PPO.gama=0.9"))
    assert "'gama'" in words and "did you mean gamma" in words and words.count("\n") == 1


@pytest.mark.parametrize(
    "parameter, words",
    [
        ("ppo.gamma=0.9", "did you mean PPO"),
        ("PPO.GAMMA=0.9", "PPO has no parameter named 'GAMMA'; did you mean gamma?"),
        ("Trainer.verbose=1", "Trainer has no parameter named 'verbose'; `alfish params Trainer` lists its parameters"),
        ("Trainer.policy_kwargs={}", "did you mean MLP.layers"),
        ("PPO.gamma=-inf", "line 1 has inf, but numbers must be finite: write a finite number\n"),
        ("PPO.gamma=nan", "line 1 has nan, but numbers must be finite: write a finite number\n"),
        (
            "make_environment.env_id='mine/lift.py:Lift'",
            "which is a file and not a module; write 'lift' before the colon",
        ),
    ],
)
def test_a_mistake_is_refused_with_the_correct_form(refused, tmp_path, parameter, words):
    said = refused(*train(tmp_path / "run", parameter))
    assert words in said and said.count("\n") == 1


def test_an_unimported_class_is_named_with_its_module():
    words = 'import gin, alfish.configuration.sentences as m\nwith m.named("it"): gin.parse_config("SAC.gamma = 1")'
    ran = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    said = "UsageError: it: No configurable matching 'SAC'; SAC is in alfish.algorithms.sac, which nothing imports: "
    assert ran.stderr.splitlines()[-1] == f"alfish.errors.{said}import it in a conf, or leave SAC out"


def test_a_mistake_in_a_file_names_the_file(refused, tmp_path):
    conf = tmp_path / "mine.gin"
    conf.write_text("include 'ppo_cartpole.gin'\nTrainer.sede = 3\n")
    words = refused(*train(tmp_path / "run", conf=str(conf)))
    assert str(conf) in words and "did you mean seed" in words


def test_a_missing_include_is_named(refused, tmp_path):
    conf = tmp_path / "mine.gin"
    conf.write_text("include 'nowhere_to_be_found.gin'\n")
    assert "nowhere_to_be_found.gin" in refused(*train(tmp_path / "run", conf=str(conf)))


def test_a_missing_import_is_named(refused, tmp_path):
    conf = tmp_path / "mine.gin"
    conf.write_text("import no_such_module_of_mine\n")
    words = refused(*train(tmp_path / "run", conf=str(conf)))
    assert str(conf) in words and "'no_such_module_of_mine', which is not installed or not on PYTHONPATH" in words


@pytest.mark.parametrize(
    "text, words",
    [
        ("PPO.gamma = \n", "line 2 is not gin: 'PPO.gamma =' (Unable to parse value); write Class.parameter = value"),
        ("\nPPO.gamma 0.9\n", "line 3 is not gin: 'PPO.gamma 0.9' (Couldn't parse statement, expected ':' or '=')"),
        ("PPO.gamma = 0,9\n", "line 2 is not gin: 'PPO.gamma = 0,9' (Expected newline); write Class.parameter = value"),
        ("PPO.gamma = 'a\n", "line 2 is not gin"),
        ("PPO.x = (1,\n", "the text ends within brackets or quotes that are not closed"),
    ],
)
def test_a_syntax_error_is_named_with_its_line(refused, tmp_path, text, words):
    conf = tmp_path / "mine.gin"
    conf.write_text(f"import alfish.algorithms.ppo\n{text}")
    assert f"{conf}: {words}" in refused(*train(tmp_path / "run", conf=str(conf)))


def test_text_without_quotes_is_refused_with_the_quotes(refused, tmp_path):
    for parameter, word in (
        ("make_environment.env_id=CartPole-v1", "CartPole-v1"),
        ("make_environment.env_id = ALE/Pong-v5  # a game", "ALE/Pong-v5"),
        ("OfflineBuffer.sources=[alfish:data]", "alfish:data"),
        ("Trainer.algorithm=PPO", "PPO"),
    ):
        words = refused(*train(tmp_path / "run", parameter))
        assert words.startswith(
            f"alfish train: --gin_param={parameter}: line 1 has {word}, which is not a value: write text"
        )
        assert f"('{word}'), and a class or function with @" in words and words.count("\n") == 1
        assert "line 1 has true; write True instead\n" in refused(*train(tmp_path / "run", "Learner.compile=true"))


def test_a_value_of_the_wrong_type_is_refused_with_its_type(refused, tmp_path):
    for parameter, words in (
        ("PPO.gamma = 'abc'", "it must be a number"),
        ("PPO.gamma = @Linear()", "it must be a number"),
        ("PPO.lambda_ = [0.9]", "it must be a number"),
        ("PPO.normalize_advantage = 'yes'", "it must be True or False"),
        (
            "Learner.learning_rate = 'fast'",
            "it must be a number of at least 0 or a schedule such as @Linear() or a dict, each value a",
        ),
        ("Trainer.unroll_length = 'a'", "it must be a number"),
        ("Trainer.seed = 'a'", "it must be an integer in [0, 922"),
        ("Trainer.device = 0", "it must be text in quotes"),
        ("MLP.layers = 64", "it must be a list: write [64]"),
        ("MLP.layers = 'large'", "it must be a list, each entry an integer in [1, 1000000]"),
        ("MLP.layers = ['large']", "it must be a list, each entry an integer in [1, 1000000]"),
        ("Trainer.algorithm = 'PPO'", "it requires a class or function: write @PPO"),
        ("Trainer.algorithm = @PPO()", "it requires a class or function: write @PPO"),
        ("Learner.optimizer = @Adam()", "it requires a class or function: write @Adam"),
        ("Trainer.environment = 3", "it must be text in quotes or a reference (@...)"),
        ("Trainer.transforms = @RewardClip", "it requires classes or functions: write [@RewardClip]"),
        ("Trainer.transforms = [@ObservationNormalizer()]", "it requires classes or functions: write [@Observation"),
        ("Trainer.metrics = [@AverageReturn]", "it requires objects: write [@AverageReturn()]"),
        ("Trainer.metrics = @AverageReturn()", "it requires objects: write [@AverageReturn()]"),
        ("Trainer.listeners = [@Evaluate, @Progress()]", "it requires objects: write [@Evaluate(), @Progress()]"),
        ("make_environment.env_kwargs = 3", "it must be a dict or None"),
    ):
        said = refused(*train(tmp_path / "run", parameter))
        assert said.startswith(f"alfish train: {parameter.replace(' =', ' is')}, bound in --gin_param; {words}")
        assert said.count("\n") == 1


def test_a_value_of_the_wrong_type_is_named_with_file_and_macro(refused, tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("include 'ppo_cartpole.gin'\nLAYERS = 64\nMLP.layers = %LAYERS\n")
    words = refused(*train(tmp_path / "run", conf=str(mine)))
    assert words == f"alfish train: MLP.layers is %LAYERS, bound in {mine}; it must be a list: write [64]\n"


def test_values_that_serve_as_well_are_taken():
    parameters = [
        "Trainer.num_env_steps=1e6", "PPO.gamma=1", "PPO.normalize_advantage=1", "Learner.learning_rate=@Linear()",
        "Linear.start=1", "MLP.layers=[8]", "MLP.activation=@MLP", "Trainer.metrics=()", "Trainer.listeners=None",
        "Trainer.metrics=[@AverageReturn(), @EnvInfo()]", "OfflineBuffer.sources='alfish:data'",
        "Adam.betas=[0.9, 0.99]", "Encoder.leaves={'image': @NatureCNN}", "make_environment.env_id=@CriticEnsemble",
    ]  # fmt: skip
    found = reading.read(["ppo_cartpole.gin", "offline.gin"], parameters)
    assert {parameter.partition("=")[0] for parameter in parameters} <= {one.name for one in found.last()}


def test_two_budgets_are_both_named(refused, tmp_path):
    words = refused(*train(tmp_path / "run", "Trainer.num_iterations=3"))
    assert "exactly one budget" in words
    assert "Trainer.num_env_steps = 50000 and Trainer.num_iterations = 3" in words


def test_a_minibatch_that_does_not_divide_shows_what_does(refused, tmp_path):
    words = refused(*train(tmp_path / "run", "EpochBatches.minibatch_size=100"))
    assert "100, which does not divide the 256 rows" in words and "64 and 128" in words
    words = refused(*train(tmp_path / "run", "EpochBatches.minibatch_size=100", conf="ppo_recall.gin"))
    assert "100, which does not divide the" in words
    rows, length = (
        int(words.split(before)[1].split()[0]) for before in ("does not divide the ", "rows of an unroll (")
    )
    for size in words.split("that do are ")[1].rstrip(".\n").split(" and "):
        assert rows % int(size) == 0 == int(size) % length


def test_a_conf_without_a_task_asks_for_one(refused, tmp_path):
    words = refused(*train(tmp_path / "run", "Trainer.num_iterations=1", conf="ppo.gin"))
    assert "make_environment" in words and "env_id" in words


def test_an_offline_conf_asks_for_data(refused, tmp_path):
    words = refused(*train(tmp_path / "run", conf="iql_pendulum.gin"))
    assert "nothing binds OfflineBuffer.sources; give the data, as in OfflineBuffer.sources = ['alfish:DIR']" in words
    assert "docs/offline.md" in words and words.count("\n") == 1


def test_a_conf_without_an_algorithm_asks_for_one(refused, tmp_path):
    conf = tmp_path / "mine.gin"
    conf.write_text("Trainer.num_iterations = 1\n")
    words = refused(*train(tmp_path / "run", conf=str(conf)))
    assert "Trainer" in words and "algorithm" in words


def test_a_value_that_makes_no_sense_is_named(refused, tmp_path):
    for parameter, word in (
        ("clip/Linear.finish=2.0", "finish is 2.0"),
        ("CheckpointSaver.keep_last=0", "keep_last is 0"),
        ("MLP.activation='tahn'", "tahn"),
        ("make_environment.env_id='CartPol-v1'", "CartPole-v1"),
        ("make_environment.env_kwargs={'lenght': 3}", "lenght"),
        ("make_environment.num_envs=0", "num_envs"),
        ("Trainer.unroll_length=0", "unroll_length"),
        ("Evaluate.num_episodes=0", "num_episodes"),
        ("Trainer.device='cuda:x'", "cuda:x"),
        ("Trainer.device='gpu'", "gpu"),
    ):
        assert word in refused(*train(tmp_path / "run", *TINY, parameter))


def test_a_parameter_without_its_class_is_refused_from_the_command_line(refused, tmp_path):
    said = refused(*train(tmp_path / "run", *TINY, "num_env_steps=100"))
    assert said == (
        "alfish train: --gin_param sets num_env_steps, but nothing refers to it as %num_env_steps; did you mean "
        "Trainer.num_env_steps?\n"
    )


@pytest.mark.parametrize("parameter, words", [
    ("PPO.learning_rate=1e-3", "named 'learning_rate'; did you mean Learner.learning_rate?"),
    ("Trainer.num_envs=4", "named 'num_envs'; did you mean make_environment.num_envs or Evaluate.num_envs"),
    ("Trainer.gamma=0.9", "named 'gamma'; did you mean PPO.gamma or "),
    ("PPO.lr=1e-3", "named 'lr'; did you mean Learner.learning_rate?"),
    ("lr=1e-3", "%lr; did you mean Learner.learning_rate?"),
    ("PPO.batch_size=64", "named 'batch_size'; did you mean EpochBatches.minibatch_size?"),
    ("batch_size=64", "%batch_size; did you mean EpochBatches.minibatch_size?"),
    ("ReplayBatches.batch_size=64", "with @; did you mean EpochBatches.minibatch_size?"),
    ("SAC.gamma=0.9", "with @; did you mean PPO.gamma or "),
    ("clipp/Linear.start=0.3", "with @; did you mean clip/Linear.start?"),
    ("Trainer.total_timesteps=100", "named 'total_timesteps'; did you mean Trainer.num_env_steps?"),
    ("Trainer.eval_freq=1", "named 'eval_freq'; did you mean Evaluate.period?"),
    ("LSTM.hidden_size=64", "named 'hidden_size'; did you mean LSTM.size?"),
    ("SAC.action_noises=1", "named 'action_noises'; `alfish params SAC` lists its parameters"),  # not action_spec
])  # fmt: skip
def test_a_misplaced_parameter_is_found_in_its_class(refused, tmp_path, parameter, words):
    importlib.import_module("alfish.algorithms.sac")  # what no test has imported is not found
    assert words in refused(*train(tmp_path / "run", *TINY, parameter))


def test_moved_parameter_names_exist_elsewhere_only():
    for name in ("dqn", "iql", "sac", "td3"):
        importlib.import_module(f"alfish.algorithms.{name}")
    known = {name for one in gin_internals.configurables().values() for name in inspect.signature(one).parameters}
    names = {setting.rpartition(".")[2] for setting in NAMES_ELSEWHERE.values()}
    assert names | set(NAMES_IN_CLASSES.values()) <= known and not known & set(NAMES_ELSEWHERE)


@pytest.mark.parametrize(
    ("conf", "setting", "words"),
    [
        ("sac_pendulum", "Learner.learning_rate=@Linear", "it requires an object: write @Linear()\n"),
        ("sac_pendulum", "Learner.learning_rate={'critic': @a/Linear}", "it requires an object: write @a/Linear()\n"),
        ("sac_pendulum", "Learner.learning_rate=@Linear()", "Linear.start has no value; bind it\n"),
        ("rainbow_lunarlander", "Prioritized.beta=@Linear", "it requires an object: write @Linear()\n"),
    ],
)
def test_an_incomplete_schedule_is_reported(refused, tmp_path, conf, setting, words):
    assert refused(*train(tmp_path / "run", setting, conf=f"{conf}.gin")).endswith(words)


@pytest.mark.parametrize(
    "setting, words",
    [
        (
            "make_environment.rewards={}",
            "make_environment.rewards is {}; it must name at least one entry of a vector reward",
        ),
        (
            "make_environment.rewards=[]",
            "make_environment.rewards is []; it must name at least one entry of a vector reward",
        ),
        (
            "Encoder.leaves={'left': @Flat}",
            "Encoder.leaves names 'left'; the observation is a single leaf, which has no path",
        ),
        ("Torso.memory=@Encoder", "Encoder encodes observations, but was called with 64 in place of their spaces"),
        (
            "Encoder.vector=@Encoder",
            "Encoder.vector makes a part that contains itself without end; set another class",
        ),
    ],
)
def test_settings_without_an_end_or_a_content_are_refused(refused, tmp_path, setting, words):
    assert words in refused(*train(tmp_path / "run", setting))


@gin.configurable(module="tests.sentences")
class WithoutState(Metric):
    def update(self, rows):
        pass

    def result(self):
        return {"x": 1.0}


def test_an_abstract_method_that_a_metric_does_not_define_is_named(refused, tmp_path):
    said = refused(*train(tmp_path / "run", "Trainer.extra_metrics=[@WithoutState()]"))
    assert said == "alfish train: WithoutState does not define load_state_dict, state_dict; define them\n"
