"""Data sets that tests write and read, what they compare them by, and runs that data come from."""

import importlib.util
import json
import os

import numpy as np
import pytest
from recorded import SPACES

from alfish import nest
from alfish.__main__ import main
from alfish.offline import SourceReading, open_writer

NEEDS_MINARI = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("minari", "h5py")), reason="needs the extra 'minari'"
)
TOY = "import toys\ninclude 'dqn.gin'\n"
STAMPED = """
make_environment.env_id = @Stamped
Stamped.truncates = {truncates}
make_environment.num_envs = 2
Trainer.num_env_steps = {steps}
Trainer.unroll_length = 4
ReplayBatches.capacity = 60
ReplayBatches.batch_size = 4
ReplayBatches.warmup_env_steps = 20
ReplayBatches.updates_per_env_step = 0.1
MLP.layers = (4,)
"""


def left_by(directory):
    """Files, of which Minari keeps none of its own."""
    return [path for path in directory.rglob("*") if path.is_file()]


def assert_same(episodes, others):
    """They are as many, and each of them is bit for bit the other."""
    for one, other in zip(episodes, others, strict=True):
        for a, b in zip(nest.leaves(tuple(one)[1:]), nest.leaves(tuple(other)[1:]), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b)


def read(name):
    """The episodes, exactly as they were written: the validator finds nothing to mend."""
    reading = SourceReading([name])
    episodes = list(reading)
    assert reading.report.found("error") == reading.report.found("mended") == {}
    return episodes


def about(name):
    """Returns the description of a data set."""
    scheme, _, where = name.partition(":")
    if scheme == "alfish":
        with open(os.path.join(where, "data_set.json")) as file:
            return json.load(file)
    import minari

    return minari.load_dataset(where).storage.metadata["alfish"]


def written(output, episodes, of=SPACES, told=None, **options):
    """Writes a data set; returns the name by which it is read."""
    output = str(output)
    with open_writer(output, of, **options) as writer:
        for episode in episodes:
            writer.add(episode)
        writer.finish({"remark": "of a test"} if told is None else told)
    return output if output.startswith("minari:") else f"alfish:{output}"


def trained(directory, text):
    """Trains as a configuration says; returns the name by which the run's rows are read."""
    (directory / "conf.gin").write_text(text)
    assert main(["train", f"--gin_file={directory}/conf.gin", f"--root_dir={directory}/run"]) == 0
    return f"run:{directory}/run"
