"""Which files and parameters a configuration is read from, and in which order."""

import functools

from commands import TINY, train

from alfish.__main__ import main
from alfish.configuration import locating, reading


def test_a_missing_file_is_named_with_close_names(refused, tmp_path):
    words = refused(*train(tmp_path / "run", conf="ppo_cartpol.gin"))
    assert "there is no gin file 'ppo_cartpol.gin'" in words and "ppo_cartpole.gin" in words
    assert "`alfish confs` lists" in refused(*train(tmp_path / "run", conf="zzzzzzzz"))


def test_shipped_files_do_not_replace_missing_user_files(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no gin file" in refused(*train(tmp_path / "run", conf=f"{tmp_path}/ppo_cartpole.gin"))
    assert locating.find("confs/ppo_cartpole.gin") == locating.find("ppo_cartpole.gin")


def test_macros_and_includes_that_lead_nowhere_are_named(refused, tmp_path):
    for text, words in (
        ("num_env_steps = 100\n", "sets num_env_steps, but nothing refers to it as %num_env_steps; did you mean Tra"),
        ("gama = 0.9\n", "sets gama, but nothing refers to it as %gama; did you mean PPO.gamma"),
        ("LAYERS = (8,)\n", "sets LAYERS, but nothing refers to it as %LAYERS; "),
        ("PPO.gamma = %GAMMA\n", "PPO.gamma in {file} refers to %GAMMA, which nothing sets\n"),
        ("GAMMA = 0.9\nPPO.gamma = %GAMA\nPPO.lambda_ = %GAMMA\n", "refers to %GAMA, which nothing sets; did you mean"),
        ("A = %A\nPPO.gamma = %A\n", "in {file} refers to %A, which refers to itself: A -> A\n"),
        ("A = [%B]\nB = {'x': %A}\nMLP.layers = %A\n", "which refers to itself: A -> B -> A\n"),
        ("include 'mine.gin'\n", "mine.gin includes itself: mine.gin -> mine.gin; remove one of these includes\n"),
        ("include 'other.gin'\n", "mine.gin includes itself: mine.gin -> other.gin -> mine.gin; remove one"),
        (f"MLP.layers = {'[' * 3000}{']' * 3000}\n", "its values are nested too deeply"),
        ("PPO.gamma = 0.9\x00\n", "{file}: "),
        ("PPO.gamma = 0.\xff\n", "{file} is not text in UTF-8: line 2 "),
    ):
        (tmp_path / "other.gin").write_text("include 'mine.gin'\n")
        mine = tmp_path / "mine.gin"
        mine.write_bytes(f"include 'ppo_cartpole.gin'\n{text}".encode("latin-1"))
        said = refused(*train(tmp_path / "run", conf=str(mine)))
        assert words.format(file=mine) in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_includes_resolve_from_another_directory(tmp_path, monkeypatch):
    confs, elsewhere = tmp_path / "confs", tmp_path / "elsewhere"
    confs.mkdir(), elsewhere.mkdir()
    for name in ("base.gin", "ppo_cartpole.gin"):
        (elsewhere / name).write_text("a file of the working directory is read last\n")
    (confs / "base.gin").write_text("include 'ppo_cartpole.gin'\nMLP.layers = (4,)\n")
    (confs / "task.gin").write_text("include 'base.gin'\nTrainer.seed = 5\n")
    monkeypatch.chdir(elsewhere)
    assert main(train(tmp_path / "run", *TINY[1:], conf=str(confs / "task.gin"))) == 0
    text = (tmp_path / "run" / "config.gin").read_text()
    assert "MLP.layers = (4,)" in text and "Trainer.seed = 5" in text
    assert main(["evaluate", f"--root_dir={tmp_path / 'run'}", "--num_episodes=1"]) == 0


def test_later_files_and_parameters_win(tmp_path):
    (tmp_path / "more.gin").write_text("PPO.gamma = 0.5\nPPO.lambda_ = 0.5\n")
    conf = ["ppo_cartpole.gin", str(tmp_path / "more.gin")]
    assert main(train(tmp_path / "run", *TINY, "PPO.lambda_=0.25", conf=conf)) == 0
    text = (tmp_path / "run" / "config.gin").read_text()
    assert "PPO.gamma = 0.5" in text and "PPO.lambda_ = 0.25" in text


def test_endless_macros_are_refused_and_files_are_utf_8(refused, tmp_path):
    path = tmp_path / "mine.gin"
    double = "".join(f"m{k} = [%m{k + 1}, %m{k + 1}]\n" for k in range(40))
    path.write_text(f"include 'ppo_cartpole.gin'\n{double}m40 = 1\nMLP.layers = %m0\n")
    assert "macros have values of more than 4,194,304 characters" in refused(*train(tmp_path / "run", conf=str(path)))
    path.write_bytes(b"# \xff\n")
    assert f"{path} is not text in UTF-8: line " in refused(*train(tmp_path / "run", conf=str(path)))


def _opened(builtin, file, mode="r", buffering=-1, encoding=None, *rest, **keywords):
    """Opens a file as Python does where the locale is Latin-1."""
    is_text = "b" not in mode
    return builtin(file, mode, buffering, encoding or ("latin-1" if is_text else None), *rest, **keywords)


def test_gin_files_are_utf_8_in_any_locale(tmp_path, monkeypatch):
    (tmp_path / "mine.gin").write_text("include 'ppo_cartpole.gin'\nEvaluate.name = 'é'\n", encoding="utf-8")
    with monkeypatch.context() as context:
        context.setattr("io.text_encoding", lambda encoding, level=2: encoding or "latin-1")
        context.setattr("builtins.open", functools.partial(_opened, open))
        with reading.preserved():
            reading.read([str(tmp_path / "mine.gin")], [])
            assert "é" in reading.text()
