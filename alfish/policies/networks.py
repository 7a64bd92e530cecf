"""Builds and loads the networks of a policy, an algorithm and its transforms, and passes rows of unrolls to them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.acting import without_states
from alfish.algorithms.contract import check_initial_state, check_registered
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, StepType, in_line
from alfish.errors import UsageError
from alfish.errors.user_code import check_methods
from alfish.nest import Nest
from alfish.parameters.parts import build
from alfish.runs.loading import load_model
from alfish.transforms import Transforms


def make_networks(
    algorithm: Callable[..., RLAlgorithm],
    transforms: Sequence[Callable[..., Any]],
    observation_spec: Nest,
    action_spec: Nest,
    reward_spec: spaces.Box,
    device: torch.device | str,
) -> tuple[RLAlgorithm, Transforms]:
    """Builds an algorithm and its transforms, with initial parameters.

    Args:
      algorithm: class or factory of the algorithm; called with (observation_spec, action_spec, reward_spec).
      transforms: classes or factories of transforms, in the order in which they are applied.
      observation_spec, action_spec, reward_spec: specs of the environment.
      device: device of the algorithm and the transforms.

    Raises:
      UsageError: a factory makes an object of the wrong class, or an object that breaks its contract.
    """
    if inspect.isclass(algorithm) and not issubclass(algorithm, RLAlgorithm):
        raise UsageError(f"Trainer.algorithm is {algorithm.__name__}, which is not derived from RLAlgorithm")
    chain = Transforms(transforms, observation_spec, reward_spec, action_spec).to(device)
    specs = chain.observation_spec, action_spec, chain.reward_spec
    made = build(algorithm, RLAlgorithm, "Trainer.algorithm", *specs).to(device)
    check_registered(made)
    check_methods(made, RLAlgorithm)
    check_initial_state(made)
    return made, chain


def load_networks(
    algorithm: RLAlgorithm, transforms: Transforms, state: Mapping[str, Any], root_dir: str | Path
) -> None:
    """Loads the weights and statistics of a checkpoint.

    Args:
      algorithm, transforms: modules whose weights and statistics are overwritten.
      state: state in the checkpoint, see `Trainer.state_dict`.
      root_dir: directory of the run, for the message.

    Raises:
      UsageError: the state does not fit the modules.
    """
    name = type(algorithm).__name__
    trained, here = (
        (state.get("spaces") or {}).get("reward_names", []),
        list(specs.reward_names(transforms.raw_reward_spec)),
    )
    if trained != here and sorted(trained) == sorted(here):
        raise UsageError(
            f"{root_dir} was trained with the rewards {', '.join(trained)}, but here they are {', '.join(here)}; list "
            "the rewards in the run's order in make_environment.rewards"
        )
    load_model(algorithm, state["algorithm"], f"the {name} configured for {root_dir}")
    load_model(transforms, state["transforms"], f"the transforms configured for {root_dir}")


def chosen_policy(names: Sequence[str], name: str | None, root_dir: str | Path) -> str:
    """Returns the name of the policy that a caller asks for.

    Args:
      names: names of the policies; only '' in a run of one policy.
      name: name that the caller gave; None means the only policy.
      root_dir: directory of the run, for messages.

    Raises:
      UsageError: there is no such policy, or `name` is None and there are several policies.
    """
    if name is None and len(names) == 1:
        return names[0]
    if name is not None and name in names:
        return name
    if list(names) == [""]:
        raise UsageError(f"{root_dir} has one policy, which has no name; leave out policy={name!r}")
    said = "name one" if name is None else f"{name!r} is not one of them"
    raise UsageError(f"{root_dir} has the policies {', '.join(names)}; {said}, for example policy={names[0]!r}")


def state_of_policy(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the part of a checkpoint's state that `load_networks` needs for a policy; '' names the only policy."""
    if not name:
        return state
    prefix = f"{name}."

    def own(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    parts = {key: own(state[key]) for key in ("algorithm", "transforms")}
    return {**parts, "spaces": state["spaces"]["policies"][name]}


def observe(algorithm: RLAlgorithm, transforms: Transforms, experience: Experience, row_0_may_be_new: bool) -> None:
    """Calls `observe` of the transforms with the rows of an unroll; see `after_iteration` for the arguments."""
    _observe(algorithm, transforms, _in_line(experience), row_0_may_be_new)


def after_iteration(
    algorithm: RLAlgorithm, transforms: Transforms, experience: Experience, observes: bool, row_0_may_be_new: bool
) -> None:
    """Passes the rows of an unroll to an algorithm, and to its transforms if they observe all unrolls.

    Args:
      algorithm, transforms: networks that trained on the rows.
      experience: rows as the unroller returned them.
      observes: whether the transforms observe the rows.
      row_0_may_be_new: whether row 0 of a column may be new, in place of the last row of the previous unroll, because
        the column had a gap there or is collected by another worker.
    """
    experience = _in_line(experience)
    if algorithm.overrides("after_iteration"):
        experience = nest.to(experience, algorithm.progress.device)
        with torch.no_grad():
            seen = transforms.transform(experience.time_step, experience.transform_state)
            algorithm.after_iteration(experience._replace(time_step=seen))
    if observes:
        _observe(algorithm, transforms, experience, row_0_may_be_new)


def _in_line(experience: Experience) -> Experience:
    return without_states(in_line(nest.tensors(experience)).experience)


def _observe(algorithm: RLAlgorithm, transforms: Transforms, experience: Experience, row_0_may_be_new: bool) -> None:
    # On-policy, row 0 was the last row of the previous unroll; statistics count each row once.
    time_step, num_seen = experience.time_step, 1 if algorithm.on_policy else 0
    if algorithm.on_policy and row_0_may_be_new:
        # Rows that the next unroll repeats are left out instead: a column's last row, unless it is the LAST row of an
        # episode.
        time_step, num_seen = time_step._replace(step_type=_once(time_step.step_type)), 0
    transforms.observe(time_step, experience.transform_state, num_seen)


def _once(step_type: torch.Tensor) -> torch.Tensor:
    """Returns the step types of an on-policy unroll, with PAD for rows that are counted with another unroll."""
    following = torch.cat([step_type[1:], torch.full_like(step_type[:1], StepType.PAD)])
    is_repeated = (following == StepType.PAD) & (step_type <= StepType.MID)
    is_repeated[0] |= step_type[0] == StepType.LAST
    return torch.where(is_repeated, StepType.PAD, step_type).to(step_type.dtype)
