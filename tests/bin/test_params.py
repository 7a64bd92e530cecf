"""`alfish params` and `alfish completion`: names of parameters, and scripts that complete them."""

import contextlib
import io
import shutil
import subprocess

import pytest

from alfish.__main__ import SUBCOMMANDS, main
from alfish.configuration import catalogue, locating, reading
from alfish.configuration.bindings import MACRO
from alfish.parameters import gin_internals


@pytest.fixture(scope="module")
def entries():
    return {entry.name: entry for entry in catalogue.entries()}


def listed(capsys, *words):
    assert main(["params", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_parameter_has_its_default_kind_and_help(entries):
    gamma = entries["PPO.gamma"]
    assert gamma.default == "0.99" and gamma.kind.startswith("a number in [0, 1]") and "discount" in gamma.help
    assert entries["PPO.network"].default == "@ActorCritic" and entries["MLP.activation"].default == "'tanh'"
    assert entries["StopAt.return_"].default is None and entries["Trainer.algorithm"].default is None
    assert entries["MLP.layers"].kind == "a list, each entry an integer in [1, 1000000]"


def test_a_list_of_classes_is_shown_as_references(entries):
    assert entries["StackedMemory.layers"].default == "[@GRU, @GRU]"
    assert entries["MLP.layers"].default == "(64, 64)"


def test_a_class_inherits_the_parameters_of_its_base(entries):
    assert entries["APPO.gamma"].help == entries["PPO.gamma"].help and entries["APPO.rho_bar"].default == "1.0"
    assert entries["TD3.gamma"].default == "0.99"


def test_arguments_that_the_trainer_passes_are_not_parameters(entries):
    assert not {"PPO.observation_spec", "MLP.input_size", "Learner.algorithm", "Trainer.root_dir"} & set(entries)


def test_parameters_that_no_configuration_can_bind_are_left_out(entries):
    assert not {"Quantiles.gamma", "QNetwork.num_values", "BatchNorm.ensemble_size"} & set(entries)
    assert {"Quantiles.num_quantiles", "QNetwork.dueling", "BatchNorm.rate"} <= set(entries)


def test_each_bound_parameter_of_each_conf_is_in_the_catalogue(entries):
    for path in sorted(locating.confs_directory().glob("*.gin")):
        bound = [one for one in reading.read([str(path)], []).last() if one.key[1] != MACRO]
        assert {one.name.rpartition("/")[2] for one in bound} <= set(entries), path.name


def test_each_parameter_of_alfish_has_help(entries):
    own = {selector.rpartition(".")[2] for selector in gin_internals.configurables() if selector.startswith("alfish.")}
    assert [name for name, entry in entries.items() if name.split(".")[0] in own and not entry.help] == []


def test_words_and_patterns_select(capsys):
    lines = listed(capsys, "PPO.*", "clip")
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert "Linear.start must be bound  (a finite number)" in listed(capsys, "linear.s")
    assert "PPO.clip_range" in names and all(name.startswith("PPO.") and "clip" in name for name in names)
    assert any(line.startswith("PPO.clip_range = 0.2  (a positive number") for line in lines)
    assert any(line.startswith("StopAt.return_ must be bound") for line in listed(capsys, "stopat"))
    assert main(["params", "nothing_like_it"]) == 2
    assert "no parameter has nothing_like_it in its name" in capsys.readouterr().err


def test_parameters_of_a_configuration_have_the_values_in_force(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = listed(capsys, "--gin_file=ppo_cartpole.gin", "--gin_param=Trainer.seed=7")
    values = dict(line.split("  (")[0].split(" = ", 1) for line in lines if not line.startswith(" "))
    assert values["Trainer.seed"] == "7" and values["learning_rate/Linear.start"] == "0.002"
    assert values["PPO.target_kl"] == "None" and values["Evaluate.period"] == "10000" and "SAC.gamma" not in values
    assert any(line.startswith("PPO.gamma = 0.98  (default 0.99; a number") for line in lines)
    assert any(line.startswith("PPO.target_kl = None  (a positive") for line in lines)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_configuration_that_cannot_be_built_is_reported_in_one_sentence(capsys):
    assert main(["params", "--gin_param=PPO.gama=0.9"]) == 2
    assert "PPO" in capsys.readouterr().err


@pytest.fixture(scope="module")
def scripts():
    """The script of each shell."""
    found = {}
    for shell in ("bash", "zsh"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["completion", shell]) == 0
        found[shell] = output.getvalue()
    return found


TRY = """
COMP_LINE=$1; COMP_POINT=${#COMP_LINE}; COMP_WORDS=($COMP_LINE); COMP_CWORD=$2
compopt() { :; }  # which works only within a completion
_alfish; printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(scripts, line, place, breaks="="):
    """What bash offers at the end of a line, whose last word is the `place`-th."""
    script = f"COMP_WORDBREAKS={breaks!r}\n{scripts['bash']}{TRY}"
    ran = subprocess.run(["bash", "-c", script, "bash", line, str(place)], capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    return ran.stdout.split()


def test_bash_completes_subcommands_flags_confs_and_parameters(scripts):
    assert completed(scripts, "alfish ", 1) == list(SUBCOMMANDS)
    assert completed(scripts, "alfish com", 1) == ["compare", "completion"]
    assert completed(scripts, "alfish train --gin_file=ppo_cart", 3) == ["ppo_cartpole.gin", "ppo_cartpole_tensor.gin"]
    assert completed(scripts, "alfish train --gin_param=PPO.gam", 3) == ["PPO.gamma="]
    assert completed(scripts, "alfish train --gin_param=PPO.gamma=0", 3) == []
    assert completed(scripts, "alfish check-env --num", 2) == ["--num_steps="]
    assert completed(scripts, "alfish evaluate --js", 2) == ["--json"]
    assert completed(scripts, "alfish params PPO.clip", 2) == ["PPO.clip_range"]


def test_bash_completes_whole_words_where_an_equals_sign_does_not_break_them(scripts):
    assert completed(scripts, "alfish train --gin_file=ppo_catc", 2, " ") == ["--gin_file=ppo_catch.gin"]


def test_a_shell_must_be_named(capsys):
    assert main(["completion"]) == 2 and main(["completion", "fish"]) == 2
    assert "`alfish completion bash`" in capsys.readouterr().err


def test_both_scripts_are_in_the_language_of_their_shell(scripts):
    assert scripts["zsh"].startswith("#compdef alfish\n")
    for shell, script in scripts.items():
        if shell == "bash" or shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=script, text=True, timeout=60).returncode == 0
