"""Stable-Baselines3's pickles: written by itself where it is installed, and by classes of the same names and fields."""

import codecs
import io
import itertools
import os
import pickle
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from gymnasium import spaces
from recorded import BOX_SPACES, SPACES, assert_rows, record, unstretched, without_final

from alfish.errors import UsageError
from alfish.offline import OfflineBuffer, Spaces, open_source, pickles

MODULE = "stable_baselines3.common.buffers"


@pytest.fixture
def buffer_class(monkeypatch):
    """A class that pickles as Stable-Baselines3's does."""
    module = types.ModuleType(MODULE)
    module.ReplayBuffer = type("ReplayBuffer", (), {"__module__": MODULE})
    for name in ("stable_baselines3", "stable_baselines3.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module.ReplayBuffer


def scaled(actions, space):
    """Box actions as SAC and TD3 store them."""
    if not isinstance(space, spaces.Box):
        return actions[:, None]
    return (2 * (actions - space.low) / (space.high - space.low) - 1).astype(np.float32)


def transitions(episodes):
    for episode in episodes:
        yield from zip(
            episode.observations, episode.observations[1:], episode.actions, episode.rewards, episode.terminated,
            episode.truncated,
        )  # fmt: skip


def filled(make, columns, length, of=SPACES, count=None, **fields):
    """A buffer of `length` rows, after columns of episodes were written into it as `add` does."""
    size, buffer = len(columns), make()
    shape = (length, size)
    buffer.__dict__ |= {
        "buffer_size": length, "observation_space": of.observation, "action_space": of.action, "n_envs": size,
        "device": torch.device("cpu"), "optimize_memory_usage": False, "handle_timeout_termination": True,
        "observations": np.zeros((*shape, 3), np.float32), "next_observations": np.zeros((*shape, 3), np.float32),
        "actions": np.zeros((*shape, *(of.action.shape or (1,))), of.action.dtype),
        "rewards": np.zeros(shape, np.float32), "dones": np.zeros(shape, np.float32),
        "timeouts": np.zeros(shape, np.float32),
    }  # fmt: skip
    count = count or min(sum(episode.length for episode in column) for column in columns)
    for env, column in enumerate(columns):
        for i, (here, after, action, reward, terminated, truncated) in zip(range(count), transitions(column)):
            at = i % length
            buffer.observations[at, env], buffer.next_observations[at, env] = here, after
            buffer.actions[at, env] = scaled(action[None], of.action)[0]
            buffer.rewards[at, env], buffer.dones[at, env] = reward, terminated or truncated
            buffer.timeouts[at, env] = truncated
    buffer.pos, buffer.full = count % length, count >= length
    buffer.__dict__ |= fields
    return buffer


def saved(path, buffer, protocol=pickle.HIGHEST_PROTOCOL):
    path.write_bytes(pickle.dumps(buffer, protocol))
    return f"sb3:{path}"


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("continuous", [False, True])
def test_every_row_is_right_and_actions_are_unscaled(tmp_path, buffer_class, continuous, protocol):
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    of.action.sample(), of.observation.sample()  # their generators are pickled too
    episodes = record(continuous=continuous)
    name = saved(tmp_path / "b.pkl", filled(buffer_class, [episodes], 60, of), protocol)
    sys.modules.pop(MODULE)  # not needed to read
    buffer = OfflineBuffer([name])
    assert buffer.spaces == of
    assert_rows(buffer, episodes, canonical)


def test_ring_columns_are_exported_oldest_first_with_truncated_ends(tmp_path, buffer_class):
    episodes = record()  # 3, 5, 1, 8, 2, 3, 5, 1, 8, 2, 3 steps
    columns = [episodes[:6], episodes[6:]]
    buffer = OfflineBuffer([saved(tmp_path / "b.pkl", filled(buffer_class, columns, 14, count=18))])
    # Steps 4 to 17 are left. Of column 0, four of episode 1, then 2 and 3, and one of 4. Of column 1, one of 6, then 7,
    # 8, 9, and two of 10.
    expected = [
        part(episodes[1], 1, 5), *episodes[2:4], part(episodes[4], 0, 1),
        part(episodes[6], 4, 5), *episodes[7:10], part(episodes[10], 0, 2),
    ]  # fmt: skip
    assert_rows(buffer, expected)


def part(episode, start, stop):
    """Steps of an episode, truncated where it does not end."""
    steps = slice(start, stop)
    truncated = episode.truncated[steps].copy()
    truncated[-1] |= not episode.terminated[steps][-1]
    return episode._replace(
        observations=episode.observations[start : stop + 1], actions=episode.actions[steps],
        rewards=episode.rewards[steps], terminated=episode.terminated[steps], truncated=truncated,
    )  # fmt: skip


def test_an_interrupted_column_ends_with_its_true_observation(tmp_path, buffer_class):
    buffer = filled(buffer_class, [record()], 60)
    buffer.dones[:], buffer.timeouts[:] = 0, 0
    read = OfflineBuffer([saved(tmp_path / "b.pkl", buffer)])
    never = np.zeros(99, bool)
    assert_rows(
        read, [e._replace(terminated=never[: e.length], truncated=e.terminated | e.truncated) for e in record()]
    )
    assert "column 0 has 10 episodes that end without a flag" in read.report.sentences("note")


@pytest.mark.parametrize("continuous", [False, True])
def test_an_empty_buffer_is_reported(tmp_path, buffer_class, continuous):
    buffer = filled(buffer_class, [record(continuous)], 60, BOX_SPACES if continuous else SPACES, pos=0, full=False)
    with pytest.raises(UsageError, match="has no usable episode"):
        OfflineBuffer([saved(tmp_path / "b.pkl", buffer)])


@pytest.mark.parametrize("fields", [{"handle_timeout_termination": False}, {"timeouts": None}])
def test_ends_without_a_time_out_flag_are_truncated_and_reported(tmp_path, buffer_class, fields):
    buffer = OfflineBuffer([saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60, **fields))])
    never = np.zeros(99, bool)
    assert_rows(
        buffer, [e._replace(terminated=never[: e.length], truncated=e.terminated | e.truncated) for e in record()]
    )
    words = buffer.report.sentences("warning")
    assert "do not say whether an episode terminated or timed out: all count as" in words
    assert f"write sb3:{tmp_path}/b.pkl?dones=terminated" in words


