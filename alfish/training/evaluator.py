"""Seeded evaluation on whole episodes; results do not depend on the number of environments."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Space

from alfish import nest
from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import StepType, TimeStep
from alfish.environments import Environment
from alfish.errors import RunError, UsageError
from alfish.errors.user_code import calling, refuse_default_dtype
from alfish.metrics.env_info import SUCCESS, EpisodeInfos
from alfish.nest import Nest
from alfish.offline import Episode
from alfish.offline.episode import ends
from alfish.parameters import NonNegativeInt, PositiveInt, checked, exclusive
from alfish.parameters.parts import build
from alfish.runs import random_state
from alfish.specs import ActionUnits, ObservationUnits, describe, reward_names
from alfish.training.evaluations.evaluation import Evaluation
from alfish.training.films import FilmRow
from alfish.training.padded_policy import POLICY_BATCH_SIZE, PaddedPolicy
from alfish.training.policy import completed
from alfish.transforms import Transforms
from alfish.unrollers.episode_runner import EpisodeAccumulator
from alfish.unrollers.nonfinite import refuse_nonfinite

# Number of actions after which an episode is truncated; the longest shipped task, an Atari game, has 27,000 actions.
MAX_EPISODE_LENGTH = 100_000
PROGRESS_SECONDS = 30.0  # seconds between two lines about a long evaluation


@checked
def make_evaluator(
    make_environment: Callable[..., Environment],
    algorithm: RLAlgorithm,
    transforms: Transforms,
    num_episodes: PositiveInt,
    num_envs: PositiveInt = POLICY_BATCH_SIZE,
    max_length: int = MAX_EPISODE_LENGTH,
    **environment_arguments: Any,
) -> "Evaluator":
    """Returns an evaluator with at most `num_envs` separate environments.

    If the environments cannot be reset and seeded separately, there is one environment for each episode.

    Raises:
      UsageError: as for `Evaluator`; or another thread trains.
    """

    def made(count: int) -> Environment:
        name = "the factory of the environment for evaluation"
        made = build(make_environment, Environment, name, num_envs=count, evaluation=True, **environment_arguments)
        refuse_default_dtype(f"the constructor of {made.name}")
        return made

    exclusive.check()  # the configuration of a run in another thread would apply to these environments
    environment = made(min(num_envs, num_episodes))
    if not environment.seeds_rows and environment.num_envs != num_episodes:
        environment.close()
        environment = made(num_episodes)
    try:
        return Evaluator(environment, algorithm, transforms, max_length)
    except UsageError:
        environment.close()
        raise


class Evaluator:
    """Runs complete episodes with `predict_step` and frozen transforms; global random states do not change.

    The result covers the first episodes that start, each to its end. Taking the first episodes that end would favor
    short episodes.

    Args:
      environment: environment built for evaluation, not the training environment. Observations may lack leaves that do
        not affect the action.
      algorithm, transforms: algorithm and transforms, which are only read.
      max_length: number of actions after which an episode is truncated, at least 1; without a limit, an episode may
        never end.

    Attributes:
      log: function that receives a line every `PROGRESS_SECONDS` of a long evaluation; the default prints to standard
        error.
      num_cut: number of episodes of the last evaluation that were truncated at `max_length`; only the first such
        episode is logged.
      infos: globs of the numbers that `evaluate` reads from the infos at the ends of episodes, see `EpisodeInfos`.

    Raises:
      UsageError: the environment's spaces differ from the policy's, or `max_length` is below 1.
    """

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        max_length: int = MAX_EPISODE_LENGTH,
    ):
        if max_length < 1:
            raise UsageError(f"the evaluator's max_length is {max_length}; it must be at least 1")
        _check_spaces(environment, algorithm, transforms)
        self.environment, self._algorithm, self._transforms = environment, algorithm, transforms
        self.max_length, self.num_cut = max_length, 0
        self.log: Callable[[str], Any] = print_to_stderr
        self.infos: Sequence[str] = SUCCESS
        self._unmatched: list[str] = []  # globs in `infos` that were reported because they matched no number
        self._device = algorithm.progress.device
        trained_spec = transforms.raw_observation_spec
        lacks_leaves = nest.paths(environment.observation_spec) != nest.paths(trained_spec)
        self._trained_spec = trained_spec if lacks_leaves else None
        self._under_way: object = None  # rows of the last call of `test_episodes`
        self._policy: PaddedPolicy | None = None  # policy of the evaluation under way

    @checked
    def evaluate(
        self,
        num_episodes: int,
        seed: NonNegativeInt = 0,
        sample: bool = False,
        env_steps: int = 0,
        on_row: Callable[[FilmRow], Any] | None = None,
        values: bool = False,
    ) -> Evaluation:
        """Evaluates the policy; episode k starts from `reset(seed=seed + k)`.

        Args:
          num_episodes: number of whole episodes.
          seed: seed of episode 0.
          sample: whether to act with `rollout_step`, with a random generator for each episode; if not, with
            `predict_step`.
          env_steps: number of environment steps of the policy's training, copied into the result.
          on_row: function that is called after every reset and step (for films).
          values: whether `on_row` receives value estimates, which requires a further call of the networks for each row.

        Raises:
          UsageError: `num_episodes` is below 1, or it exceeds the number of environments although these cannot be
            seeded separately.
          RunError: a return is not finite.
        """
        self._check_number(num_episodes)
        names = reward_names(self.environment.reward_spec)
        totals, lengths = np.zeros((num_episodes, max(1, len(names)))), np.zeros(num_episodes, np.int64)
        infos = EpisodeInfos(self.infos, num_episodes)
        self._under_way = None
        with self._acting(seed, sample):
            for episode, time_step, stepped in self._rows(num_episodes, seed, sample):
                reward = time_step.reward.cpu().numpy().astype(np.float64).reshape(len(episode), -1)
                if on_row:
                    on_row(self._row(episode, time_step, reward, values))
                if stepped:
                    lanes = episode >= 0  # environments that are running an episode
                    totals[episode[lanes]] += reward[lanes]
                    lengths[episode[lanes]] += 1
                    ended = nest.as_array(time_step.step_type) == StepType.LAST
                    infos.add(self.environment.infos, episode, lanes & ended)
        if not np.isfinite(totals).all():
            wrong = int(np.flatnonzero(~np.isfinite(totals).all(1))[0])
            raise RunError(
                f"the return of episode {wrong} of the evaluation, with seed {seed + wrong}, is not finite; check the "
                "policy's actions and the environment's rewards"
            )
        by_objective = {name: tuple(own.tolist()) for name, own in zip(names, totals.T)}
        returns = tuple(self.scalarized(totals).tolist())
        self._unmatched = report_unmatched(infos.unmatched(), self._unmatched, self.log)
        of_episodes = {name: tuple(own.tolist()) for name, own in sorted(infos.values.items())}
        return Evaluation(env_steps, seed, returns, tuple(lengths.tolist()), self.num_cut, by_objective, of_episodes)

    def scalarized(self, rewards: np.ndarray) -> np.ndarray:
        """Returns rewards or returns as scalars, `[N]` from `[N]` or `[N, R]`, with the policy's reward weights."""
        if rewards.ndim == 1:
            return rewards
        weights = self._algorithm.reward_weights
        return rewards.sum(-1) if weights is None else rewards @ weights.cpu().numpy().astype(np.float64)

    def generate_test_episodes(self, num_episodes: int, seed: int = 0, sample: bool = False) -> list[Episode]:
        """Returns the episodes of `evaluate` as a list; see `test_episodes`."""
        return list(self.test_episodes(num_episodes, seed, sample))

    @checked
    def test_episodes(self, num_episodes: int, seed: NonNegativeInt = 0, sample: bool = False) -> Iterator[Episode]:
        """Yields the episodes of `evaluate` in order, each as soon as it and all earlier episodes are complete.

        Episode k is bitwise the same for any number of environments. Environments that cannot be seeded separately
        (`Environment.seeds_rows`) are seeded together by `seed`.

        Args:
          num_episodes: number of whole episodes, at least 1.
          seed: seed of the first episode; episode k starts from `reset(seed=seed + k)`.
          sample: whether to act with `rollout_step`, with a random generator for each episode; if not, with
            `predict_step`.

        Yields:
          Episode with the id `str(k)`, as numpy arrays in the environment's own units: raw observations, including the
          true final observation (float64 as float32); executed actions in the action space's dtypes; raw float32
          rewards.

        Raises:
          UsageError: as for `evaluate`; or the evaluator began other episodes before all episodes were read.
        """
        self._check_number(num_episodes)
        self._under_way = rows = self._rows(num_episodes, seed, sample)
        kept = EpisodeAccumulator(self.environment.num_envs)
        spaces = self.environment.observation_space, self.environment.action_space
        whole: dict[int, Episode] = {}
        generators = None
        with contextlib.closing(rows):  # closing `rows` returns a borrowed environment
            for k in range(num_episodes):
                if self._under_way is not rows:
                    raise UsageError(
                        "the evaluator began other episodes before all episodes of test_episodes had been read; read "
                        "those episodes first, or use another evaluator"
                    )
                # Between two episodes, the caller's random state and grad mode are restored.
                with self._acting(seed, sample):
                    if generators is not None:
                        random_state.set_rng_state(generators)
                    while k not in whole:
                        episode, time_step, _ = next(rows)
                        kept.add(nest.arrays(time_step), np.flatnonzero(episode >= 0).tolist())
                        ended = nest.as_array(time_step.step_type) == StepType.LAST
                        for lane in np.flatnonzero(ended & (episode >= 0)).tolist():
                            whole[int(episode[lane])] = episode_of(int(episode[lane]), kept.take(lane), *spaces)
                    generators = random_state.rng_state()
                yield whole.pop(k)

    def close(self) -> None:
        self.environment.close()

    @property
    def _refills(self) -> bool:
        """True if an environment runs further episodes after its first one."""
        return self.environment.seeds_rows

    def _new_policy(self, sample: bool) -> PaddedPolicy:
        return PaddedPolicy(self._algorithm, self._transforms, self.environment.num_envs, sample)

    def _row(self, episode: np.ndarray, time_step: TimeStep, reward: np.ndarray, with_value: bool) -> FilmRow:
        """Returns the argument of `on_row`; `reward` is `[B, R]`. Values are None if observations lack leaves."""
        value = self._policy.value(time_step) if with_value and self._policy and not self._trained_spec else None
        ended = time_step.step_type.cpu().numpy() == StepType.LAST
        units = ActionUnits(self.environment.action_space)
        action = units.stretch(nest.map(nest.as_array, time_step.prev_action))
        return FilmRow(episode, self.scalarized(reward), action, value, ended)

    def _check_number(self, num_episodes: int) -> None:
        if num_episodes < 1:
            raise UsageError(f"the evaluator was asked for {num_episodes} episodes; it must be at least 1")
        num_envs = self.environment.num_envs
        if num_episodes > num_envs and not self.environment.seeds_rows:
            raise UsageError(
                f"the evaluator was asked for {num_episodes} episodes, but its {num_envs} environments cannot be "
                "seeded individually; build the evaluator with make_evaluator, which makes one environment for each "
                "episode"
            )

    @contextlib.contextmanager
    def _acting(self, seed: int, sample: bool) -> Iterator[None]:
        """Within the context, acts without gradient in eval mode, with all generators seeded by `seed`.

        Generators and modes are restored on exit. With `sample`, modules explore as in rollouts.
        """
        with torch.no_grad(), in_eval_mode(self._algorithm, sample), random_state.preserved():
            random_state.seed_all(seed)
            yield

    def _rows(self, num_episodes: int, seed: int, sample: bool) -> Generator[tuple[np.ndarray, TimeStep, bool]]:
        """Runs the episodes and yields their rows. Call it within `_acting`.

        Yields:
          After every reset and step: the index of each environment's episode, or -1; the new rows `[B]`; whether the
          rows come from a step. An episode that has just finished still has its index.
        """
        environment, num_envs = self.environment, self.environment.num_envs
        episode = np.where(np.arange(num_envs) < num_episodes, np.arange(num_envs), -1)
        started = min(num_envs, num_episodes)
        self.num_cut = 0
        length = np.zeros(num_envs, np.int64)  # lengths so far of the episodes under way
        pace = _Pace(self.log, num_episodes)
        # If possible, only environments with an episode are reset: each reset may advance an environment's test set.
        rows = (episode >= 0,) if environment.can_rest else ()
        with calling(f"{environment.name}.reset"):
            time_step = nest.tensors(environment.reset(_seeds(episode, seed), *rows))
        if environment.can_rest:
            environment.rest(episode < 0)
        stepping = calling(f"{environment.name}.step")
        policy = self._policy = self._new_policy(sample)
        for k in range(started):
            policy.begin(k, seed + k)
        yield episode, time_step, False
        while (episode >= 0).any():
            refuse_nonfinite(time_step, episode)
            seen = time_step if self._trained_spec is None else completed(time_step, self._trained_spec)
            action = policy.act(seen, episode)
            with stepping:
                time_step = nest.tensors(environment.step(environment.convert(action)))
            length += 1
            finished = time_step.step_type.cpu().numpy() == StepType.LAST
            cut = (length >= self.max_length) & (episode >= 0) & ~finished
            if cut.any():
                time_step, finished = _truncated(time_step, cut), finished | cut
                self._report_cut(int(cut.sum()), num_episodes)
            pace.step(started - int((episode >= 0).sum()))
            yield episode, time_step, True
            if not finished.any():
                continue
            length[finished] = 0
            episode = episode.copy()
            for lane in np.flatnonzero(finished):
                refill = self._refills and started < num_episodes
                episode[lane] = started if refill else -1
                if refill:
                    policy.begin(started, seed + started)
                started += refill
            time_step = self._after_end(time_step, finished, episode, seed)
            if (episode[finished] >= 0).any():
                yield np.where(finished, episode, -1), time_step, False

    def _report_cut(self, count: int, num_episodes: int) -> None:
        if not self.num_cut:
            remedy = ""
            if self.environment.lacks_limit:
                limit = "make_environment.env_kwargs = {'max_episode_steps': 1000}"
                remedy = f"; {self.environment.name} is registered without a time limit, and {limit} sets one"
            self.log(
                f"An episode was cut at {self.max_length:,} steps and counts as truncated; more may follow "
                f"(Trainer.max_evaluation_length){remedy}"
            )
        self.num_cut += count

    def _after_end(self, time_step: TimeStep, finished: np.ndarray, episode: np.ndarray, seed: int) -> TimeStep:
        """Returns the next rows after some episodes have ended; environments without a further episode pause."""
        if self.environment.can_rest:
            self.environment.rest(episode < 0)
            finished = finished & (episode >= 0)
            if not finished.any():
                return time_step
        if self.environment.resets_rows:
            with calling(f"{self.environment.name}.reset"):
                first = nest.tensors(self.environment.reset(_seeds(episode, seed), finished))
            return nest.where(torch.from_numpy(finished), first, time_step)
        resets = nest.tensors(self.environment.take_resets())
        return time_step if resets is None else nest.where(resets[0], resets[1], time_step)


