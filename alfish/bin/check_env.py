"""Reports whether alfish can train on an environment, and which algorithms fit.

  alfish check-env --env_id=CartPole-v1
  alfish check-env --env_id=my_package.my_module:MyEnv-v0 --env_kwargs="{'difficulty': 2}"
  alfish check-env --env_id=my_package.my_module:MyEnv      # a class, or a function that makes an environment
  alfish check-env --env_id=minigrid:MiniGrid-Empty-8x8-v0 --wrappers=minigrid.wrappers:ImgObsWrapper
  alfish check-env --gin_file=my_task.gin                   # the environment that its make_environment makes
  alfish check-env --env_id=Taxi-v3 --gin_param="make_environment.action_mask = 'info:action_mask'"
  alfish check-env --game=mpe2.simple_tag_v3                # a game with several agents, as for make_games

The command builds the environment, examines its spaces, and acts at random for some episodes. It reports observations
outside their space, non-finite values, resets that ignore their seed, episodes that never end, vector rewards, and any
exception. Warnings name properties that make learning hard: scales, bounds, time limits. At the end it suggests a first
run: an algorithm, the command, and the approximate time on this machine.
"""

import contextlib
import importlib
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from absl import flags
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

import alfish.algorithms
from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.bin import check_functional, check_games, shared_flags
from alfish.bin.first_run import Task, print_algorithms, refusals, suggestions
from alfish.bin.observed import Observed
from alfish.configuration import reading, sentences
from alfish.environments import Environment, FunctionalEnvironment, make_environment
from alfish.environments.games import Games, make_games
from alfish.environments.members import single_environments
from alfish.environments.objectives import declared
from alfish.errors import UsageError, first_line
from alfish.errors.user_code import CodeError, calling, package_of, refuse_default_dtype
from alfish.parameters import imports
from alfish.runs import random_state

LONGEST_SECONDS = 4.0  # seconds after which random steps in a slow environment stop
MORE_STEPS = 10  # largest number of random steps until an episode ends, as a multiple of --num_steps
NUM_COMPARED = 64  # number of steps over which environments with different seeds are compared

FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "env_id",
    None,
    "Gymnasium id (CartPole-v1, my_module:MyEnv-v0), or class (my_module:MyEnv).",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "game",
    None,
    "Game of several agents: module (mpe2.simple_tag_v3) or class (my_module:MyGame).",
    flag_values=FLAGS,
)
shared_flags.define_env_kwargs(FLAGS)
flags.DEFINE_multi_string(
    "wrappers",
    [],
    "A wrapper, such as gymnasium.wrappers:FlattenObservation; repeatable, innermost first.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "gin_file", [], "Gin file whose make_environment is used; the other flags override it.", flag_values=FLAGS
)
flags.DEFINE_multi_string("gin_param", [], "A gin binding, as for `alfish train`; repeatable.", flag_values=FLAGS)
flags.DEFINE_integer(
    "num_steps",
    1000,
    "Number of random steps; up to ten times as many if no episode ends earlier.",
    1,
    flag_values=FLAGS,
)