def test_the_user_must_specify_the_meaning_of_dones(tmp_path, buffer_class):
    """CleanRL's scripts store terminations as dones; an episode that timed out breaks off."""
    buffer = filled(buffer_class, [record()], 60, handle_timeout_termination=False)
    name, dones = saved(tmp_path / "b.pkl", buffer), buffer.dones.copy()
    truncated = OfflineBuffer([f"{name}?dones=truncated"])
    never = np.zeros(99, bool)
    assert_rows(
        truncated, [e._replace(terminated=never[: e.length], truncated=e.terminated | e.truncated) for e in record()]
    )
    everything = OfflineBuffer([f"{name}?dones=terminated"])
    assert_rows(
        everything, [e._replace(terminated=e.terminated | e.truncated, truncated=never[: e.length]) for e in record()]
    )
    buffer.dones = dones * (1 - buffer.timeouts)
    saved(tmp_path / "b.pkl", buffer)
    of_cleanrl = OfflineBuffer([f"{name}?dones=terminated"])
    assert_rows(of_cleanrl, record())
    for read in (truncated, everything, of_cleanrl):
        assert "dones" not in read.report.sentences("warning", 9)


def test_a_model_file_instead_of_a_replay_buffer_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("policy.pth", b"weights")
    with pytest.raises(UsageError, match="is a zip file, as `model.save` writes; the replay buffer is in"):
        open_source(f"sb3:{tmp_path}/model.zip")


def test_resets_that_leave_no_trace_are_reported(tmp_path, buffer_class):
    fields = {"handle_timeout_termination": False, "next_observations": None}
    name = saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60, **fields))
    report = OfflineBuffer([f"{name}?dones=terminated"]).report
    assert "no time-outs were recorded: transitions across resets are trained on" in report.sentences("warning", 9)


def test_a_buffer_with_time_outs_refuses_the_option(tmp_path, buffer_class):
    name = saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60))
    with pytest.raises(UsageError, match="records which episodes timed out; leave out the option dones=terminated"):
        open_source(f"{name}?dones=terminated")


def test_without_next_observations_no_final_one_is_invented(tmp_path, buffer_class):
    buffer = filled(buffer_class, [record()], 60, next_observations=None)
    read = OfflineBuffer([saved(tmp_path / "b.pkl", buffer)])
    assert_rows(read, without_final(record()))
    assert "optimize_memory_usage" in read.report.sentences("note")