class _Pace:
    """Logs the progress of an evaluation every `PROGRESS_SECONDS`."""

    def __init__(self, log: Callable[[str], Any], num_episodes: int):
        self._log = log
        self._num_episodes = num_episodes
        self._steps = 0
        self._began = time.monotonic()
        self._next = self._began + PROGRESS_SECONDS

    def step(self, num_ended: int) -> None:
        self._steps += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PROGRESS_SECONDS
            self._log(
                f"Evaluating: {num_ended} of {self._num_episodes} episodes have ended after {now - self._began:.0f} s "
                f"and {self._steps:,} steps of each environment"
            )


def _check_spaces(environment: Environment, algorithm: RLAlgorithm, transforms: Transforms) -> None:
    """Raises UsageError if the environment's spaces differ from the policy's; the observation may lack leaves."""
    trained = {
        "observation_spec": transforms.raw_observation_spec,
        "action_spec": algorithm.action_spec,
        "reward_spec": transforms.raw_reward_spec,
    }
    for name, spec in trained.items():
        own = getattr(environment, name)
        if own != spec and not (name == "observation_spec" and _is_part(own, spec)):
            raise UsageError(
                f"the environments for evaluation (Trainer.evaluation_environment or Evaluate.environment) have the "
                f"{name} {describe(own)}, but the policy trains on {describe(spec)}; make the two equal"
            )