def main(flag_values: flags.FlagValues) -> int:
    if not (flag_values.env_id or flag_values.game or flag_values.gin_file or flag_values.gin_param):
        raise UsageError("--env_id is missing: name an environment, as in --env_id=CartPole-v1")
    task, found = _named_task(flag_values)
    games = _games(task, found)
    if games is not None:
        return check_games.report(games, flag_values.num_steps, algorithms())
    environment: Any = _make(task, found)
    print(f"observation  {specs.describe(environment.observation_spec)}")
    print(f"action       {specs.describe(environment.action_spec)}  (the algorithm's units)")
    complaints: list[str] = []
    speed = 0.0
    in_tensors = isinstance(environment, FunctionalEnvironment)
    if in_tensors:
        complaints, speed = check_functional.examine(environment)
        environment = check_functional.as_gymnasium(environment)
    observed = Observed(environment)
    complaints += list(_examined(environment, flag_values.num_steps, observed))
    environment.close()
    if not complaints and not environment.seeds_rows and _ignores_seeds(task, found):
        observed.remarks.append(
            "two seeds give the same episodes: either they are deterministic, or reset(seed=) has no effect; if the "
            "class is seeded in its constructor, give the constructor an argument `seed`"
        )
    for complaint in complaints:
        print(f"problem      {complaint}")
    for warning in observed.warnings():
        print(f"warning      {warning}")
    reasons = refusals(algorithms(), environment)
    print_algorithms(reasons)
    able = [name for name, reason in reasons.items() if not reason]
    if able and complaints:
        problems, be = ("problem", "is") if len(complaints) == 1 else ("problems", "are")
        package = package_of(environment.env)
        if package and observed.lengths:
            print(
                f"note         the {problems} {be} in the installed package {package}: fix it, tell its authors, or "
                "correct it with a wrapper (--wrappers=my_module:MyWrapper); training may still work"
            )
        else:
            print(f"next         fix the {problems}, and check again")
            able = []
    if able:
        for head, words in suggestions(task, environment, able, speed or observed.steps_per_second, in_tensors):
            if head == "speed" and speed:  # a line about many environments has been printed
                continue
            print(f"{head:<12} {words}", flush=True)
    return 0 if able and not complaints else 1


def _named_task(flag_values: flags.FlagValues) -> tuple[Task, bool]:
    """Returns the environment that the flags describe, and whether --env_id or --game names it."""
    bindings = list(flag_values.gin_param)
    env_id, game = flag_values.env_id or "", flag_values.game
    if game:
        if env_id or flag_values.wrappers:
            other = "--env_id" if env_id else "--wrappers"
            raise UsageError(
                f"--game is {game!r}, but {other} is for environments with one agent; give only one of the two flags"
            )
        bindings += ["import alfish.environments.games", f"make_games.game = {game!r}"]
    if env_id.startswith("@") and {".", ":"} & set(env_id):
        _named(env_id[1:], "--env_id")
        env_id = _colon(env_id[1:])
    if env_id:
        bindings.append(f"make_environment.env_id = {env_id if env_id.startswith('@') else repr(env_id)}")
    if flag_values.env_kwargs is not None:
        name = "make_games.game_kwargs" if game else "make_environment.env_kwargs"
        bindings.append(f"{name} = {shared_flags.env_kwargs(flag_values)!r}")
    if flag_values.wrappers:
        for wrapper in flag_values.wrappers:
            _named(wrapper, "--wrappers")
        bindings.append(f"make_environment.wrappers = {[*map(_colon, flag_values.wrappers)]!r}")
    return Task(flag_values.gin_file, bindings), bool(env_id or game)


def _games(task: Task, is_flag: bool) -> Games | None:
    """Returns two games if the task is a game of several agents, else None."""
    with reading.preserved(), _named_by_flag(is_flag):
        found = reading.read(task.files, task.bindings)
        is_game = "game" in reading.bound("alfish.environments.make_games", "game")
        if not is_game or "env_id" in reading.bound("alfish.environments.make_environment", "env_id"):
            return None
        with sentences.complete(found):
            games = make_games(num_games=2)
    refuse_default_dtype(f"the constructor of {games.name}")
    return games


def _make(task: Task, is_flag: bool, seed: int = 0) -> Environment:
    """Returns two environments of the task, built for evaluation."""
    with reading.preserved(), _named_by_flag(is_flag):
        found = reading.read(task.files, task.bindings)
        with sentences.complete(found):
            made = make_environment(num_envs=2, evaluation=True, seed=seed)
    refuse_default_dtype(f"the constructor of {made.name}")
    return made


