"""Films: every frame up to the true final one, in files that say what they show, without any effect on results."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import weakref

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from toys import OneState

import alfish
from alfish.__main__ import main
from alfish.environments import make_environment
from alfish.errors import RunError, UsageError
from alfish.runs.film_file import FilmFile, as_gif, side_by_side
from alfish.training.films import Camera, FilmRow, Recorder, captioned, grid
from alfish.training.listeners import Evaluate

ffmpeg = pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("pygame")


def train(path, *parameters):
    """Trains PPO on CartPole for 2048 steps, with small networks and short evaluations."""
    settings = [
        "Trainer.num_env_steps=2048",
        "Trainer.max_evaluation_length=12",
        "MLP.layers=(8,)",
        "EpochBatches.num_epochs=1",
        "Evaluate.num_episodes=3",
        "Trainer.unroll_length=32",
        *parameters,
    ]
    flags = [f"--gin_param={setting}" for setting in settings]
    return main(["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={path}", *flags])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run, whose evaluations at 1024 and at the end are filmed."""
    path = tmp_path_factory.mktemp("runs") / "run"
    films = "Evaluate.video_period=1024", "Evaluate.video_episodes=3", "Evaluate.video_captions=True"
    assert train(path, "Evaluate.period=512", *films) == 0
    return path


def num_frames(path):
    return ffmpeg.count_frames_and_secs(str(path))[0]


