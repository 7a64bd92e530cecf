"""Scalars from infos, in the format of gymnasium's vector environments."""

import math
import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from alfish.data import StepType
from alfish.errors import UsageError
from alfish.metrics import EnvInfo, Metrics, StepBatch
from alfish.metrics.env_info import EpisodeInfos

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD


class Counting(gymnasium.Env):
    """Episodes of `length` steps whose info tells the episode and the step; environments differ in what they report."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, env_id, length):
        self._env_id, self._length, self._episode = env_id, length, -1

    def _info(self):
        info = {
            "step": self._step if self._env_id == 0 else self._step + 0.25,  # gymnasium makes integers of both
            "nested": {"deep": {"episode": float(self._episode), "map": np.zeros((2, 2))}},
            "mode": "easy",
            "nothing": None,
            "thing": object(),
            "one": np.array([self._step], np.float32),
        }
        if self._env_id == 1:
            info["rare"] = 100.0 + self._step
        if self._step == self._length:
            info["success"] = self._episode % 2 == 0
        return info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return 0, self._info()

    def step(self, action):
        self._step += 1
        return self._step, 1.0, self._step == self._length, False, self._info()


def roll(mode, metrics, num_steps, lengths=(3, 5)):
    """Feeds `metrics` the stream of a vector environment, the LAST rows of SAME_STEP inserted as a row of their own."""
    env = SyncVectorEnv([lambda i=i, n=n: Counting(i, n) for i, n in enumerate(lengths)], autoreset_mode=mode)
    _, info = env.reset(seed=0)
    metrics.update(np.full((1, len(lengths)), FIRST), np.zeros((1, len(lengths))), [(0, info)])
    done = np.zeros(len(lengths), bool)
    for _ in range(num_steps):
        _, reward, terminated, truncated, info = env.step(np.zeros(len(lengths), int))
        reset, done = done, terminated | truncated
        if mode == AutoresetMode.NEXT_STEP:
            step_type = np.where(done, LAST, np.where(reset, FIRST, MID))[None]
            reward = reward[None]
        else:
            step_type = np.where(done, LAST, MID)[None]
            reward = reward[None]
            if done.any():
                step_type = np.concatenate([step_type, np.where(done, FIRST, PAD)[None]])
                reward = np.concatenate([reward, np.zeros_like(reward)])
            done = np.zeros_like(done)
        metrics.update(step_type, reward, [(t, info) for t in range(len(step_type))])
    env.close()
    return metrics.results()


def fed(metric, step_type, infos, num_updates=1):
    """Results of one `EnvInfo` over a stream `[T, B]` with an info a row."""
    step_type = np.array(step_type, np.int32)
    metrics = Metrics([metric], step_type.shape[1], flush_rows=1)
    for rows in np.array_split(np.arange(len(step_type)), num_updates):
        infos_here = [(i, infos[t]) for i, t in enumerate(rows)]
        metrics.update(step_type[rows], np.zeros((len(rows), step_type.shape[1])), infos_here)
    return metrics.results()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_end_of_episode_is_read_the_same_in_both_reset_modes(mode):
    # NEXT_STEP spends 4 and 6 vector steps on an episode, SAME_STEP 3 and 5: here 3 and 2 episodes end in either.
    results = roll(mode, Metrics([EnvInfo()], 2), 11 if mode == AutoresetMode.NEXT_STEP else 10)
    assert results == {
        "env_info/nested.deep.episode": (0 + 1 + 2 + 0 + 1) / 5,
        "env_info/nested.deep.episode/n": 5,
        "env_info/one": (3 * 3 + 2 * 5) / 5,
        "env_info/one/n": 5,
        "env_info/rare": 105,
        "env_info/rare/n": 2,
        "env_info/step": pytest.approx((3 * 3 + 2 * 5) / 5, abs=0.11),
        "env_info/step/n": 5,
        "env_info/success": 3 / 5,
        "env_info/success/n": 5,
    }


def test_every_step_is_read_but_never_the_reset():
    results = roll(AutoresetMode.NEXT_STEP, Metrics([EnvInfo(include=["rare"], when="step")], 2), 7)
    assert results == {"env_info/rare": pytest.approx((101 + 102 + 103 + 104 + 105 + 101) / 6), "env_info/rare/n": 6}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_sums_include_the_last_step_of_an_episode(mode):
    results = roll(mode, Metrics([EnvInfo(include=["one"], when="sum")], 2), 5)
    assert results == {"env_info/one": (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) / 2, "env_info/one/n": 2}


@pytest.mark.parametrize(("when", "value", "n"), [("episode_end", 8, 1), ("step", 5, 3), ("sum", 13, 1)])
def test_an_absent_key_is_not_zero(when, value, n):
    step_type = [[FIRST, FIRST], [MID, MID], [MID, MID], [LAST, LAST]]
    x = np.array([[9, 9], [5, 0], [0, 0], [8, 2]], float)  # the second column reports its reset and nothing else
    present = np.array([[1, 1], [1, 0], [0, 0], [1, 0]], bool)
    infos = [{"x": x[t], "_x": present[t]} for t in range(4)]
    if when == "step":
        infos[2] = {"x": np.array([2.0, 0.0]), "_x": np.array([True, False])}
    assert fed(EnvInfo(when=when), step_type, infos) == {"env_info/x": value, "env_info/x/n": n}


def test_masks_of_nested_dicts_hold_at_both_levels():
    inner = {"x": np.array([1.0, 2.0, 4.0]), "_x": np.array([True, True, False])}
    info = {"a": {"b": inner}, "_a": np.array([True, False, True])}
    assert fed(EnvInfo(), [[FIRST] * 3, [LAST] * 3], [{}, info]) == {"env_info/a.b.x": 1, "env_info/a.b.x/n": 1}


def test_numeric_keys_work_and_masks_are_not_metrics():
    info = {3: np.array([1.0, 5.0]), "_3": np.array([False, True]), "_alone": np.array([2.0, 4.0])}
    results = fed(EnvInfo(), [[FIRST] * 2, [LAST] * 2], [{}, info])
    assert results == {"env_info/3": 5, "env_info/3/n": 1, "env_info/_alone": 3, "env_info/_alone/n": 2}


def test_infos_without_masks_are_of_all_environments():
    info = {"x": np.array([1.0, 3.0]), "nested": {"y": np.array([[True], [False]])}}
    results = fed(EnvInfo(), [[FIRST] * 2, [LAST] * 2], [{}, info])
    assert (results["env_info/x"], results["env_info/nested.y"], results["env_info/x/n"]) == (2, 0.5, 2)


def test_values_that_are_not_numbers_never_raise():
    info = {
        "text": np.array(["a", "b"]),
        "objects": np.array([object(), {"x": 1}], object),
        "nones": np.array([None, None], object),
        "image": np.zeros((2, 4, 4), np.uint8),
        "pair": np.zeros((2, 2)),
        "empty": np.zeros((2, 0)),
        "complex": np.zeros(2, complex),
        "complex_tensor": torch.zeros(2, dtype=torch.complex64),
        "time": np.zeros(2, "datetime64[s]"),
        "scalar": 3.0,
        "zero_d": np.float32(3.0),
        "none": None,
        "string": "text",
        "list": [1.0, 2.0],
        "_mask_of_nothing": np.array([1.0, 2.0]),
        7: np.array([1.0, 2.0]),
        "odd": np.array([3.0, 5.0]),
        "_odd": "no mask at all",
        "huge": np.array([10**400, 1], object),
    }
    for when in ("episode_end", "step", "sum"):
        results = fed(EnvInfo(when=when), [[FIRST] * 2, [LAST] * 2], [info, info])
        assert results == {
            "env_info/7": 1.5,
            "env_info/7/n": 2,
            "env_info/_mask_of_nothing": 1.5,
            "env_info/_mask_of_nothing/n": 2,
            "env_info/huge": 1,
            "env_info/huge/n": 1,
            "env_info/odd": 4,
            "env_info/odd/n": 2,
        }


def test_numbers_in_object_arrays_and_tensors_are_read():
    objects = np.full(6, None, object)
    objects[0], objects[1], objects[2], objects[3] = 1, np.float32(2), np.array([3.0]), torch.tensor(4.0)
    objects[4], objects[5] = "text", np.zeros(2)
    info = {"objects": objects, "tensor": torch.arange(6), "brain": torch.ones(6, 1, dtype=torch.bfloat16)}
    results = fed(EnvInfo(), [[FIRST] * 6, [LAST] * 6], [{}, info])
    assert (results["env_info/objects"], results["env_info/objects/n"]) == (2.5, 4)
    assert (results["env_info/tensor"], results["env_info/brain"]) == (2.5, 1)


def test_globs_choose_flattened_names():
    info = {"a": {"x": np.ones(1), "y": np.ones(1)}, "b": np.ones(1), "a.c": np.ones(1)}
    results = fed(EnvInfo(include=("a.*",), exclude=["*.y"]), [[FIRST], [LAST]], [{}, info])
    assert sorted(results) == ["env_info/a.c", "env_info/a.c/n", "env_info/a.x", "env_info/a.x/n"]


def test_headless_episodes_enter_steps_only():
    infos = [{"x": np.array([1.0])}, {"x": np.array([3.0])}]
    assert fed(EnvInfo(), [[MID], [LAST]], infos) == {}
    assert fed(EnvInfo(when="sum"), [[MID], [LAST]], infos) == {}
    assert fed(EnvInfo(when="step"), [[MID], [LAST]], infos) == {"env_info/x": 2, "env_info/x/n": 2}


def test_non_finite_values_are_counted():
    infos = [{}, {"x": np.array([np.nan, 2.0])}]
    for when in ("episode_end", "step", "sum"):
        results = fed(EnvInfo(when=when), [[FIRST] * 2, [LAST] * 2], infos)
        assert results == {"env_info/x": 2, "env_info/x/n": 1, "env_info/x/nonfinite": 1}


def test_the_observation_in_a_final_info_is_not_a_scalar():
    final = {"x": np.array([1.0]), "final_obs": np.array([5.0])}
    info = {
        "final_info": final,
        "_final_info": np.array([True]),
        "final_obs": np.array([7], object),
        "x": np.array([9.0]),
    }
    assert fed(EnvInfo(), [[FIRST], [LAST]], [{}, info]) == {"env_info/x": 1, "env_info/x/n": 1}
    metric = EnvInfo()  # and without the container, which does not even keep observations
    metric.update(StepBatch(np.array([[FIRST], [LAST]]), np.zeros((2, 1)), [(1, info)]))
    assert metric.result() == {"env_info/x": 1, "env_info/x/n": 1}


def test_an_end_without_a_final_info_is_read_outside():
    info = {
        "final_info": {"x": np.array([1.0, 0.0])},
        "_final_info": np.array([True, False]),
        "x": np.array([50.0, 3.0]),
    }
    assert fed(EnvInfo(), [[FIRST] * 2, [LAST] * 2], [{}, info]) == {"env_info/x": 2, "env_info/x/n": 2}


@pytest.mark.parametrize("when", ["episode_end", "step", "sum"])
@pytest.mark.parametrize("seed", range(2))
def test_results_equal_a_plain_loop_over_steps(seed, when):
    rng = np.random.default_rng(seed)
    step_type = rng.choice([FIRST, MID, LAST, PAD], (120, 4), p=[0.12, 0.6, 0.13, 0.15])
    infos = []
    for _ in range(120):
        final = {"x": rng.normal(size=4), "_x": rng.random(4) < 0.8}
        info = {"x": rng.normal(size=4), "_x": rng.random(4) < 0.6}
        infos.append(info | {"final_info": final, "_final_info": rng.random(4) < 0.5} if rng.random() < 0.5 else info)
    values, running = [], [None] * 4
    for t, info in enumerate(infos):
        for b in range(4):
            kind = step_type[t, b]
            source = info["final_info"] if kind == LAST and "final_info" in info and info["_final_info"][b] else info
            reported = source["x"][b] if source["_x"][b] else None
            if kind == FIRST:
                running[b] = []
            if kind not in (MID, LAST):
                continue
            if when == "step" and reported is not None:
                values.append(reported)
            if running[b] is not None and reported is not None:
                running[b].append(reported)
                if when == "episode_end" and kind == LAST:
                    values.append(reported)
            if kind == LAST:
                if when == "sum" and running[b]:
                    values.append(sum(running[b]))
                running[b] = None
    values = values[-10:]
    expected = {"env_info/x": math.fsum(values) / len(values), "env_info/x/n": len(values)}
    for num_updates in (1, 17, 120):
        results = fed(EnvInfo(when=when, window=10), step_type, infos, num_updates)
        assert results == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_mistakes_in_settings_are_refused():
    with pytest.raises(UsageError, match="one of 'episode_end', 'step', 'sum'"):
        EnvInfo(when="always")
    with pytest.raises(UsageError, match="success"):
        EnvInfo(include="success")


@pytest.mark.parametrize(
    "include, when, words",
    [
        (["succes", "step"], "episode_end", "EnvInfo.include has 'succes', which .* ends of episodes has .*success"),
        (["success"], "episode_end", None),
        (["mode"], "step", "EnvInfo.include has 'mode', which matches no number .* in steps has "),
        (["*"], "step", None),
    ],
)
def test_a_name_that_no_number_has_is_reported_once(include, when, words, caplog):
    roll(AutoresetMode.SAME_STEP, Metrics([EnvInfo(include=include, when=when)], 2), 80)
    assert len(caplog.records) == (words is not None)
    assert words is None or re.search(words, caplog.text)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episode_infos_belong_to_the_last_step_of_each_episode(mode):
    env = SyncVectorEnv([lambda i=i, n=n: Counting(i, n) for i, n in enumerate((3, 5))], autoreset_mode=mode)
    env.reset(seed=0)
    infos, episode = EpisodeInfos(["success", "nested.*", "rare", "mode", "zzz", "*"], 4), np.array([2, 0])
    others = EpisodeInfos(["zzz", "*z?", "success", "rare"], 4)
    for _ in range(5):
        _, _, terminated, _, info = env.step(np.zeros(2, int))
        first_end = terminated & (episode >= 0)
        infos.add(info, episode, first_end)
        others.add(info, episode, first_end)
        episode = np.where(first_end, -1, episode)
    env.close()
    assert infos.values["one"].tolist()[::2] == [5, 3] and np.isnan(infos.values["one"][1::2]).all()
    assert infos.values["success"].tolist()[::2] == [1, 1] and infos.values["nested.deep.episode"][0] == 0
    assert infos.values["rare"][0] == 105 and np.isnan(infos.values["rare"][2])
    assert infos.unmatched() == ["mode", "zzz"]  # a text is no number
    assert others.values.keys() == {"success", "rare"} and others.unmatched() == ["zzz", "*z?"]


def test_episode_infos_leave_out_numbers_that_are_not_finite():
    infos = EpisodeInfos(["*"], 2)
    infos.add({"x": np.array([math.inf, 2.0])}, np.array([1, 0]), np.array([True, True]))
    assert infos.values["x"][0] == 2 and math.isnan(infos.values["x"][1])