def _ignores_seeds(task: Task, is_flag: bool) -> bool:
    """Returns whether environments with two different seeds return equal results for the same random actions."""
    environments = [_make(task, is_flag, seed) for seed in (0, 1)]
    spec = environments[0].action_spec
    try:
        rows = [environment.reset() for environment in environments]
        for _ in range(NUM_COMPARED):
            if not all(map(torch.equal, *(nest.leaves(nest.tensors((row.observation, row.reward))) for row in rows))):
                return False
            actions = nest.arrays(specs.sample(spec, environments[0].num_envs))
            rows = [environment.step(environment.convert(actions)) for environment in environments]
        return True
    except UsageError:  # a mask forbids an action
        return False
    finally:
        for environment in environments:
            environment.close()


@contextlib.contextmanager
def _named_by_flag(is_flag: bool) -> Iterator[None]:
    """Makes messages name the flag --env_id or --game instead of the gin parameter, if the flag is given."""
    try:
        yield
    except UsageError as error:
        if not is_flag:
            raise
        words = re.sub(r"make_games\.game\b", "--game", str(error))
        raise UsageError(words.replace("make_environment.env_id", "--env_id")) from error


def _colon(where: str) -> str:
    """Returns `module:Name` for `module.Name`."""
    return ":".join(where.replace(":", ".").rsplit(".", 1))


def _named(where: str, flag: str) -> Callable[..., Any]:
    """Returns the class or function at `module.Name` or `module:Name`."""
    module, _, name = where.replace(":", ".").rpartition(".")
    found = getattr(imports.import_named(module, flag), name, None) if module else None
    if not callable(found):
        raise UsageError(f"{flag} is {where!r}, but there is no such class; write my_module:MyClass")
    return found


def _examined(environment: Any, num_steps: int, observed: Observed) -> Iterator[str]:
    """Yields the sentences of `examine`, and a sentence about an exception that the environment raises."""
    try:
        yield from examine(environment, num_steps, observed)
    except UsageError:  # already a sentence of alfish
        raise
    except CodeError as error:
        _trace(error)
        yield str(error)
    except Exception as error:
        _trace(error)
        yield (
            f"{type(error).__name__}: {first_line(error)}; reset must return (observation, info), and step must return "
            "(observation, reward, terminated, truncated, info), with every part of the observation as declared by its "
            "space; --verbosity=1 shows where the error occurred"
        )


def _trace(error: Exception) -> None:
    if FLAGS.verbosity:
        traceback.print_exception(error)


def examine(environment: Any, num_steps: int, observed: Observed) -> Iterator[str]:
    """Acts at random in two environments built for evaluation, and yields a sentence for each kind of fault.

    With an action mask, only allowed actions are taken. In a slow environment, acting stops earlier, but not before an
    episode has ended or `num_steps` steps were taken.

    Args:
      environment: vector environment of two environments.
      num_steps: number of steps of each environment; up to `MORE_STEPS` times as many if no episode ends earlier.
      observed: object that collects statistics of the steps.
    """
    env, space = environment.env, environment.observation_space
    units = specs.ActionUnits(environment.action_space)
    masks = specs.mask_reader(environment.observation_spec, environment.action_spec)

    def random_action(observation: Any) -> Any:
        allowed = None if masks is None else masks(nest.tensors(observation))
        action = units.to_environment(nest.arrays(specs.sample(environment.action_spec, env.num_envs, allowed)))
        return environment.convert(action)

    observations = [nest.tensors(environment.reset([5, 6]).observation) for _ in range(2)]
    if any(not torch.isfinite(leaf.float()).all() for leaf in nest.leaves(observations[0])):
        yield "a reset returns an observation that is not finite"
    elif any(not torch.equal(a, b) for a, b in zip(*map(nest.leaves, observations))):
        words = "two resets with the same seed give different observations, so evaluations cannot be repeated"
        if environment.seeds_rows:
            yield words
        else:
            observed.remarks.append(f"{words}; {environment.name} does not seed its episodes with reset(seed=)")
    batched_space = batch_space(getattr(env, "single_observation_space", space), env.num_envs)
    random_state.seed_torch(0)  # seed of the actions
    observation = nest.arrays(observations[1])
    if not hasattr(env, "single_observation_space"):  # a simulator may take seconds to compile its first step
        with random_state.apart(), calling(f"{environment.name}.step"):
            observation = nest.map(_on_host, env.step(random_action(observation))[0])
    said_outside = False
    for number in range(MORE_STEPS * num_steps):
        if (observed.lengths or number >= num_steps) and observed.seconds > LONGEST_SECONDS:
            break
        if observed.lengths and number >= num_steps:
            break
        action = random_action(observation)
        observed.begin()
        with random_state.apart(), calling(f"{environment.name}.step"):
            results = env.step(action)
        observed.end()
        observation, reward, terminated, truncated = (nest.map(_on_host, part) for part in results[:4])
        faults = (specs.outside(one, space, "observation") for one in iterate(batched_space, observation))
        if not said_outside and (fault := next(filter(None, faults), None)):
            said_outside = True
            yield f"an observation is outside its space: {fault}"
        if not np.isfinite(reward).all():
            yield f"a reward is not finite: {reward}"
            return
        done = terminated | truncated
        observed.add(observation, reward, terminated, truncated)
        if done.any() and environment.resets_rows:  # without `resets_rows`, env.step resets them
            with random_state.apart():
                observation = environment.reset([None, None], done).observation
    refuse_default_dtype(f"{environment.name}.reset or step")
    singles = single_environments(env) if isinstance(env, VectorEnv) and masks is None else []
    for single in singles[:1]:
        with calling(f"{environment.name}.step"):
            observed.remarks += dict.fromkeys(mistyped(single))
    if not observed.lengths:
        yield (
            f"no episode ended in {observed.num_steps:,} random steps, so there are no returns to report; if episodes "
            f"are longer, raise --num_steps to {MORE_STEPS * observed.num_steps}, otherwise set a time limit with "
            "make_environment.wrappers = [['gymnasium.wrappers:TimeLimit', {'max_episode_steps': 1000}]]"
        )


