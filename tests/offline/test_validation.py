"""Each line of the validator's table: an episode that provokes it, and what becomes of it under each policy."""

import re

import numpy as np
import pytest
from gymnasium import spaces
from recorded import BOX_SPACES, LENGTHS, SPACES, record

from alfish import specs
from alfish.errors import UsageError
from alfish.offline import Arrays, SourceReading, Spaces, Validator
from alfish.offline.episode import Episode, Unreadable

DICT_SPACES = Spaces(spaces.Dict(camera=SPACES.observation, speed=SPACES.observation), SPACES.action)


def validate(episodes, policy="raise", of=SPACES):
    validator = Validator(of, policy)
    kept = [episode for item in episodes for episode in validator.check(item)]
    validator.finish()
    return kept, validator.report


def broken(number=3, continuous=False, **fields):
    """Recorded episodes of which one (8 steps long) has other fields: values, or functions of the old ones."""
    episodes = record(continuous=continuous)
    one = episodes[number]
    changed = {name: value(getattr(one, name)) if callable(value) else value for name, value in fields.items()}
    episodes[number] = one._replace(**changed)
    return episodes


def with_value(index, value):
    def change(values):
        values = values.copy()
        values[index] = value
        return values

    return change


def test_whole_numbers_are_compared_with_where_their_space_starts():
    of = Spaces(SPACES.observation, spaces.Discrete(3, start=-1))
    shifted = [episode._replace(actions=episode.actions - 1) for episode in record()]  # -1 to 1
    assert len(validate(shifted, of=of)[0]) == len(shifted)
    for value in (-2, 2):
        shifted[3] = shifted[3]._replace(actions=with_value(0, value)(shifted[3].actions))
        with pytest.raises(UsageError, match=rf"action is {value}, which is not in Discrete\(3, start=-1\)"):
            validate(shifted, of=of)


def as_dict(episodes):
    return [e._replace(observations={"camera": e.observations, "speed": e.observations.copy()}) for e in episodes]


