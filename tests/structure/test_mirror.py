"""`tests/` mirrors `alfish/`: where a module has its tests.

Tests of `alfish/learner/updates.py` are in `tests/learner/test_updates.py`. Those of `alfish/offline/sources/alf.py`
may also be one directory above, in `tests/offline/test_alf.py`. A module that is tested with others is in `TOGETHER`.
"""

import collections
from pathlib import Path

import alfish

PACKAGE = Path(alfish.__file__).parent
TESTS = PACKAGE.parent / "tests"

# By the file of tests: the modules of a directory of `alfish/` that it tests.
TOGETHER = {
    "algorithms/composition/test_composition_parts.py": ["algorithms/composition: composed dynamics part rnd"],
    "algorithms/composition/test_gail.py": [
        "algorithms/composition: learned_reward",
        "algorithms/imitation: external",
    ],
    "algorithms/test_contract.py": ["algorithms: actor_critic rl_algorithm"],
    "algorithms/test_dqn.py": ["algorithms: q_learning"],
    "algorithms/test_imitation.py": ["algorithms/imitation: apprentice dagger distillation expert"],
    "algorithms/test_sac.py": ["algorithms: retrace soft_actor"],
    "algorithms/test_sac_family.py": ["algorithms: redq"],
    "algorithms/test_td3.py": ["algorithms: ddpg"],
    "algorithms/test_with_memory.py": ["algorithms: recurrent_sac recurrent_td3", "networks: windows"],
    "analysis/test_analysis_sources.py": ["analysis: foreign run_source sources"],
    "analysis/test_compare.py": ["analysis: comparison tables", "bin: compare"],
    "analysis/test_plot.py": ["analysis: curves figures grouping plotting series", "bin: plot"],
    "analysis/test_report.py": ["analysis: page", "bin: report"],
    "bin/test_command_line.py": ["bin: confs evaluate play shared_flags train", "configuration: opening runs"],
    "bin/test_first_run.py": ["bin: observed"],
    "bin/test_params.py": ["configuration: bindings catalogue"],
    "compiler/test_background.py": ["compiler: compiling_process"],
    "compiler/test_numpy_program.py": ["compiler: numpy_operations"],
    "configuration/test_reading.py": ["configuration: locating"],
    "configuration/test_sentences.py": ["configuration: wrong_kinds"],
    "environments/functional/test_single.py": ["environments/functional: validation"],
    "environments/games/test_parallel.py": ["environments/games: columns replacements zoo"],
    "environments/test_make.py": ["environments: action_bounds finding members suites wrapping"],
    "environments/test_toy.py": ["environments: bit_flip"],
    "environments/test_vector.py": ["environments: environment sequential"],
    "environments/test_vector_rewards_of_environments.py": ["environments: objectives"],
    "exporting/test_exporting.py": [
        "bin: export_policy",
        "exporting: graph numpy_check numpy_file numpy_runtime onnx_file onnx_operations policy_step torch_file",
        "exporting: verification",
    ],
    "exporting/test_packing.py": ["bin: pack unpack"],
    "functional/test_return_distributions.py": ["algorithms: munchausen"],
    "learner/batches/test_batches.py": ["learner/batches: epochs"],
    "learner/batches/test_replay.py": ["learner/batches: sequence_sampler update_schedule"],
    "learner/test_compiled.py": [
        "compiler: cuda_graphs inductor",
        "learner: compiled_updates traced_update",
    ],
    "learner/test_learner.py": ["learner: groups"],
    "metrics/test_metrics.py": ["metrics: episodes metric step_batch steps"],
    "networks/test_memories.py": ["networks: attention_window"],
    "networks/test_networks.py": [
        "networks: actor_critic encoders heads hybrid layers q_network",
    ],
    "offline/test_hdf5.py": ["offline: limits", "offline/sources: d4rl"],
    "offline/test_record.py": ["bin: record"],
    "offline/test_recorded_masks.py": ["offline: recorded_spaces"],
    "offline/test_export.py": ["bin: export"],
    "offline/test_outputs.py": ["bin: import_", "offline: data_report"],
    "offline/test_sb3.py": ["offline/pickles: faults machine stand_ins"],
    "offline/test_sources.py": [
        "offline: data_set",
        "offline/sources: d3rlpy flat npz ogbench own recognition source_files",
    ],
    "offline/test_training.py": ["learner/batches: offline", "offline: source_reading"],
    "offline/test_validation.py": ["offline: episode form"],
    "parameters/test_description.py": ["configuration: directory"],
    "parameters/test_gin_internals.py": ["parameters: differences"],
    "parameters/test_imports_by_name.py": ["parameters: imports"],
    "parameters/test_networks_of_others.py": ["parameters: parts"],
    "parameters/test_parameters.py": ["parameters: checking kinds"],
    "policies/test_joint_runs.py": ["policies: composites game_unroller joint_unroller member networks"],
    "processes/test_replicas.py": ["training: agreement shared_directory"],
    "replay/test_ring_buffer.py": ["replay: row_store start_index state_store"],
    "replay/test_samplers.py": ["replay: prioritized"],
    "runs/packed/test_archive.py": ["runs/packed: fetching"],
    "runs/test_checkpoints.py": ["runs: checkpoint_file loading provenance random_state"],
    "runs/test_files.py": ["runs: run_log"],
    "runs/writers/test_trackers.py": ["runs/writers: mlflow_writer tracker trackio_writer wandb_writer"],
    "runs/writers/test_writers.py": ["runs/writers: console csv_writer tensorboard writer"],
    "specs/test_specs.py": ["specs: checks leaves spaces units"],
    "specs/test_specs_masks.py": ["specs: masks"],
    "simulators/test_adapters.py": [
        "simulators: isaac_lab libraries manager_based mani_skill mjlab puffer rsl_rl uni_lab"
    ],
    "simulators/test_recipe.py": ["bin: from_rsl_rl"],
    "sweeps/test_jobs.py": ["sweeps: run_state"],
    "sweeps/test_population.py": ["bin: population"],
    "sweeps/test_ray_groups.py": ["sweeps: ray_jobs"],
    "sweeps/test_search.py": ["parameters: varied", "sweeps: trial_samplers"],
    "sweeps/test_sweep.py": ["bin: group_flags sweep", "sweeps: group table trials"],
    "training/test_apprenticeship_rounds.py": ["training: apprenticeship"],
    "training/test_calibration.py": ["training: clock"],
    "training/test_crossplay.py": ["bin: crossplay"],
    "training/test_diagnostics.py": [
        "training: summaries",
        "training/diagnostics: diagnostic estimates networks",
    ],
    "training/test_evaluator.py": ["training: padded_policy", "training/evaluations: evaluation"],
    "training/test_films.py": ["runs: film_file"],
    "training/test_imitation_runs.py": ["configuration: experts"],
    "training/test_trainer.py": ["training: listener listeners loop run_directory run_parts"],
    "training/test_untrained_runs.py": ["training: untrained"],
    "training/test_vector_runs.py": ["training: reward_weights"],
    "training/test_watch.py": ["bin: watch", "training/evaluations: results"],
    "transforms/test_transforms.py": ["transforms: normalizers rewards transform"],
    "unrollers/test_async.py": [
        "processes: channel messages pool",
        "unrollers/workers: acting asynchronous worker_process",
    ],
    "unrollers/test_generate.py": ["unrollers: episode_runner"],
    "unrollers/test_ray_settings.py": ["processes: host", "unrollers/ray: cluster remote_host"],
    "unrollers/test_ray_workers.py": ["unrollers/ray: object_store"],
    "unrollers/test_server.py": ["processes: inheritance server"],
    "unrollers/test_sync.py": ["unrollers: unroller"],
    "unrollers/test_workers.py": [
        "processes: shared_memory worker_handle",
        "unrollers/workers: environment_maker shared_tensors",
    ],
}