def mistyped(env: gymnasium.Env) -> Iterator[str]:
    """Takes one step in one environment, and yields a sentence for each result that has a wrong type.

    Such a result is converted in each step, and storing it may fail.
    """
    with random_state.apart():
        first, _ = env.reset(seed=5)
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
    for name, value in (("reset", first), ("step", observation)):
        expected = create_empty_array(env.observation_space, 1)
        for (path, leaf), like in zip(nest.named_leaves(value, "observation"), nest.leaves(expected)):
            if not isinstance(leaf, (np.ndarray, np.generic, int)) or np.asarray(leaf).dtype.kind != like.dtype.kind:
                dtype = f" of dtype {leaf.dtype}" if isinstance(leaf, (np.ndarray, np.generic)) else ""
                yield f"{name} returns the {path} as {type(leaf).__name__}{dtype}, but its space has dtype {like.dtype}"
    if not declared(env) and not isinstance(reward, (int, float, np.integer, np.floating)):
        yield f"step returns the reward as {type(reward).__name__}, not as a number"
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            yield f"step returns {name} as {type(flag).__name__}, not as bool"


def _on_host(leaf: Any) -> np.ndarray:
    return leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


def algorithms() -> list[type[RLAlgorithm]]:
    """Returns the shipped algorithms that can be checked, after importing their modules."""
    for module in pkgutil.iter_modules(alfish.algorithms.__path__):
        # Algorithms in subpackages need an expert or a second algorithm; they cannot be checked here.
        if not module.ispkg:
            importlib.import_module(f"alfish.algorithms.{module.name}")
    found: set[type[RLAlgorithm]] = set()  # a set, because a class with several bases occurs several times
    frontier: list[type[RLAlgorithm]] = [*RLAlgorithm.__subclasses__()]
    while frontier:
        algorithm = frontier.pop()
        frontier += algorithm.__subclasses__()
        has_loss = algorithm.calc_loss is not RLAlgorithm.calc_loss  # classes without a loss are base classes
        if has_loss and algorithm.__module__.rpartition(".")[0] == "alfish.algorithms":
            found.add(algorithm)
    return sorted(found, key=lambda algorithm: algorithm.__name__)
