"""Returns of the shipped confs: trains each over its seeds with the shipped command, and evaluates the last checkpoint.

  python -m benchmarks.learning                                     every conf of the table below
  python -m benchmarks.learning --confs=ppo_cartpole --seeds=0,1    some confs and seeds
  python -m benchmarks.learning --table                             only the table, from existing runs
  python -m benchmarks.learning --confs=ppo_pong --unfinished       what runs have reached, without training

Offline confs, confs that imitate and variants (`--confs=dqn_lunarlander-prioritized`) run only if they are named.
Offline confs read `data/`, which `python -m benchmarks.data_sets` records. Confs that imitate read an expert's run or
its episodes; docs/results.md has the commands that make these.

Writes `docs/results/CONF.csv` (one row per seed: returns and seconds) and `docs/results/CONF-curve.csv` (every
evaluation during training), and prints the table for `docs/results.md`. Runs are kept under --root; finished runs are
not repeated.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alfish.training.evaluations.evaluation import Evaluation
from benchmarks import PROJECT, processes, tables

RESULTS = PROJECT / "docs" / "results"
COMPILED = ("Learner.compile = True",)
IN_BFLOAT16 = (*COMPILED, "Learner.precision = 'bfloat16'")
KL_OF_RSL_RL = ("Learner.learning_rate = @KLAdaptive()",)  # initial 1e-3, target 0.01, from 1e-5 to 1e-2
KL_OF_SAMPLE_FACTORY = (
    *KL_OF_RSL_RL,
    *("KLAdaptive.initial = 1e-4", "KLAdaptive.target = 0.008", "KLAdaptive.lowest = 1e-6"),
)
# As many minibatches of each policy as the shared policy has.
SPREAD_EACH = ("Trainer.policies = 'each'", "EpochBatches.minibatch_size = 170")
FIRST_GAME = 1000  # seed of the first game of a lineup: other games than those of the evaluations during training


@dataclass(frozen=True)
class Goal:
    """A conf's target, and settings for its training and evaluation."""

    conf: str
    seeds: tuple[int, ...]
    bar: float  # of the mean return
    every_seed: bool  # whether each seed has to pass the bar, or their mean
    num_episodes: int = 100
    settings: tuple[str, ...] = ()  # bindings beside the conf's
    variant: str = ""  # what these make of it
    gin_files: tuple[str, ...] = ()  # after the conf
    imports: str = ""  # module that the conf imports, which `alfish evaluate` must be allowed to
    lineup: str = ""  # of games, as `alfish evaluate --lineup`; the games have seeds from `FIRST_GAME`
    policy: str = ""  # whose return counts, in games
    match: str = ""  # what these games are called; goals of one conf and variant share their runs

    @property
    def run(self) -> str:
        return f"{self.conf}-{self.variant}" if self.variant else self.conf

    @property
    def name(self) -> str:
        return f"{self.run}-{self.match}" if self.match else self.run


def _offline(
    conf: str, kind: str, bar: float, every_seed: bool = True, num_episodes: int = 100, num_seeds: int = 3
) -> Goal:
    """Returns the goal of a conf that is trained on one of a task's data sets."""
    settings = (_sources(conf, kind),)
    return Goal(conf, tuple(range(num_seeds)), bar, every_seed, num_episodes, settings, kind)


def _sources(conf: str, kind: str) -> str:
    return f"OfflineBuffer.sources = ['alfish:{PROJECT}/data/{conf.rpartition('_')[2]}/{kind}']"


def _imitation(
    conf: str, bar: float, num_seeds: int, variant: str = "", num_episodes: int = 100, settings: tuple[str, ...] = ()
) -> Goal:
    """Returns the goal of a conf that labels by the expert of its task, `runs/sac_TASK`."""
    expert = f"saved_policy.root_dir = '{PROJECT}/runs/sac_{conf.rpartition('_')[2]}'"
    return Goal(conf, tuple(range(num_seeds)), bar, False, num_episodes, (expert, *settings), variant)


def _tag(conf: str) -> list[Goal]:
    """Returns the goals of the chasers against a runner that moves at random, and of the runner against the chasers."""
    return [
        Goal(conf, (0, 1, 2, 3, 4), bar, False, 200, imports="mpe2", lineup=lineup, policy=policy, match=policy)
        for policy, lineup, bar in (
            ("chaser", "adversary_*=chaser,agent_*=random", 25),
            ("runner", "adversary_*=chaser,agent_*=runner", -30),
        )
    ]


