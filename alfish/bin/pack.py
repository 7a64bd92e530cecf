"""Packs a run into one file, for another person or machine.

  alfish pack --root_dir=runs/ppo --output=ppo.zip
  alfish pack --root_dir=runs/sac --output=sac.zip --replay

The file has what is needed to evaluate, play and continue the run: its configuration, the newest and the best
checkpoint, evaluations, metrics, films, and a card (README.md) that the Hugging Face hub shows. The log and the
TensorBoard files are not included. Reading the file does not execute code from it. The replay buffer, which can be
large, is packed only with --replay; a run that continues from the file then has the same bits as the original.

  alfish evaluate --root_dir=ppo.zip
  alfish unpack --input=ppo.zip --root_dir=runs/ppo2
"""

from pathlib import Path

from absl import flags

from alfish.bin import shared_flags, show

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "File to write, .zip.", flag_values=FLAGS)
flags.DEFINE_boolean("replay", False, "Pack the replay buffer, too.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    shared_flags.check_root_dir(flag_values.root_dir)
    output = shared_flags.output_file(flag_values.output, ".zip")
    from alfish.errors import counted, size
    from alfish.exporting.packing import continuing, pack

    manifest = pack(Path(flag_values.root_dir), output, flag_values.replay)
    show(f"written: {output}, {counted(len(manifest.files), 'file')}, {size(manifest.size)}")
    show(continuing(manifest.about["continues_equally"]))
    return 0