def modules():
    """Paths of modules below the package. What `__init__` and `__main__` have is tested with what they import."""
    paths = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    return [path for path in paths if not path.name.startswith("__")]


def own_file(module):
    """Returns the test file of a module's name; None if there is none."""
    places = [module.parent, *([module.parent.parent] if len(module.parts) > 2 else [])]
    files = [TESTS / place / f"test_{module.name}" for place in places]
    return next((file for file in files if file.exists()), None)


def grouped():
    """Returns the module of each entry of `TOGETHER`, as often as it is there."""
    for places in TOGETHER.values():
        for place in places:
            directory, _, names = place.partition(": ")
            yield from (Path(directory) / f"{name}.py" for name in names.split())


def test_each_module_has_a_test_file_of_its_name_or_is_tested_with_others():
    together = set(grouped())
    without = [str(module) for module in modules() if own_file(module) is None and module not in together]
    assert without == [], "write tests/PACKAGE/test_NAME.py, or add the module to TOGETHER"


def test_the_table_names_files_of_tests_and_modules_without_one_of_their_own():
    assert [file for file in TOGETHER if not (TESTS / file).exists()] == []
    counts, known = collections.Counter(grouped()), set(modules())
    assert [str(module) for module, count in counts.items() if count > 1] == []
    assert [str(module) for module in counts if module not in known] == [], "these modules are gone"
    assert [str(module) for module in counts if own_file(module)] == [], "these have a file of their own"


def test_no_two_files_of_tests_have_one_name():
    """Pytest imports them by their names alone."""
    counts = collections.Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in counts.items() if count > 1] == []