def _listener(speaker: str, bar: float, match: str = "") -> Goal:
    """Returns the goal of a listener with its speaker, or with one that acts at random and tells it nothing."""
    lineup = f"speaker_*={speaker},listener_*=listener"
    conf = "ppo_speaker_listener"
    return Goal(conf, (0, 1, 2), bar, True, 200, imports="mpe2", lineup=lineup, policy="listener", match=match)


def _bfloat16(conf: str, bar: float) -> Goal:
    return Goal(conf, (0, 1, 2, 3, 4), bar, False, settings=IN_BFLOAT16, variant="bfloat16")


GOALS = [
    Goal("ppo_cartpole", (0, 1, 2, 3, 4), 475, True),
    Goal("ppo_cartpole_tensor", (0, 1, 2, 3, 4), 475, True),
    Goal("ppo_gymnax_cartpole", (0, 1, 2), 475, True),
    Goal("a2c_cartpole", (0, 1, 2), 475, True),
    Goal("appo_cartpole", (0, 1, 2, 3, 4), 475, True),
    Goal("ppo_acrobot", (0, 1, 2), -100, True),
    Goal("ppo_pendulum", (0, 1, 2), -200, True),
    Goal("ppo_lunarlander", (0, 1, 2), 200, True),
    Goal("ppg_lunarlander", (0, 1, 2), 200, True),
    Goal("ppo_halfcheetah", (0, 1, 2), 3000, False),
    # The learning rate follows the KL, by rsl_rl's and Sample Factory's settings. The bar is the conf's own mean.
    Goal("ppo_halfcheetah", (0, 1, 2), 5928, False, settings=KL_OF_RSL_RL, variant="kl-rsl-rl"),
    Goal("ppo_halfcheetah", (0, 1, 2), 5928, False, settings=KL_OF_SAMPLE_FACTORY, variant="kl-sample-factory"),
    Goal("appo_halfcheetah", (0, 1, 2, 3, 4), 3000, False, variant="async", gin_files=("async.gin",)),
    Goal("ppo_hopper", (0, 1, 2), 2300, False),
    Goal("dqn_cartpole", (0, 1, 2, 3, 4), 475, True),
    Goal("dqn_acrobot", (0, 1, 2, 3, 4), -100, True),
    Goal("dqn_lunarlander", (0, 1, 2, 3, 4), 150, False),
    Goal("sac_pendulum", (0, 1, 2, 3, 4), -155, True),
    Goal("sac_cartpole", (0, 1, 2, 3, 4), 475, False),
    Goal("sac_mountaincar_continuous", (0, 1, 2, 3, 4), 90, True),
    Goal("sac_halfcheetah", (0, 1, 2), 4500, False),
    Goal("td3_halfcheetah", (0, 1, 2, 3, 4), 4500, False),
    Goal("sac_hopper", (0, 1, 2), 1500, False),
    Goal("ppo_recall", (0, 1, 2), 0.95, True),
    Goal("appo_recall", (0, 1, 2), 0.95, True),
    Goal("dqn_recall", (0, 1, 2), 0.95, True),
    Goal("sac_recall", (0, 1, 2), 0.95, True),
    Goal("td3_recall", (0, 1, 2), 0.95, True),
    Goal("dqn_bitflip", (0, 1, 2), -7.5, True),
    Goal("ppo_masked", (0, 1, 2, 3, 4), 90, True),
    Goal("dqn_masked", (0, 1, 2, 3, 4), 90, True),
    Goal("rnd_mountaincar", (0, 1, 2, 3, 4), -180, True),
    # the farthest treasure
    Goal("dqn_deep_sea_treasure", (0, 1, 2, 3, 4), 0.9 * 23.7 - 0.1 * 19 - 1e-3, False, imports="mo_gymnasium"),
    Goal("ppo_asymmetric_halfcheetah", (0, 1, 2, 3, 4), 3427, False),  # the mean of its control run
    Goal("ppo_minigrid_doorkey", (0, 1, 2), 0.95, False, imports="minigrid"),
    Goal("sac_fetch_reach", (0, 1, 2), -2.0, False, imports="gymnasium_robotics"),
    Goal("dqn_highway", (0, 1, 2), 22.9, False),
    Goal("sac_cartpole_swingup", (0, 1, 2), 813, False),  # SAC's 835 at 100 k steps minus its spread (CURL, table 1)
    *_tag("ppo_tag"),
    _listener("speaker", -12.5),
    Goal("ppo_spread", (0, 1, 2), -20.1, False, 200, imports="mpe2"),  # the interval of an earlier run
    Goal("ppo_spread", (0, 1, 2), -20.1, False, 200, SPREAD_EACH, "each", imports="mpe2"),
    Goal("c51_cartpole", (0, 1, 2), 475, False),
    Goal("c51_acrobot", (0, 1, 2), -95, False),
    Goal("qrdqn_cartpole", (0, 1, 2, 3, 4), 490, False),
    Goal("qrdqn_acrobot", (0, 1, 2, 3, 4), -80, False),
    Goal("pqn_cartpole", (0, 1, 2, 3, 4), 490, False),
    Goal("pqn_acrobot", (0, 1, 2, 3, 4), -96, False),
    Goal("reppo_pendulum", (0, 1, 2), -200, True),
    Goal("reppo_halfcheetah", (0, 1, 2, 3, 4), 4284, False),  # the mean of PPO after 300 k steps
    Goal("munchausen_lunarlander", (0, 1, 2, 3, 4), 200, False),
    Goal("iqn_lunarlander", (0, 1, 2, 3, 4), 200, False),
    Goal("rainbow_lunarlander", (0, 1, 2, 3, 4), 200, False),
    Goal("crossq_pendulum", (0, 1, 2, 3, 4), -155, True),
    Goal("crossq_halfcheetah", (0, 1, 2), 7130, False),
    Goal("xqc_pendulum", (0, 1, 2, 3, 4), -155, True),
    Goal("xqc_hopper", (0, 1, 2), 2059, False, settings=IN_BFLOAT16),
    Goal("flashsac_pendulum", (0, 1, 2, 3, 4), -155, True),
    Goal("flashsac_halfcheetah", (0, 1), 9550, False, settings=IN_BFLOAT16),
    Goal("flashsac_small_halfcheetah", (0, 1, 2), 8000, False, settings=IN_BFLOAT16),
    Goal("tqc_halfcheetah", (0, 1, 2), 4500, False, settings=IN_BFLOAT16),
    Goal("droq_halfcheetah", (0, 1), 5330, False, settings=IN_BFLOAT16),
    Goal("tqc_bipedalwalker", (0,), 300, False, settings=COMPILED),
    Goal("redq_halfcheetah", (0,), 5650, False, settings=IN_BFLOAT16),
    Goal("xqc_halfcheetah", (0, 1, 2), 6580, False, settings=IN_BFLOAT16),
    Goal("tqc_pendulum", (0, 1, 2, 3, 4), -155, True),
    Goal("droq_pendulum", (0, 1, 2, 3, 4), -200, True),
    Goal("redq_pendulum", (0, 1, 2, 3, 4), -200, True),
    Goal("ppo_pong", (0,), 18, True, 10, IN_BFLOAT16),
    Goal("dqn_pong", (0,), 18, True, 10, IN_BFLOAT16),
]
OFFLINE = [
    _offline("bc_pendulum", "expert", -140),
    _offline("bc_pendulum", "medium-replay", -300),
    _offline("iql_pendulum", "medium-replay", -300),
    _offline("td3_bc_pendulum", "medium-replay", -300),
    _offline("cql_pendulum", "medium-replay", -230),
    _offline("rlpd_pendulum", "medium-replay", -155),
    _offline("calql_pendulum", "medium-replay", -165),
    _offline("bc_halfcheetah", "medium-replay", 0, every_seed=False, num_episodes=20),
    _offline("iql_halfcheetah", "medium-replay", 0, every_seed=False, num_episodes=20),
    _offline("td3_bc_halfcheetah", "medium-replay", 0, every_seed=False, num_episodes=20),
]
IMITATION = [
    _imitation("dagger_pendulum", -145, 5),
    _imitation("student_halfcheetah", 0.95 * 7321, 3, num_episodes=20),
    _imitation("student_halfcheetah", 0, 3, "without-memory", 20, ("Torso.memory = None",)),
    _offline("bc_pendulum", "expert-50", -145, every_seed=False, num_seeds=5),
    # 80 % of the expert from 10 of its episodes, and what cloning makes of the same 10
    Goal("gail_pendulum", (0, 1, 2), -141.3 / 0.8, False, settings=(_sources("gail_pendulum", "expert-10"),)),
    Goal("gail_halfcheetah", (0, 1, 2), 0.8 * 7321, False, settings=(_sources("gail_halfcheetah", "expert-10"),)),
    Goal("appl_cartpole", (0, 1, 2, 3, 4), 475, True, settings=(_sources("appl_cartpole", "expert-10"),)),
    Goal("gcl_lunarlander", (0, 1, 2), 200, False, settings=(_sources("gcl_lunarlander", "expert-10"), *COMPILED)),
    Goal(
        "gcl_lunarlander",
        (0, 1, 2),
        200,
        False,
        settings=(
            _sources("gcl_lunarlander", "expert-10"),
            *COMPILED,
            "Composed.rewards = [@GAIL]",
            "GAIL.demonstrations = @OfflineBuffer",
            "GAIL.reward = 'log_ratio'",
            "GAIL.gradient_penalty = 10.0",
            "GAIL.gamma = 0.999",
            "Learner.learning_rate = {'all': 3e-4, 'gail': 3e-4}",
        ),
        variant="gail",
    ),
    Goal(
        "bc",
        (0, 1, 2),
        200,
        False,
        settings=(
            _sources("bc_lunarlander", "expert-10"),
            "make_environment.env_id = 'LunarLander-v3'",
            "Trainer.num_updates = 20_000",
        ),
        variant="lunarlander-expert-10",
    ),
    _offline("bc_pendulum", "expert-10", -141.3 / 0.8, every_seed=False),
    _offline("bc_halfcheetah", "expert-10", 0.8 * 7321, every_seed=False),
]
# What prioritized replay, longer returns, hindsight, memory, masks, asymmetric critics and the temperature's loss are
# worth, and what bfloat16 costs.
ABLATIONS = [
    Goal(
        "dqn_lunarlander",
        (0, 1, 2, 3, 4),
        150,
        False,
        settings=("ReplayBatches.sampler = @Prioritized", "Prioritized.alpha = 0.6", "Prioritized.beta = 0.4"),
        variant="prioritized",
    ),
    Goal(
        "dqn_lunarlander", (0, 1, 2, 3, 4), 150, False, settings=("ReplayBatches.window_length = 2",), variant="1-step"
    ),
    Goal(
        "dqn_bitflip", (0, 1, 2), -15, True, settings=("HindsightReplay.fraction = 0.0",), variant="without-hindsight"
    ),
    *(
        Goal(f"{name}_recall", (0, 1, 2), 0, True, settings=(*settings, "Evaluate.period = 1000"), variant=variant)
        for name in ("sac", "td3")
        for variant, settings in (
            ("each-1000-steps", ()),
            ("without-memory", (f"Trainer.algorithm = @{name.upper()}", "ReplayBatches.burn_in = 0")),
        )
    ),
    Goal("ppo_masked", (0, 1, 2, 3, 4), 0, True, settings=("make_environment.action_mask = None",), variant="unmasked"),
    Goal("dqn_masked", (0, 1, 2, 3, 4), 0, True, settings=("make_environment.action_mask = None",), variant="unmasked"),
    Goal(
        "dqn_deep_sea_treasure",
        (0, 1, 2, 3, 4),
        0.1 * 0.7 - 0.9 - 1e-3,
        True,
        settings=("DQN.reward_weights = [0.1, 0.9]",),
        variant="nearest",
        imports="mo_gymnasium",
    ),
    Goal(
        "ppo_asymmetric_halfcheetah",
        (0, 1, 2, 3, 4),
        0,
        False,
        settings=("Encoder.leaves = {'velocity': None}",),
        variant="blind",
    ),
    Goal(
        "rnd_mountaincar",
        (0, 1, 2, 3, 4),
        -180,
        True,
        settings=("Trainer.algorithm = @PPO", "PPO.gamma = 0.99"),
        variant="ppo",
    ),
    Goal("rnd_mountaincar", (0, 1, 2, 3, 4), -180, True, settings=("RND.coef = 0.0",), variant="without-bonus"),
    _listener("random", -100, "random-speaker"),
    _bfloat16("sac_halfcheetah", 4500),
    _bfloat16("td3_halfcheetah", 4500),
    Goal(
        "flashsac_halfcheetah",
        (0, 1),
        9550,
        False,
        settings=(*IN_BFLOAT16, "Temperatures.linear_in = 'log_alpha'"),
        variant="log-alpha",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confs", default=",".join(goal.name for goal in GOALS))
    parser.add_argument("--seeds", help="instead of the goal's own")
    parser.add_argument("--root", default="runs/learning")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--unfinished", action="store_true", help="publish existing runs as far as they are trained")
    arguments = parser.parse_args()
    all_goals = {goal.name: goal for goal in GOALS + OFFLINE + IMITATION + ABLATIONS}
    names = arguments.confs.split(",")
    if unknown := [name for name in names if name not in all_goals]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(all_goals)}")
    goals = [goal for name, goal in all_goals.items() if name in names]
    if not arguments.table:
        for goal in goals:
            seeds = [int(seed) for seed in arguments.seeds.split(",")] if arguments.seeds else goal.seeds
            for seed in seeds:
                root_dir = PROJECT / arguments.root / goal.run / f"seed{seed}"
                seconds = None if arguments.unfinished else train(goal, seed, root_dir)
                record(goal, seed, root_dir, seconds)
    print(table(goals))


def train(goal: Goal, seed: int, root_dir: Path) -> float | None:
    """Trains a seed if needed; returns the seconds that the command took, or None for the rest of an earlier run."""
    is_new = not (root_dir / "checkpoints").exists()
    files = [f"--gin_file={name}" for name in (f"{goal.conf}.gin", *goal.gin_files)]
    settings = [f"--gin_param={one}" for one in (f"Trainer.seed={seed}", *goal.settings)]
    began = time.perf_counter()
    processes.alfish("train", *files, f"--root_dir={root_dir}", *settings)
    return time.perf_counter() - began if is_new else None


def record(goal: Goal, seed: int, root_dir: Path, seconds: float | None) -> None:
    """Evaluates a run's last checkpoint, and writes its row and curve into the CSV files.

    Args:
      goal: the conf and its evaluation.
      seed: of training.
      root_dir: of the run, which may still train.
      seconds: that training took. None: it has not ended, or took several commands; the published value stays if the
        evaluation is the same.
    """
    path = RESULTS / f"{goal.name}.csv"
    evaluate = ["evaluate", f"--root_dir={root_dir}", f"--num_episodes={goal.num_episodes}", "--json"]
    evaluate += [f"--allow_import={goal.imports}"] if goal.imports else []
    evaluate += [f"--lineup={goal.lineup}", f"--seed={FIRST_GAME}"] if goal.lineup else []
    result = processes.run_script([sys.executable, "-m", "alfish", *evaluate], processes.with_threads(1))
    if goal.policy:
        own = tuple(result["by_objective"][goal.policy])
        result |= Evaluation(result["env_steps"], FIRST_GAME, own, tuple(result["lengths"])).summary()
    row = {"seed": seed} | {name: result[name] for name in ("env_steps", "num_episodes", "mean", "ci_low", "ci_high")}
    row |= {name: result[name] for name in ("std", "min", "max")}
    same = [old for old in tables.read_rows(path) if all(old[name] == str(row[name]) for name in row)]
    published = same[0]["command_seconds"] if same else ""
    row["command_seconds"] = published if seconds is None else round(seconds, 1)
    mean, low, high = (_shown(row[name]) for name in ("mean", "ci_low", "ci_high"))
    print(f"{goal.name} seed {seed}: {mean} [{low}, {high}]", flush=True)
    publish(path, [row])
    curve = []
    column = f"return/{goal.policy}" if goal.policy else "return"
    for path in sorted((root_dir / "eval").glob("evaluation-*.csv")):
        returns = [float(episode[column]) for episode in tables.read_rows(path)]
        env_steps = int(path.stem.removeprefix("evaluation-"))
        curve.append({"seed": seed, "env_steps": env_steps, "mean": float(np.mean(returns)), "episodes": len(returns)})
    publish(RESULTS / f"{goal.name}-curve.csv", curve)


def table(goals: list[Goal]) -> str:
    """Returns the Markdown table of these goals from the CSV files."""
    lines = [tables.header(["conf", "env steps", "seeds", "mean of the seeds", "each seed", "goal", "met"])]
    for goal in goals:
        path = RESULTS / f"{goal.name}.csv"
        rows = tables.read_rows(path)
        if not rows:
            lines.append(f"| {goal.name} | | | not run | | {goal.bar:g} | |")
            continue
        means = [float(row["mean"]) for row in rows]
        judged = min(means) if goal.every_seed else float(np.mean(means))
        each = ", ".join(map(_shown, means))
        seeds = ", ".join(row["seed"] for row in rows)
        steps = f"{max(int(row['env_steps']) for row in rows):,}"
        wanted = f"{goal.bar:g} {'every seed' if goal.every_seed else 'in the mean'}"
        met = "yes" if judged >= goal.bar else "no"
        if len(rows) < len(goal.seeds):
            met += f", {len(rows)} of {len(goal.seeds)} seeds"
        lines.append(tables.line([goal.name, steps, seeds, _shown(float(np.mean(means))), each, wanted, met]))
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:.3f}" if abs(round(value, 3)) < 1 else f"{value:.1f}"


def publish(path: Path, rows: list[dict]) -> None:
    """Replaces a seed's rows in a CSV; without evaluations there is no curve."""
    if rows:
        tables.replace_rows(path, rows, rows[0], ["seed"], lambda row: (int(row["seed"]), int(row["env_steps"])))


if __name__ == "__main__":
    main()