def test_the_row_that_optimize_memory_usage_has_overwritten_is_left_out(tmp_path, buffer_class):
    """`add` puts the next observation where the oldest one is."""
    buffer = filled(buffer_class, [record()], 14, count=18, next_observations=None)
    buffer.observations[buffer.pos] = 99
    read = OfflineBuffer([saved(tmp_path / "b.pkl", buffer)])
    # Steps 5 to 17: three of episode 1, then 2 and 3, and one of 4, which is under way: given up.
    expected = [part(record()[1], 2, 5), *record()[2:4]]
    assert_rows(read, without_final(expected))


# Written by Stable-Baselines3 itself.


def test_a_buffer_that_stable_baselines3_wrote(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3.common.buffers", reason="Stable-Baselines3 is not installed")
    from stable_baselines3.common.save_util import save_to_pkl

    episodes = record(continuous=True)
    buffer = sb3.ReplayBuffer(60, *BOX_SPACES, handle_timeout_termination=True)
    for here, after, action, reward, terminated, truncated in transitions(episodes):
        stored = scaled(action[None], BOX_SPACES.action)
        done, info = np.array([terminated or truncated]), {"TimeLimit.truncated": bool(truncated)}
        buffer.add(here[None], after[None], stored, np.array([reward]), done, [info])
    save_to_pkl(tmp_path / "b.pkl", buffer)
    assert_rows(OfflineBuffer([f"sb3:{tmp_path}/b.pkl"]), episodes, unstretched)


@pytest.mark.parametrize("optimize", [False, True])
def test_a_model_that_stable_baselines3_trained(tmp_path, optimize):
    """Actions of a space that is not [-1, 1], in two environments, in a ring that has wrapped."""
    sb3 = pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    import gymnasium
    from stable_baselines3.common.env_util import make_vec_env

    executed = []

    class Stretched(gymnasium.Wrapper):
        action_space = BOX_SPACES.action

        def step(self, action):
            observation, reward, terminated, truncated, _ = self.env.step(0)
            executed.append((*observation, *action))
            return observation, reward, terminated, truncated, {}

    from toys import Stamped

    env = make_vec_env(lambda: Stretched(Stamped(truncates=True)), 2, seed=1)
    options = {"optimize_memory_usage": optimize, "replay_buffer_kwargs": {"handle_timeout_termination": not optimize}}
    model = sb3.SAC("MlpPolicy", env, buffer_size=80, learning_starts=10, policy_kwargs={"net_arch": [4]}, **options)
    model.learn(150)
    model.save_replay_buffer(tmp_path / "b.pkl")
    source = open_source(f"sb3:{tmp_path}/b.pkl")
    assert source.spaces == Spaces(BOX_SPACES.observation, BOX_SPACES.action)
    known = {row[:3]: row[3:] for row in executed}
    episodes = list(source.episodes())
    num_steps = 0
    for episode in episodes:
        stamps = episode.observations[:-1]
        assert (np.diff(stamps[:, 2]) == 1).all() and (stamps[:, :2] == episode.observations[0, :2]).all()
        assert episode.rewards.tolist() == (stamps[:, 2] + 1).tolist()
        if not optimize:  # else there is no final observation
            assert episode.observations[-1].tolist() == (stamps[-1] + [0, 0, 1]).tolist()
        for stamp, action in zip(stamps, episode.actions):
            np.testing.assert_allclose(action, known[tuple(stamp + [0, 0, 1])], atol=1e-5)
        num_steps += episode.length
    # Without the oldest row of each environment, whose place is taken, and the last step of each episode.
    assert num_steps == (78 - len(episodes) if optimize else 80)


def test_a_dict_buffer_that_stable_baselines3_wrote(tmp_path):
    sb3 = pytest.importorskip("stable_baselines3.common.buffers", reason="Stable-Baselines3 is not installed")
    from stable_baselines3.common.save_util import save_to_pkl

    space = spaces.Dict(stamp=SPACES.observation, digit=spaces.Discrete(4, start=1))
    buffer = sb3.DictReplayBuffer(60, space, spaces.MultiDiscrete([3, 2]))
    for here, after, action, reward, terminated, truncated in transitions(record()):
        one, other = ({"stamp": stamp[None], "digit": np.array([[1 + stamp[2] % 4]])} for stamp in (here, after))
        info = {"TimeLimit.truncated": bool(truncated)}
        buffer.add(one, other, np.array([[action, 1]]), np.array([reward]), np.array([terminated or truncated]), [info])
    save_to_pkl(tmp_path / "b.pkl", buffer)
    read = OfflineBuffer([f"sb3:{tmp_path}/b.pkl"])
    assert read.num_starts() == sum(episode.length for episode in record())
    seen = read.sample(100, 2).experience.time_step.observation
    assert (seen["digit"] == seen["stamp"][..., 2] % 4).all()


# Files that are something else.


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "function, arguments, named",
    [
        (os.mkdir, ("executed",), r"\w+\.mkdir"),
        (eval, ("__import__('os').mkdir('executed')",), "builtins.eval"),
        (exec, ("import os; os.mkdir('executed')",), "builtins.exec"),
        (getattr, ("text", "join"), "builtins.getattr"),
        (np.load, ("x",), r"numpy\.\S*load"),
        (np.memmap, ("executed", "u1", "w+", 0, (3,)), r"numpy\.\S*memmap"),
        (torch.load, ("x",), r"torch\.\S*load"),
        (__import__, ("os",), "builtins.__import__"),
    ],
)
def test_what_a_pickle_calls_is_named_and_not_executed(tmp_path, monkeypatch, buffer_class, function, arguments, named):
    monkeypatch.chdir(tmp_path)
    name = saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60, extra=Call(function, *arguments)))
    with pytest.raises(UsageError, match=rf"b.pkl is refused: it tries to load {named}.*nothing in it was executed"):
        open_source(name)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_cannot_change_allowed_objects():
    """BUILD would set attributes of a function or a class that a name stands for."""
    for name in ("numpy._core.numeric\n_frombuffer", "collections\nOrderedDict", "numpy\ndtype", "module\nName"):
        program = b"\x80\x04c" + name.encode() + b"\n}\x8c\x0c__defaults__\x8c\x01xsb."
        with pytest.raises(pickles.PickleError, match="changes something that is not a data object"):
            pickles.read(io.BytesIO(program), ("module.Name",))


