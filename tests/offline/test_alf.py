"""ALF's checkpoints, written here as ALF lays them out: flat names, rings that have wrapped, a numpy step counter."""

import numpy as np
import pytest
import torch
from recorded import SPACES, assert_rows, record, without_final

from alfish.errors import UsageError
from alfish.offline import OfflineBuffer, open_source
from alfish.offline.episode import EpisodeEncoder


def rows_of(episodes):
    """The rows of one environment, as the stream has them."""
    maker = EpisodeEncoder(SPACES, 1.0)
    parts = [maker.rows(episode) for episode in episodes]
    return {
        "time_step|step_type": np.concatenate([p.time_step.step_type for p in parts]),
        "time_step|reward": np.concatenate([p.time_step.reward for p in parts]),
        "time_step|discount": np.concatenate([p.time_step.discount for p in parts]),
        "time_step|observation": np.concatenate([p.time_step.observation for p in parts]),
        "time_step|prev_action": np.concatenate([p.time_step.prev_action for p in parts]),
        "time_step|env_id": np.concatenate([p.time_step.env_id for p in parts]),
        "action": np.concatenate([p.action for p in parts]),
        "rollout_info|log_prob": np.concatenate([p.time_step.reward for p in parts]),
    }


def checkpoint(columns, length, prefix="_replay_buffer.", stops=None):
    """Returns ALF's state of rings of `length` rows into which these columns were written, up to row `stops[env]`."""
    stops = stops or [len(rows["action"]) for rows in columns]
    entries = {}
    for name, example in columns[0].items():
        ring = np.full((len(columns), length, *example.shape[1:]), 77, example.dtype)
        for env, (rows, stop) in enumerate(zip(columns, stops)):
            for position in range(stop):
                ring[env, position % length] = rows[name][position]
        entries[prefix + name] = torch.from_numpy(ring)
    entries[prefix + "_current_pos"] = torch.tensor(stops)
    entries[prefix + "_current_size"] = torch.tensor([min(stop, length) for stop in stops])
    return entries


def saved(path, entries, **more):
    torch.save({"algorithm": entries, **more}, path)
    return f"alf:{path}"


@pytest.mark.parametrize("prefix", ["_replay_buffer.", "_rl_algorithm._replay_buffer."])
def test_every_row_of_rings_that_have_not_wrapped(tmp_path, prefix):
    episodes = record()
    columns = [rows_of(episodes[:6]), rows_of(episodes[6:])]
    name = saved(tmp_path / "ckpt-9-replay_buffer", checkpoint(columns, 40, prefix))
    assert_rows(OfflineBuffer([name], spaces=SPACES), episodes)


def test_single_file_buffers_are_read_with_their_numpy_counter(tmp_path):
    entries = checkpoint([rows_of(record())], 60) | {"_network.weight": torch.zeros(3)}
    name = saved(tmp_path / "ckpt-9", entries, global_step=np.int64(5), metrics={}, progress=[np.float32(1.0)])
    assert_rows(OfflineBuffer([name], spaces=SPACES), record())


def test_wrapped_rings_are_unrolled_with_their_partial_episodes(tmp_path):
    rows = rows_of(record())  # of 4, 6, 2, 9, 3, ... rows, 52 in all
    name = saved(tmp_path / "ckpt", checkpoint([rows], 30))
    buffer = OfflineBuffer([name], spaces=SPACES)
    # Rows 22 to 51 are left: of the episodes at 21 (3 rows), 24 (4), 28 (6), 34 (2), 36 (9), 45 (3), 48 (4).
    headless = record()[4]
    headless = headless._replace(
        observations=headless.observations[1:], actions=headless.actions[1:], rewards=headless.rewards[1:],
        terminated=headless.terminated[1:], truncated=headless.truncated[1:],
    )  # fmt: skip
    assert_rows(buffer, [headless, *record()[5:]])
    assert "the beginning of its oldest episode was overwritten" in buffer.report.sentences("note")


