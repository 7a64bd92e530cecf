"""Unpacks a run that `alfish pack` packed, to continue it.

  alfish unpack --input=ppo.zip --root_dir=runs/ppo
  alfish unpack --input=hf:org/name --root_dir=runs/ppo
  alfish train --root_dir=runs/ppo --gin_param='Trainer.num_env_steps = 200_000'

`hf:org/name` is downloaded from the Hugging Face hub, with the extra 'hub': pip install 'alfish[hub]'. Checksums of all
files are verified. A packed run can be evaluated or played without unpacking: `alfish evaluate --root_dir=ppo.zip`.
"""

from pathlib import Path

from absl import flags

from alfish.bin import show
from alfish.errors import UsageError

FLAGS = flags.FlagValues()
flags.DEFINE_string("input", None, "Packed run: a .zip file, or hf:org/name.", flag_values=FLAGS)
flags.DEFINE_string("root_dir", None, "Directory to create.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    if not flag_values.input:
        raise UsageError("--input is missing: give a file made by `alfish pack`, or hf:org/name")
    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: give a directory to create")
    from alfish.errors import counted, size
    from alfish.runs.packed.fetching import unpack

    manifest = unpack(flag_values.input, Path(flag_values.root_dir))
    show(f"unpacked: {flag_values.root_dir}, {counted(len(manifest.files), 'file')}, {size(manifest.size)}")
    return 0