def frame_of(path, index, size):
    """One frame of a film, whose height and width are `size`."""
    command = [ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-vf", f"select=eq(n\\,{index})"]
    command += ["-frames:v", "1", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(content, np.uint8).reshape(*size, 3)


def rows_of(path):
    _, *rows = path.read_text().splitlines()
    return [(float(row.split(",")[2]), int(row.split(",")[3])) for row in rows]


def test_the_evaluations_of_each_period_and_the_last_one_are_filmed(run):
    names = sorted(path.name for path in (run / "films").iterdir())
    assert [name[: len("evaluation-000000001024")] for name in names] == [
        "evaluation-000000001024",
        "evaluation-000000002048",
    ]
    for name in names:
        stem, return_ = re.fullmatch(r"(evaluation-\d{12})-episodes-0-2-return-(.*)\.mp4", name).groups()
        episodes = rows_of(run / "eval" / f"{stem}.csv")
        assert float(return_) == pytest.approx(np.mean([one for one, _ in episodes]), abs=0.005)
        assert num_frames(run / "films" / name) == max(length for _, length in episodes) + 1
        frame = frame_of(run / "films" / name, 0, (800, 1200))  # 2 x 2 places, of which the last one stays black
        assert frame[400:, 600:].max() < 16 < frame[:400, :600].max()


def test_tensorboard_shows_the_films_of_a_training(run):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(run / "tensorboard"), {"images": 0})
    events.Reload()
    shown = events.Images("evaluation/film")
    assert [(one.step, one.width, one.height) for one in shown] == [(1024, 320, 213), (2048, 320, 213)]
    assert all(one.encoded_image_string[:4] == b"GIF8" for one in shown)


def test_a_resumed_run_films_at_the_same_steps(run, tmp_path):
    films = "Evaluate.video_period=1024", "Evaluate.period=512", "CheckpointSaver.period=512"
    assert train(tmp_path / "cut", *films, "Trainer.stop_at=1030") == 0
    assert len(list((tmp_path / "cut" / "films").iterdir())) == 1
    assert train(tmp_path / "cut", *films) == 0
    names = sorted(path.name.split("-")[1] for path in (tmp_path / "cut" / "films").iterdir())
    assert names == ["000000001024", "000000002048"]


def test_a_film_of_evaluate_ends_with_the_true_final_frame(run, capsys):
    capsys.readouterr()
    assert (
        main(
            [
                "evaluate",
                f"--root_dir={run}",
                "--num_episodes=2",
                "--num_envs=2",
                "--video",
                "--json",
                "--max_length=500",
            ]
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    [film] = (run / "films").glob("checkpoint-*-episode-0-return-*.mp4")
    clock = max((run / "checkpoints").glob("*.pt")).stem
    assert film.name == f"{clock}-episode-0-return-{summary['returns'][0]:.2f}.mp4"
    assert num_frames(film) == summary["lengths"][0] + 1
    last = frame_of(film, summary["lengths"][0], (400, 600))
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    observation, _ = env.reset(seed=0)
    policy, before, ends = alfish.load(run), None, False
    while not ends:
        before = env.render()
        observation, _, terminated, truncated, _ = env.step(policy.act(observation))
        ends = terminated or truncated
    true, earlier = (np.abs(last.astype(float) - frame).mean() for frame in (env.render(), before))
    assert true < 1 and true < earlier


@pytest.mark.parametrize("num_envs", [1, 8])
def test_results_are_the_same_with_and_without_a_film(run, capsys, num_envs):
    results = []
    for films in ([], ["--video", "--video_episodes=2", "--captions"]):
        capsys.readouterr()
        flags = [f"--root_dir={run}", "--num_episodes=3", f"--num_envs={num_envs}", "--json", "--sample"]
        assert main(["evaluate", *flags, *films]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]


def test_play_shows_all_episodes_in_one_grid(run, tmp_path, capsys):
    capsys.readouterr()
    film = tmp_path / "four.gif"
    assert main(["play", f"--root_dir={run}", f"--video={film}", "--grid", "--num_episodes=4", "--max_length=9"]) == 0
    words = capsys.readouterr().out
    lengths = [int(found) for found in re.findall(r" in (\d+) steps", words)]
    assert f"{film}: {max(lengths) + 1} frames" in words and len(lengths) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["four.gif"]


def test_play_shows_another_run_beside_on_the_same_episodes(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "other")
    film = tmp_path / "films" / "both.mp4"
    flags = [f"--root_dir={run}", "--seed=4", "--num_episodes=2", "--max_length=40"]
    assert main(["play", *flags, f"--beside={tmp_path / 'other'}", f"--video={film}"]) == 0
    words = capsys.readouterr().out
    lengths = [int(found) for found in re.findall(r" in (\d+) steps", words)]
    assert lengths[:2] == lengths[2:], "both runs play episodes with the same seeds"
    films = [film.with_name(f"both-{k}.mp4") for k in range(2)]
    assert sorted(film.parent.iterdir()) == films
    for path, length in zip(films, lengths):
        assert f"{path}: {length + 1} frames" in words and num_frames(path) == length + 1
    both = frame_of(films[0], 0, (400, 1200)).astype(int)
    assert np.abs(both[:, :600] - both[:, 600:]).mean() < 2, "the same picture twice"


def test_a_short_film_keeps_its_last_frame_beside_a_long_one(tmp_path):
    films = [tmp_path / "long.mp4", tmp_path / "short.mp4"]
    for path, shade, count in zip(films, (40, 200), (8, 3)):
        file = FilmFile(tmp_path, ".mp4", 10, "film")
        for _ in range(count):
            file.append(np.full((64, 64, 3), shade, np.uint8))
        file.finish(path)
    side_by_side(films, tmp_path / "both.mp4", "--video=both.mp4")
    assert num_frames(tmp_path / "both.mp4") == 8
    last = frame_of(tmp_path / "both.mp4", 7, (64, 128)).astype(int)
    assert abs(last[:, :60].mean() - 40) < 6 and abs(last[:, 68:].mean() - 200) < 6
    films[1].write_bytes(b"no film")
    with pytest.raises(RunError, match="--video=both.mp4 cannot be written"):
        side_by_side(films, tmp_path / "both.mp4", "--video=both.mp4")


@pytest.mark.parametrize("video", [[], ["--video=both.gif"]])
def test_runs_side_by_side_need_a_film(run, refused, video):
    sentence = refused("play", f"--root_dir={run}", f"--beside={run}", *video)
    assert "--beside shows runs side by side in a film; give its name by --video=NAME.mp4" in sentence


@pytest.mark.slow
def test_custom_vector_classes_are_filmed_side_by_side(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_vector.py").write_text(
        "import gin\n"
        "from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv\n"
        "@gin.configurable\n"
        "def together(num_envs, render_mode=None):\n"
        "    return CartPoleVectorEnv(num_envs=num_envs, render_mode=render_mode)\n"
    )
    (tmp_path / "own.gin").write_text("import own_vector\ninclude 'ppo.gin'\nmake_environment.env_id = @together\n")
    settings = ["Trainer.num_env_steps=64", "Trainer.unroll_length=32", "Trainer.listeners=[@CheckpointSaver()]"]
    assert main(["train", "--gin_file=own.gin", "--root_dir=run", *(f"--gin_param={one}" for one in settings)]) == 0
    sentence = refused("play", "--root_dir=run", "--allow_import=own_vector", "--video=play.mp4", "--num_episodes=3")
    assert "runs all episodes at once; film them side by side (--grid), or film a single one" in sentence
    assert not (tmp_path / "play.mp4").exists()


@pytest.mark.parametrize("kind", [list, np.asarray])
def test_a_vector_class_may_render_a_list_or_an_array(kind):
    class Rendering(CartPoleVectorEnv):
        count = 2

        def render(self):
            return kind([np.full((4, 6, 3), 10 * k, np.uint8) for k in range(self.count)])

    environment = make_environment(Rendering, num_envs=2, render_mode="rgb_array", evaluation=True)
    camera = Camera(environment, "--video")
    assert [frame[0, 0, 0] for frame in camera.frames([1, 0])] == [10, 0]
    environment.env.count = 3
    with pytest.raises(UsageError, match="Rendering.render returned 3 frames for 2 environments"):
        camera.frames([0])
    environment.close()


def test_film_values_come_from_the_networks(run):
    with contextlib.ExitStack() as stack:
        from alfish.configuration.opening import open_run

        trainer = stack.enter_context(open_run(run))
        trainer.load_policy()
        evaluator = trainer.evaluator(3, 2)
        stack.callback(evaluator.close)
        rows = []
        with_values = evaluator.evaluate(3, on_row=rows.append, values=True)
        assert with_values == evaluator.evaluate(3)
        values = np.concatenate([row.value for row in rows])
        assert values.shape == (2 * len(rows),) and len(set(values.tolist())) > 10
        batch = next(evaluator._rows(3, 0, False))[1]
        expected = trainer.algorithm.network.value(batch, None).detach().numpy()
        np.testing.assert_allclose(rows[0].value, expected, rtol=1e-5)


class Blind(OneState):
    """Has no frames: its class takes no render mode."""

    def __init__(self, length: int = 5):
        super().__init__(length=length)


def test_an_environment_without_frames_is_refused_before_training(tmp_path, capsys):
    alfish.train("PPO", Blind, num_env_steps=64, root_dir=tmp_path / "run", **{"Trainer.unroll_length": 64})
    for command in (["play", f"--video={tmp_path / 'x.mp4'}"], ["evaluate", "--video"]):
        capsys.readouterr()
        assert main([*command, f"--root_dir={tmp_path / 'run'}", "--allow_import=test_films"]) == 2
        words = capsys.readouterr().err
        assert words.count("\n") == 1 and "Blind cannot be filmed: its constructor takes no render_mode" in words
    assert not (tmp_path / "run" / "films").exists()
    with pytest.raises(UsageError, match="Blind cannot be filmed"):
        alfish.train(
            "PPO",
            Blind,
            num_env_steps=64,
            root_dir=tmp_path / "filmed",
            **{"Trainer.unroll_length": 64, "Trainer.listeners": [Evaluate(video_period=64)]},
        )
    assert not (tmp_path / "filmed" / "metrics.csv").exists()


# Recorders.


class FakeCamera:
    """Frames of one grey, which tell how many of them are alive."""

    fps = 30.0

    def __init__(self):
        self.frames_made, self.most = weakref.WeakSet(), 0

    def frames(self, lanes):
        frames = [Frame((16, 16, 3), np.uint8) for _ in lanes]
        for frame, lane in zip(frames, lanes):
            frame[...] = 50 + 50 * lane
            self.frames_made.add(frame)
        self.most = max(self.most, len(self.frames_made))
        return frames


class Frame(np.ndarray):
    """An array that can be a member of a set."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def row(*episodes, ended=(), reward=1.0):
    episode = np.array(episodes)
    return FilmRow(episode, np.full(len(episode), reward), np.zeros(len(episode)), None, np.isin(episode, ended))


def recorder_of(tmp_path, num_episodes, num_tiles=1, **options):
    camera = FakeCamera()

    def path(first, return_):
        return tmp_path / f"{first}-{return_:g}.mp4"

    return Recorder(camera, num_episodes, num_tiles, path, "--video", **options), camera


def test_frames_of_a_long_film_do_not_pile_up(tmp_path):
    recorder, camera = recorder_of(tmp_path, 1)
    with recorder:
        for _ in range(200):
            recorder(row(0))
        recorder(row(0, ended=[0]))
    assert recorder.written == [(tmp_path / "0-201.mp4", 201)] and camera.most < 10


def test_an_interrupted_film_leaves_no_file(tmp_path):
    recorder, _ = recorder_of(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt), recorder:
        recorder(row(0, ended=[0]))
        recorder(row(1))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["0-1.mp4"]


def test_rows_of_other_episodes_are_not_in_a_film(tmp_path):
    recorder, _ = recorder_of(tmp_path, 2, 2)
    with recorder:
        recorder(row(0, 1, 2, reward=0.0))
        recorder(row(0, 1, 2, ended=[1]))
        recorder(row(-1, 3, -1, reward=0.0))  # the next episodes begin
        recorder(row(0, 3, 2, ended=[0]))
        recorder(row(4, 3, 2))
    assert recorder.written == [(tmp_path / "0-1.5.mp4", 3)]


def test_tiles_stand_row_by_row_in_a_nearly_square_grid():
    tiles = [np.full((2, 3, 3), k + 1, np.uint8) for k in range(5)]
    np.testing.assert_array_equal(grid(tiles)[::2, ::3, 0], [[1, 2, 3], [4, 5, 0]])
    assert grid(tiles[:1]).shape == (2, 3, 3) and grid(tiles[:2]).shape == (2, 6, 3)


def test_captions_change_only_their_part_of_the_frame(tmp_path):
    frame = np.full((200, 300, 3), 200, np.uint8)
    words = captioned(frame, ["episode 0  step 1", "return 3"])
    assert words.shape == frame.shape and (words[100:] == 200).all() and (words[:20, :40] != 200).any()
    recorder, _ = recorder_of(tmp_path, 1, captions=True)
    shown = FilmRow(np.array([0]), np.array([2.5]), np.array([[0.25, -1.0]]), np.array([7.0]), np.array([False]))
    with recorder:
        first = recorder_of(tmp_path, 1, captions=True)[0]._lines(shown, 0, 0)  # no action led to it
        assert first == ["episode -1  step 0", "return 0", "reward 2.5", "value 7"]
        recorder(shown)
        assert recorder._lines(shown, 0, 0) == [
            "episode 0  step 1",
            "return 2.5",
            "reward 2.5",
            "value 7",
            "action 0.25, -1",
        ]


def test_a_film_becomes_a_small_gif(run):
    film = min((run / "films").glob("evaluation-*.mp4"))
    content = as_gif(film)
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(content))
    assert content[:4] == b"GIF8" and image.size == (320, 213) and image.n_frames > 1


def test_a_film_whose_file_lacks_frames_is_refused(tmp_path, monkeypatch):
    film = FilmFile(tmp_path, ".mp4", 30, "--video=film.mp4")
    for _ in range(5):
        film.append(np.zeros((16, 16, 3), np.uint8))
    close = film._writer.close

    def cut():  # ffmpeg, in a process of its own, cannot write to a full disk
        close()
        os.truncate(film._unfinished, 100)

    monkeypatch.setattr(film._writer, "close", cut)
    with pytest.raises(RunError, match="--video=film.mp4 cannot be written: its file has 0 of 5 frames"):
        film.finish(tmp_path / "film.mp4")
    assert not (tmp_path / "film.mp4").exists()