def test_an_unfinished_episode_is_truncated_at_its_newest_row(tmp_path):
    rows = rows_of(record()[:2])
    name = saved(tmp_path / "ckpt", checkpoint([rows], 30, stops=[8]))  # of the second episode, 4 rows
    first, second = record()[:2]
    cut = slice(0, 3)
    second = second._replace(
        observations=second.observations[:4], actions=second.actions[cut], rewards=second.rewards[cut],
        terminated=second.terminated[cut], truncated=np.array([False, False, True]),
    )  # fmt: skip
    assert_rows(OfflineBuffer([name], spaces=SPACES), [first, second])


def test_an_episode_that_is_interrupted_before_the_next_first_row_is_truncated(tmp_path):
    """An environment that was built anew leaves no LAST row."""
    rows = rows_of(record()[:2])
    kept = np.arange(10) != 3  # the LAST row of the first episode
    name = saved(tmp_path / "ckpt", checkpoint([{key: rows[key][kept] for key in rows}], 30))
    broken = [record()[0]._replace(terminated=np.zeros(3, bool), truncated=np.ones(3, bool))]
    assert_rows(OfflineBuffer([name], spaces=SPACES), [*without_final(broken), record()[1]])


def test_nested_observations_match_their_names(tmp_path):
    entries = checkpoint([rows_of(record())], 60)
    whole = entries.pop("_replay_buffer.time_step|observation")
    entries |= {f"_replay_buffer.time_step|observation.{key}": whole + i for i, key in enumerate(("here", "there.0"))}
    episode = next(iter(open_source(saved(tmp_path / "ckpt", entries)).episodes()))
    assert (episode.observations["here"] + 1 == episode.observations["there"][0]).all()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda e: {k: v for k, v in e.items() if "_current" not in k}, "holds no replay buffer"),
        (lambda e: {k: v for k, v in e.items() if "reward" not in k}, "has no reward"),
        (
            lambda e: {f"_replay_buffer.{k}": torch.zeros(1) for k in ("_buffer0", "_current_pos", "_current_size")},
            "was saved by an old version of ALF",
        ),
        (lambda e: {k: v for k, v in e.items() if k != "_replay_buffer.action"}, "has no action"),
        (lambda e: e | {"_replay_buffer._current_size": torch.tensor([2**55])}, "is damaged: rings of 60 rows hold"),
        (lambda e: e | {"_replay_buffer._current_pos": torch.tensor([-52])}, r"\[52\], written up to row \[-52\]"),
        (lambda e: e | {"_replay_buffer._current_pos": torch.tensor([51])}, r"\[52\], written up to row \[51\]"),
        (
            lambda e: e | {"_replay_buffer._current_pos": torch.tensor([52.5])},
            "float32, but integers are expected",
        ),
        (lambda e: e | {f"other.{k}": v for k, v in e.items()}, r"2 replay buffers \(_replay_buffer, other"),
    ],
)
def test_what_is_missing_is_named(tmp_path, change, words):
    name = saved(tmp_path / "ckpt", change(checkpoint([rows_of(record())], 60)))
    with pytest.raises(UsageError, match=words):
        open_source(name)


@pytest.mark.parametrize(
    "field, value, words", [("step_type", 9, "a step type is 9"), ("discount", np.nan, "a discount is nan")]
)
def test_rows_that_no_environment_gives_are_named(tmp_path, field, value, words):
    rows = rows_of(record())
    rows[f"time_step|{field}"][3] = value
    name = saved(tmp_path / "ckpt", checkpoint([rows], 60))
    with pytest.raises(UsageError, match=f"{tmp_path}/ckpt: environment 0: {words}, which no environment returns"):
        list(open_source(name).episodes())


def test_a_half_checkpoint_is_reported_as_unreadable(tmp_path):
    name = saved(tmp_path / "ckpt", checkpoint([rows_of(record())], 60))
    content = (tmp_path / "ckpt").read_bytes()
    (tmp_path / "ckpt").write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="truncated or damaged: none of its"):
        open_source(name)


class Evil:
    def __reduce__(self):
        import os

        return os.mkdir, ("executed",)


def test_code_in_a_checkpoint_is_named_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = saved(tmp_path / "ckpt", checkpoint([rows_of(record())], 60), config=Evil())
    with pytest.raises(UsageError, match=r"is refused: it tries to load \w+.mkdir"):
        open_source(name)
    assert not (tmp_path / "executed").exists()