def test_names_are_compared_whole():
    for program in (b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.", b"cnumpy\nload\n."):
        with pytest.raises(pickles.RefusedError):
            pickles.read(io.BytesIO(program))


def test_arrays_of_objects_hold_only_what_was_read_here(tmp_path):
    infos = np.array([{"a": 1}, {"b": np.float64(2)}], object)
    assert pickles.read(io.BytesIO(pickle.dumps(infos)))[1] == {"b": 2.0}


class Pickled:
    """Pickles as a call, and then a change of what it returned."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = function, arguments, state

    def __reduce__(self):
        return self.reduced


def array(content, code="f4", shape=(2, 3), dtype_state=(3, "<", None, None, None, -1, -1, 0)):
    """An array of a forged dtype, as numpy pickles it."""
    dtype = Pickled(np.dtype, code, False, True, state=dtype_state)
    reconstruct = np.zeros(1).__reduce__()[0]
    return Pickled(reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, content))


def test_arrays_are_made_once_the_file_was_read_and_of_bytes_that_fit():
    whole = pickles.read(io.BytesIO(pickle.dumps(array(np.arange(6, dtype="<f4").tobytes()))))
    assert whole.tolist() == [[0, 1, 2], [3, 4, 5]]
    for big, fortran in itertools.product(("<", ">"), (False, True)):
        values = np.asarray(np.arange(6).reshape(2, 3), f"{big}i4", order="F" if fortran else "C")
        for protocol in (2, 5):
            one, other = pickles.read(io.BytesIO(pickle.dumps((values, values), protocol)))
            assert one is other and (one == values).all()
    assert pickles.read(io.BytesIO(pickle.dumps(np.zeros((0, 3))))).shape == (0, 3)


def kept(order, axes):
    """An array as numpy 2 pickles one that lies transposed in memory."""
    from_buffer = np.zeros(1).__reduce_ex__(5)[0]
    return Pickled(from_buffer, np.arange(24, dtype="<f4").tobytes(), np.dtype("f4"), (2, 3, 4), order, axes)


def test_arrays_that_lie_transposed_in_memory_keep_their_axes():
    values = np.arange(24, dtype="f4").reshape(2, 3, 4).transpose(2, 0, 1)
    for protocol in (2, 4, 5):
        assert np.array_equal(pickles.read(io.BytesIO(pickle.dumps(values, protocol))), values)
    assert np.array_equal(pickles.read(io.BytesIO(pickle.dumps(kept("K", (2, 0, 1))))), values)
    for order, axes in (("K", (0, 0, 1)), ("K", (0, 1)), ("K", None), ("K", ("a", 0, 1)), ("A", None)):
        with pytest.raises(pickles.PickleError, match="memory order is not supported"):
            pickles.read(io.BytesIO(pickle.dumps(kept(order, axes))))


@pytest.mark.parametrize(
    "forged, words",
    [
        # Objects without the flag that says so, over bytes which are no pointers: numpy would follow these.
        (array(b"A" * 48, "O8", dtype_state=(3, "|", None, None, None, -1, -1, 0)), "incomplete array of objects"),
        (array(b"A" * 6, "S1", dtype_state=(3, "|", None, None, None, 2**30, 1, 0)), None),  # is not resized
        (array(b"A" * 24, dtype_state=(3, "<", None, None, None, 2**30, 1, 255)), None),
        (array(b"A" * 23), "whose content has a different size"),
        (array(b"A" * 24, shape=(2**62, 4)), "whose content has a different size"),
        (array(b"A" * 24, shape=(-2, -3)), "without shape"),
        (array(b"A" * 24, shape=2), "without shape"),
        (array("A" * 24), "whose content has a different size"),
        (array(b"A" * 24, "V4"), "of a type that is not supported"),
        (array(b"A" * 24, "f4,f4"), "of a type that is not supported"),
        (array(b"A" * 24, dtype_state=(3, "|", None, ("a",), {"a": 1}, 8, 1, 0)), "dtype that is not supported"),
        (
            array(b"A" * 24, dtype_state=(3, "|", (np.zeros(1).dtype, (2,)), None, None, 8, 1, 0)),
            "that is not supported",
        ),
        (array(b"A" * 24, dtype_state="text"), "dtype that is not supported"),
        (Pickled(np.dtype, "f4", state=7), "dtype that is not supported"),
    ],
)
def test_a_forged_array_or_dtype_reaches_no_object_of_numpy(forged, words):
    program = pickle.dumps(forged)
    if words is None:
        assert pickles.read(io.BytesIO(program)).nbytes == len(forged.reduced[2][4])
        return
    with pytest.raises(pickles.PickleError, match=words):
        pickles.read(io.BytesIO(program))


def shared(depth=40, of=1.0, pair=lambda *two: two):
    """2**depth leaves in a few hundred bytes."""
    for _ in range(depth):
        of = pair(of, of)
    return of


@pytest.mark.parametrize(
    "program",
    [
        pickle.dumps(shared()),
        b"\x80\x04K\x01r\xff\xff\xff\xff.",  # remembered at place 2**32 - 1, which a list would have to reach
    ],
)  # fmt: skip
def test_parts_that_are_shared_cost_their_size_once(program):
    """Such as 2**40 leaves to whoever walks over them."""
    assert pickles.read(io.BytesIO(program)) is not None


def test_parts_that_are_shared_are_not_copied_without_end(monkeypatch):
    """By instructions of a few bytes each, which would each take the memory of a part."""
    monkeypatch.setattr("alfish.offline.pickles.faults.MAX_SHARED", 2**14)
    text, entries = "a" * 2000, [None] * 2000
    encode = [Pickled(codecs.encode, text, "latin1") for _ in range(40)]
    objects = [array(entries, "O8", (2000,), (3, "|", None, None, None, -1, -1, 63)) for _ in range(40)]
    attributes = {str(i): None for i in range(2000)}
    states = [Pickled(torch.device, "cpu", state=attributes) for _ in range(40)]
    for parts in (encode, objects, states):
        program = pickle.dumps(parts)
        with pytest.raises(pickles.PickleError, match="copies its parts far more often than a file of its size should"):
            pickles.read(io.BytesIO(program), ("torch.device",))
        assert pickles.read(io.BytesIO(pickle.dumps(parts[:2])), ("torch.device",))


@pytest.mark.parametrize(
    "program, words",
    [
        (b"]" * 10**6 + b"a" * (10**6 - 1) + b".", "has more than 131,072 unfinished values"),
        (b"(" * 10**6 + b"t" * 10**6 + b".", "has more than 131,072 unfinished values"),
        (b"]" * 201 + b"a" * 200 + b".", "nested more than 200 deep"),
    ],
    ids=["lists", "tuples", "few"],
)
def test_a_pickle_nested_without_end_is_refused_soon(program, words):
    with pytest.raises(pickles.PickleError, match=words):
        pickles.read(io.BytesIO(b"\x80\x04" + program))


@pytest.mark.parametrize("kind", ["box", "choices"])
def test_spaces_that_share_their_bounds_are_not_copied_without_end(tmp_path, buffer_class, monkeypatch, kind):
    monkeypatch.setattr("alfish.offline.sources.sb3.MAX_SIZE", 10)
    of = {"box": SPACES.observation, "choices": spaces.MultiDiscrete([2, 3, 4])}[kind]
    space = spaces.Tuple([of] * 4)  # of three numbers each
    with pytest.raises(UsageError, match="describes a space of more than 300 parts or 10 numbers"):
        open_source(saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60, observation_space=space)))


def test_spaces_may_have_the_generator_of_older_libraries(tmp_path, buffer_class):
    space = spaces.Discrete(3)
    space._np_random = np.random.RandomState(0)
    path = saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60, action_space=space))
    assert len(list(open_source(path).episodes())) == len(record())


def test_numbers_whose_hashes_may_be_equal_are_not_keys():
    with pytest.raises(pickles.PickleError, match="a number that is too large"):
        pickles.read(io.BytesIO(pickle.dumps({2**61 - 1: 3})))
    assert pickles.read(io.BytesIO(pickle.dumps({2**59: 3}))) == {2**59: 3}


def test_a_tuple_is_not_a_key():
    with pytest.raises(pickles.PickleError, match="neither a name nor a number"):
        pickles.read(io.BytesIO(pickle.dumps({(1, 2): 3})))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"observations": shared()}, "observations has more than 1000 parts"),
        ({"rewards": shared()}, "rewards has more than 1000 parts"),
        ({"observation_space": shared()}, "has a tuple instead of a space"),
        ({"observation_space": shared(40, spaces.Discrete(2), lambda *two: spaces.Tuple(two))}, "more than 300 parts"),
        ({"rewards": 3.0}, "rewards is a float, but an array is expected"),
        ({"pos": 10**12}, "pos is 1000000000000, but an index of a row below 60 is expected"),
        ({"pos": shared()}, "pos is tuple"),
        ({"full": "no"}, "full is no, but a bool is expected"),
        ({"dones": np.full((60, 1), 0.3, np.float32)}, "dones has 0.3, but a flag must be 0 or 1"),
        ({"timeouts": np.full((60, 1), 2, np.float32)}, "timeouts has 2, but a flag must be 0 or 1"),
        ({"rewards": np.zeros((0, 10**12), np.float32)}, r"equal numbers"),
        ({"rewards": np.zeros((10**12, 0), np.float32)}, "rows must not be empty"),
        ({"actions": np.zeros((59, 1), int)}, "equal numbers"),
        ({"observations": np.zeros((60, 1, 6), np.float32)}, "has 82 rows but rewards has 41"),
    ],
)
def test_fields_that_are_something_else_are_named(tmp_path, buffer_class, fields, words):
    name = saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60, **fields))
    with pytest.raises(UsageError, match=words):
        list(open_source(name).episodes())


@pytest.mark.parametrize("content", [[1, 2, 3], {"observations": np.zeros(3)}, "text"])
def test_a_pickle_that_is_not_a_replay_buffer_is_named(tmp_path, content):
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UsageError, match=f"holds a {type(content).__name__}, which is not a replay buffer"):
        open_source(f"sb3:{tmp_path}/b.pkl")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_half_a_pickle_is_reported(tmp_path, buffer_class, protocol):
    name = saved(tmp_path / "b.pkl", filled(buffer_class, [record()], 60), protocol)
    content = (tmp_path / "b.pkl").read_bytes()
    for share in (0.5, 0.95):
        (tmp_path / "b.pkl").write_bytes(content[: int(share * len(content))])
        with pytest.raises(UsageError, match="is truncated"):
            open_source(name)