def _is_part(spec: Nest, whole: Nest) -> bool:
    """Returns whether `whole` has all leaves of `spec`, at the same paths."""
    leaves = dict(zip(nest.keys(whole), nest.leaves(whole)))
    return all(keys in leaves and leaves[keys] == leaf for keys, leaf in zip(nest.keys(spec), nest.leaves(spec)))


def _truncated(time_step: TimeStep, rows: np.ndarray) -> TimeStep:
    """Returns the time step with step type LAST where `rows`, `[B]` bool, is True; the discount stays 1."""
    mask = torch.from_numpy(rows).to(time_step.step_type.device)
    return time_step._replace(step_type=time_step.step_type.masked_fill(mask, StepType.LAST))


def print_to_stderr(line: str) -> None:
    """Prints a line to standard error, unless other code, such as an environment, has closed that stream."""
    with contextlib.suppress(ValueError):
        print(line, file=sys.stderr, flush=True)


def report_unmatched(globs: list[str], reported: list[str], log: Callable[[str], Any]) -> list[str]:
    """Logs globs that matched no number in an evaluation, unless they were reported; returns all reported globs."""
    if new := [glob for glob in globs if glob not in reported]:
        shown = ", ".join(map(repr, new))
        log(f"Trainer.evaluation_infos has {shown}, which matched no number in the infos at the ends of the episodes")
    return reported + new


def episode_of(k: int, rows: TimeStep, observation_space: Space, action_space: Space) -> Episode:
    """Returns rows `[T+1, 1, ...]`, FIRST to LAST, as episode k in the units of gymnasium's spaces."""
    rows = nest.map(lambda leaf: leaf[:, 0].numpy(), rows)
    terminated = rows.discount[-1] == 0
    # `prev_action` of a row is the action executed before the row.
    executed = nest.map(lambda leaf: leaf[1:], rows.prev_action)
    return Episode(
        str(k),
        ObservationUnits(observation_space).to_environment(rows.observation),
        ActionUnits(action_space).stretch(executed),
        rows.reward[1:],
        *ends(len(rows.reward) - 1, terminated, not terminated),
    )


def _seeds(episode: np.ndarray, seed: int) -> list[int | None]:
    return [seed + int(k) if k >= 0 else None for k in episode]
