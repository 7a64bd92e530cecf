"""Writes the policy of a run for use without alfish, as ONNX, numpy code, or a torch program.

  alfish export-policy --root_dir=runs/ppo --output=policy.onnx
  alfish export-policy --root_dir=runs/ppo --output=policy.py
  alfish export-policy --root_dir=runs/ppo --output=policy.pt2

The file maps one raw observation of the environment to one action in the environment's units: it includes normalizers,
frame stacks, action masks, memory and the scaling of actions. The memory's state is an input and an output, and the
input `first` clears it. Observation leaves that do not affect the action are left out.

policy.py needs only numpy; its weights are in policy.npz in the same directory. policy.onnx needs an ONNX runtime;
writing it needs the extra 'onnx': pip install 'alfish[onnx]'. policy.pt2 is read by torch.export.load.

The file is compared with the policy on --num_steps observations of the environment or of --data. The command prints the
largest difference. A file that acts differently is not written.
"""

from absl import flags

from alfish.bin import shared_flags, show

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run, or a packed run.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "File to write: .onnx, .py or .pt2.", flag_values=FLAGS)
flags.DEFINE_string("checkpoint", "latest", shared_flags.CHECKPOINT, flag_values=FLAGS)
words = "Name of the policy, in a run with several policies; default: the only policy."
flags.DEFINE_string("policy", None, words, flag_values=FLAGS)
flags.DEFINE_boolean("sample", False, "Sample actions as in training, instead of taking the mode.", flag_values=FLAGS)
flags.DEFINE_integer("num_steps", 1000, "Number of observations for the comparison.", 1, flag_values=FLAGS)
words = "Recorded data for the comparison, such as alfish:data/x, if the environment is not installed."
flags.DEFINE_string("data", None, words, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Seed of the first episode.", 0, shared_flags.LARGEST_SEED, flag_values=FLAGS)
flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    shared_flags.check_root_dir(flag_values.root_dir)
    output = shared_flags.output_file(flag_values.output, ".onnx", ".py", ".pt2")
    which = shared_flags.checkpoint(flag_values.checkpoint)
    from alfish.exporting.exporting import export_run

    exported, origin = export_run(
        flag_values.root_dir,
        output,
        which,
        flag_values.sample,
        flag_values.num_steps,
        flag_values.data,
        flag_values.seed,
        flag_values.allow_import,
        flag_values.policy,
    )
    show(f"written: {', '.join(map(str, exported.files))} ({origin})")
    program = (
        "" if exported.from_program is None else f", from the same program run inside alfish: {exported.from_program:g}"
    )
    difference = f"{exported.difference:.2g}" if exported.difference else "0"
    show(f"largest difference from the policy on {flag_values.num_steps:,} observations: {difference}{program}")
    return 0