UNUSABLE = {
    "no rewards": (broken(rewards=None), "it has no rewards"),
    "no observations": (broken(observations={}), "it has no observations"),
    "short rewards": (broken(rewards=lambda r: r[:-1]), "it has 7 rewards but 8 actions"),
    "short actions": (broken(actions=lambda a: a[:-2]), "it has 8 rewards but 6 actions"),
    "short flags": (broken(truncated=lambda t: t[:-1]), "it has 8 rewards but 7 truncated"),
    "long observations": (
        broken(observations=lambda o: np.concatenate([o, o[:1]])),
        "it has 10 observations for 8 actions, not 9",
    ),
    "short observations": (broken(observations=lambda o: o[:5]), "it has 5 observations for 8 actions, not 9"),
    "another nest": (broken(observations=lambda o: {"camera": o}), "its observations are camera, but one array is"),
    "another shape": (broken(observations=lambda o: o[:, :2]), r"observation has shape \[2\] in each step, but \[3\]"),
    "objects": (
        broken(observations=lambda o: o.astype("U8")),
        "observation has dtype <U8, which cannot be converted to float32",
    ),
    "fractions": (broken(actions=lambda a: a + 0.5), "action has dtype float64, but int64 cannot hold its values"),
    "text rewards": (broken(rewards=lambda r: r.astype("U3")), "rewards have dtype <U3"),
    "deep rewards": (broken(rewards=lambda r: r[:, None, None]), r"rewards have shape \[8, 1, 1\]"),
    "two rewards": (broken(rewards=lambda r: np.stack([r, r], 1)), r"rewards have shape \[2\] in each step, but \[\]"),
    "flags of two": (broken(terminated=lambda t: t + 2), "terminated holds 2; each step needs 0 or 1"),
    "half a flag": (broken(truncated=lambda t: t * 0.5), "truncated holds 0.5; each step needs 0 or 1"),
    "wide flags": (
        broken(truncated=lambda t: np.stack([t, t], 1)),
        r"truncated has shape \[8, 2\] and dtype bool; each step needs one value, 0 or 1",
    ),
    "one action": (
        broken(actions=np.int64(1)),
        "actions is one value, but an array with one value for each step is expected",
    ),
    "out of Discrete": (broken(actions=with_value(2, 3)), r"action is 3, which is not in Discrete\(3\)"),
    "below Discrete": (broken(actions=with_value(2, -1)), r"action is -1, which is not in Discrete\(3\)"),
    "unreadable": (
        [*record()[:3], Unreadable("3", "the disk said no"), *record()[4:]],
        "not readable: the disk said no",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_used_is_named_and_left_out(name):
    episodes, words = UNUSABLE[name]
    with pytest.raises(UsageError, match=rf"1 of 11 episodes.*{words}.*\(1 episode: 3\).*drop_episode"):
        validate(episodes)
    for policy in ("drop_episode", "warn"):
        kept, report = validate(episodes, policy)
        assert [episode.id for episode in kept] == [str(k) for k in range(11) if k != 3], policy
        assert report.num_read == 11 and report.num_kept == 10 and report.num_bad == 1, policy


BAD_VALUES = {
    "NaN observation": (broken(observations=with_value((2, 1), np.nan)), "observation is not finite"),
    "infinite reward": (broken(rewards=with_value(2, np.inf)), "reward is not finite"),
    "early end": (broken(terminated=with_value(4, True)), "it ends before its last step"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_errors_by_default(name):
    episodes, words = BAD_VALUES[name]
    with pytest.raises(UsageError, match=rf"{words} \(1 episode: 3\)"):
        validate(episodes)
    kept, _ = validate(episodes, "drop_episode")
    assert "3" not in [episode.id for episode in kept] and len(kept) == 10
    kept, report = validate(episodes, "warn")
    assert len(kept) == (12 if name == "early end" else 11) and report.num_bad == 0
    assert any(what.startswith(words) and ids == ["3"] for what, ids in report.found("warning").items())


def test_the_leaf_that_is_not_finite_is_named():
    episodes = as_dict(broken(observations=with_value((2, 1), np.nan)))
    episodes[3].observations["camera"][:] = 0
    with pytest.raises(UsageError, match=r"observation.speed is not finite \(1 episode: 3\)"):
        validate(episodes, of=DICT_SPACES)


def test_actions_that_are_not_finite_are_found_too():
    with pytest.raises(UsageError, match="action is not finite"):
        validate(broken(continuous=True, actions=with_value((2, 1), np.nan)), of=BOX_SPACES)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_episodes_are_split_at_early_ends_without_final_observation(flag):
    kept, _ = validate(broken(**{flag: with_value(4, True)}), "warn")
    parts = [episode for episode in kept if episode.id.startswith("3[")]
    assert [part.id for part in parts] == ["3[0]", "3[1]"]
    whole = record()[3]
    steps = whole.observations[:, 2].tolist()
    if flag == "terminated":  # the last one stands for it
        assert parts[0].observations[:, 2].tolist() == [*steps[:5], steps[4]]
    else:
        assert parts[0].observations[:, 2].tolist() == steps[:5]
    assert getattr(parts[0], flag).tolist() == [False] * (parts[0].length - 1) + [True]
    assert parts[1].observations[:, 2].tolist() == steps[5:]
    assert parts[1].rewards.tolist() == whole.rewards[5:].tolist()


MENDED = {
    "float64": (
        broken(observations=lambda o: o.astype(np.float64)),
        "observation of dtype float64 is converted to float32",
    ),
    "integer rewards": (
        broken(rewards=lambda r: r.astype(np.int64)),
        "rewards of dtype int64 are converted to float32",
    ),
    "wide rewards": (
        broken(rewards=lambda r: r.astype(np.float64)),
        "rewards of dtype float64 are converted to float32",
    ),
    "whole actions": (broken(actions=lambda a: a.astype(np.float32)), "action of dtype float32 is converted to int64"),
    "column of rewards": (broken(rewards=lambda r: r[:, None]), None),
    "number flags": (broken(terminated=lambda t: t.astype(np.float32)[:, None]), None),
    "both flags": (
        broken(terminated=lambda t: t | (np.arange(8) == 7)),
        "both terminated and truncated; it counts as terminated",
    ),
    "no flag": (broken(truncated=lambda t: t & False), "no flag says how it ends; it counts as truncated"),
}


@pytest.mark.parametrize("name", MENDED)
def test_unambiguous_faults_are_corrected_and_reported(name):
    episodes, words = MENDED[name]
    kept, report = validate(episodes)
    expected = record()
    if name == "both flags":
        expected[3] = expected[3]._replace(terminated=expected[3].truncated, truncated=expected[3].terminated)
    for episode, other in zip(kept, expected, strict=True):
        assert episode.id == other.id
        for mine, theirs in zip(episode[1:], other[1:]):
            assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
    found = report.found("mended")
    assert words is None or any(words in what and ids == ["3"] for what, ids in found.items())


def test_a_missing_final_observation_is_repeated_or_costs_a_step():
    episodes = [episode._replace(observations=episode.observations[:-1]) for episode in record()]
    kept, report = validate(episodes)
    by_id = {episode.id: episode for episode in kept}
    assert by_id["0"].observations[:, 2].tolist() == [0, 1, 2, 2] and by_id["0"].terminated.tolist() == [0, 0, 1]
    assert by_id["1"].observations[:, 2].tolist() == [0, 1, 2, 3, 4] and by_id["1"].truncated.tolist() == [0, 0, 0, 1]
    assert by_id["1"].rewards.tolist() == [1, 2, 3, 4]
    lengths = [LENGTHS[k % 5] - k % 2 for k in range(11)]
    assert [episode.length for episode in kept] == [length for length in lengths if length]
    assert "its last step is dropped (5 episodes: 1, 3, 5, 7, 9)" in report.sentences("mended", 9)
    assert "left out (1 episode: 7)" in report.sentences("mended", 9)  # of one step, which was truncated


def test_an_empty_episode_is_left_out():
    nothing = {name: lambda values: values[:0] for name in ("actions", "rewards", "terminated", "truncated")}
    for observations in (lambda o: o[:0], lambda o: o[:1]):
        kept, report = validate(broken(**nothing, observations=observations))
        assert len(kept) == 10 and report.found("mended") == {"it is empty and left out": ["3"]}


def test_observations_without_any_action_are_an_error():
    nothing = {name: lambda values: values[:0] for name in ("actions", "rewards", "terminated", "truncated")}
    with pytest.raises(UsageError, match=r"it has 7 observations for 0 actions, not 1 \(1 episode: 3\)"):
        validate(broken(**nothing, observations=lambda o: o[:7]))


def test_actions_out_of_bounds_are_errors_beyond_rounding():
    above = np.float32(6) + np.spacing(np.float32(6))
    kept, report = validate(broken(continuous=True, actions=with_value((2, 1), above)), of=BOX_SPACES)
    assert kept[3].actions[2, 1] == 6 and "out of bounds by up to 1e-6: clipped" in report.sentences("mended")
    episodes = broken(continuous=True, actions=with_value((2, 1), 6.1))
    episodes[5].actions[0, 0] = -7
    words = r"action is not in Box.*%s: its values are \[-7, -1.\d+\] to \[1.\d+, 6.1\] \(2 episodes: 3, 5\)"
    with pytest.raises(UsageError, match=words % "float32\\)"):
        validate(episodes, of=BOX_SPACES)
    kept, report = validate(episodes, "warn", BOX_SPACES)
    assert kept[3].actions[2, 1] == 6 and re.search(words % ", and clipped", report.sentences("warning"))
    assert re.search(words % ", and clipped", str(report))
    assert any("and clipped: its values are" in found["what"] for found in report.as_dict()["found"])


@pytest.mark.parametrize("number_good", [0, 1, 2])
def test_dropping_episodes_is_not_suggested_where_hardly_one_is_left(number_good):
    episodes = [e._replace(observations=e.observations[:, :2]) for e in record()]
    episodes[:number_good] = record()[:number_good]
    with pytest.raises(UsageError, match="of 11 episodes") as error:
        validate(episodes)
    assert ("drop_episode" in str(error.value)) == (number_good == 2)
    assert ("give the environment" in str(error.value)) == (number_good < 2)
    if not number_good:
        with pytest.raises(UsageError, match="has no usable episode.*give the environment"):
            validate(episodes, "drop_episode")


def test_an_environment_that_was_named_is_not_asked_for():
    episodes = [e._replace(observations=e.observations[:, :2]) for e in record()]
    for policy in ("raise", "drop_episode"):
        with pytest.raises(UsageError, match="do not fit the given environment: give the one") as error:
            list(SourceReading([Arrays(episodes)], SPACES, policy=policy))
        assert "--env_id" not in str(error.value)


def test_unreadable_data_are_not_blamed_on_the_environment():
    lost = [Unreadable(str(k), "the disk said no") for k in range(11)]
    with pytest.raises(UsageError, match="fix the data, or leave these episodes out"):
        validate(lost)
    with pytest.raises(UsageError, match="the disk said no .*; write or download them again$"):
        validate(lost, "drop_episode")


def test_rewards_are_compared_with_the_environments():
    vectors = [e._replace(rewards=np.stack([e.rewards, e.rewards], 1)) for e in record()]
    words = "the rewards of arrays have 2 entries, but the environment's rewards are scalars; give the environment"
    with pytest.raises(UsageError, match=words):
        list(SourceReading([Arrays(vectors)], SPACES, specs.reward_spec()))
    with pytest.raises(UsageError, match="are scalars, but the environment's rewards have 2 entries"):
        list(SourceReading([Arrays(record())], SPACES, specs.reward_spec(2)))
    assert len(list(SourceReading([Arrays(vectors)], SPACES, specs.reward_spec(2)))) == 11


def warnings_of(episodes, of=SPACES):
    return validate(episodes, of=of)[1].sentences("warning", 9)


def test_a_good_data_set_has_an_empty_report():
    _, report = validate(record())
    assert [report.found(level) for level in ("error", "mended", "warning")] == [{}, {}, {}]


def test_actions_at_a_bound_are_counted():
    episodes = broken(continuous=True, actions=with_value((slice(0, 3), 0), -2))
    assert "3 of 82 entries of actions are exactly at a bound" in warnings_of(episodes, BOX_SPACES)
    assert warnings_of(record(continuous=True), BOX_SPACES) == ""


def test_leaves_that_never_change_are_reported():
    episodes = record(continuous=True)
    for episode in episodes:
        episode.actions[:, 1] = 0.5
        episode.rewards[:] = 0
    said = warnings_of(episodes, BOX_SPACES)
    assert "action never changes in its entries 1" in said and "all rewards are 0" in said
    assert "action never changes" in warnings_of([e._replace(actions=e.actions * 0 + 1) for e in record()])


def test_observations_out_of_bounds_are_reported():
    episodes = record()
    most = max(episode.observations.max() for episode in episodes)
    bounded = Spaces(spaces.Box(-1e3, most, (3,), np.float32), SPACES.action)
    assert "out of the bounds" not in warnings_of(episodes, bounded)
    bounded = Spaces(spaces.Box(-1e3, most - 10, (3,), np.float32), SPACES.action)
    assert "observation has values out of the bounds of its space in 11 of 11 " in warnings_of(episodes, bounded)


def test_rounding_errors_of_observations_are_not_reported():
    episodes = record()
    most = np.float32(max(episode.observations.max() for episode in episodes))
    bounded = Spaces(spaces.Box(-1e3, np.nextafter(most, np.float32(0)), (3,), np.float32), SPACES.action)
    assert "out of the bounds" not in warnings_of(episodes, bounded)


def test_episodes_of_one_step_each_are_reported():
    ends = np.array([True])
    episodes = [
        Episode(one.id, one.observations[:2], one.actions[:1], one.rewards[:1], ends, ~ends) for one in record()
    ]
    assert "each episode has a single step; are the flags of terminations inverted?" in warnings_of(episodes)
    assert "single step" not in warnings_of([*episodes, *record()])


def test_episodes_that_begin_alike_are_counted():
    episodes = record()
    for k in (2, 4, 5):
        episodes[k].observations[0] = episodes[0].observations[0]
    assert "4 of 11 episodes begin with the same observation as another episode" in warnings_of(episodes)


def test_nothing_left_is_an_error_under_every_policy():
    for policy in ("raise", "drop_episode", "warn"):
        with pytest.raises(UsageError):
            validate([record()[3]._replace(rewards=None)], policy)
    with pytest.raises(UsageError, match="no usable episode: there is none"):
        validate([])


def test_without_spaces_the_first_episode_defines_the_form():
    kept, _ = validate(record(), of=Spaces())
    assert len(kept) == 11
    with pytest.raises(UsageError, match=r"observation has shape \[2\] in each step, but \[3\] is expected"):
        validate(UNUSABLE["another shape"][0], of=Spaces())


def test_spaces_that_cannot_be_learned_from_are_refused():
    text = Spaces(spaces.Text(5), SPACES.action)
    with pytest.raises(UsageError, match="observation is a Text space"):
        Validator(text)
    with pytest.raises(UsageError, match="arrays: observation is a Text space"):
        SourceReading([Arrays([], text)])


def test_the_report_counts_what_was_kept():
    kept, report = validate(broken(rewards=None), "drop_episode")
    lengths = [LENGTHS[k % 5] for k in range(11) if k != 3]
    assert report.num_transitions == sum(lengths) == sum(episode.length for episode in kept)
    assert (report.num_terminated, report.num_truncated) == (6, 4)
    about = report.as_dict()
    assert about["lengths"] == {"min": 1, "max": 8, "mean": np.mean(lengths)}
    assert about["returns"]["max"] == 36 and about["ranges"]["reward"] == [1, 8]
    assert about["ranges"]["observation"][1][1:] == [10, 8]
    assert about["found"][0] == {"level": "error", "what": "it has no rewards", "episodes": ["3"]}
    page = str(report)
    assert "11 episodes read, 10 kept" in page and "length      1 to 8" in page and "####" in page
