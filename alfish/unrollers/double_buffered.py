"""The unroller that acts for one group of environments while the other groups step."""

from collections.abc import Callable
from typing import Annotated, Any

import gin
import numpy as np

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, TimeStep
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.errors.user_code import refuse_default_dtype
from alfish.nest import Nest
from alfish.parameters import NonNegativeInt, Range, checked
from alfish.parameters.parts import build, parameter_names
from alfish.runs.random_state import apart
from alfish.runs.timer import Timer
from alfish.transforms import Transforms
from alfish.unrollers.sync import Steps, SyncUnroller, UnrollStart
from alfish.unrollers.unroller import Unroller
from alfish.unrollers.workers.segments import records_in_columns, side_by_side


@gin.configurable(module="alfish.unrollers")
@checked
class DoubleBufferedUnroller(Unroller):
    """Steps environments in groups: while the environments of one group step, the policy acts for the next group.

    This hides the time of the policy, or of the environments if they are faster. It needs environments that step in
    other processes or in threads (`make_environment.vectorization` 'async' or 'envpool'). Other environments make the
    same rows without a gain in time. The columns of an unroll are in the order of the groups.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`. The environment is closed, because each
        group builds its own environments.
      num_groups: number of groups, which must divide the number of environments.
      numpy_policy: number of vector steps after which the policy acts with numpy, see `SyncUnroller`.
    """

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        num_groups: Annotated[int, Range(2)] = 2,
        numpy_policy: NonNegativeInt | None = 0,
    ):
        super().__init__(environment, algorithm, transforms)
        self._num_groups, self._numpy_policy = num_groups, numpy_policy
        self._groups: list[Group] = []  # empty before the first unroll
        self._timer: Timer | None = None
        self._keeps_infos = True
        self._num_calls = 0  # number of the last call that the groups have received, see `EnvironmentCall`
        self._make_environment: Callable[..., Environment]
        self._seed: int

    @property
    def stepping(self) -> str:
        return f"in {self._num_groups} groups, {self.environment.stepping or 'in this process'}"

    def bind(self, make_environment: Callable[..., Environment], unroll_length: float, seed: int) -> None:
        super().bind(make_environment, unroll_length, seed)
        self._make_environment, self._seed = make_environment, seed

    def check_learners(self) -> None:
        """Raises UsageError if the number of groups does not divide the number of environments."""
        if self.num_envs % self._num_groups:
            raise UsageError(
                f"DoubleBufferedUnroller.num_groups is {self._num_groups}, which does not divide the {self.num_envs} "
                "environments; set make_environment.num_envs to a multiple of it"
            )

    def ignore_infos(self) -> None:
        self._keeps_infos = False

    def time(self, timer: Timer) -> None:
        self._timer = timer

    def unroll(self, length: int, at_random: bool = False) -> Experience:
        """Collects the rows of `length` vector steps of each group; see `SyncUnroller.unroll`."""
        self._start()
        self._deliver_calls()
        for group in self._groups:
            group.open(at_random, self.policy_version)
        for _ in range(length):
            for group in self._groups:
                group.end_step()
                group.begin_step()
        for group in self._groups:
            group.end_step()
        parts = [group.closed(length) for group in self._groups]
        self.records = records_in_columns([[group.records] for group in self._groups])  # type: ignore[list-item]
        whole = side_by_side([nest.tensors(part) for part in parts])
        return nest.map(self._groups[0].environment.convert, whole)

    def state_dict(self) -> dict[str, Any]:
        groups = [group.state_dict() for group in self._groups]
        return {"policy_version": self.policy_version, "groups": groups, **self.calls_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state. Episodes that environments cannot continue are truncated.

        New episodes begin if the state was saved by another unroller, or with another number of groups.
        """
        self.policy_version = state["policy_version"]
        self.repeat_calls(state)
        groups = state.get("groups", ())
        if len(groups) != self._num_groups:
            return
        self._start()
        self._num_calls = max((made.number for made in self.calls()), default=0)
        for group, own in zip(self._groups, groups):
            group.load_state_dict(own)

    def break_off(self) -> None:
        for group in self._groups:
            group.break_off()

    def close(self) -> None:
        for group in self._groups:
            group.close()
        if not self._groups:
            self.environment.close()

    def _start(self) -> None:
        """Makes the groups, if they do not exist yet."""
        if self._groups:
            return
        self.environment.close()
        self.environment.delivers_calls = False
        size = self.num_envs // self._num_groups
        for index in range(self._num_groups):
            group = self._make_group(index, size)
            self._groups.append(group)
            if group.num_envs != size:
                raise UsageError(
                    f"the environment factory made {group.num_envs} environments, but {size} are needed for each of "
                    f"{self._num_groups} groups; it must take the keyword num_envs"
                )

    def _make_group(self, index: int, size: int) -> "Group":
        seed = int(np.random.SeedSequence(self._seed, spawn_key=(3, index)).generate_state(1)[0] >> 1)
        known = {"index": index, "device": str(self._algorithm.progress.device)}
        taken = parameter_names(self._make_environment)
        arguments: dict[str, Any] = {name: value for name, value in known.items() if name in taken}
        with apart():
            environment = build(
                self._make_environment, Environment, "Trainer.environment", seed=seed, num_envs=size, **arguments
            )
        refuse_default_dtype(f"the constructor of {environment.name}")
        environment.env_id += index * size
        group = Group(environment, self._algorithm, self._transforms, self._numpy_policy)
        group.shown, group.stores_states = self.shown, self.stores_states
        if not self._keeps_infos:
            group.ignore_infos()
        if self._timer is not None:
            group.time(self._timer)
        return group

    def _deliver_calls(self) -> None:
        for made in self.calls():
            if made.number > self._num_calls:
                for group in self._groups:
                    group.environment.call(made.name, *made.arguments)
                self._num_calls = made.number


class Group(SyncUnroller):
    """`SyncUnroller` with steps in two halves, `begin_step` and `end_step`, in an unroll from `open` to `closed`."""

    # The row, the policy's step and the transforms' next state of the step that has begun; None if no step has begun.
    _acted: tuple[TimeStep, Any, Nest] | None = None

    def open(self, at_random: bool, policy_version: int) -> None:
        self.policy_version = policy_version
        self.start()
        self._begun: UnrollStart = self._begin(at_random)
        self._made = Steps([], [], [])

    def begin_step(self) -> None:
        """Acts, and begins to execute the actions."""
        step, transform_state = self.act()
        self.environment.begin(self.environment.convert(step.output))
        self._acted = self.time_step, step, transform_state

    def end_step(self) -> None:
        """Ends the step that `begin_step` has begun, if there is one."""
        if self._acted is None:
            return
        (seen, step, transform_state), self._acted = self._acted, None
        self.advance(step, transform_state)
        self._keep(self._made, len(self._made.rows), seen, step)

    def closed(self, length: int) -> Experience:
        return self._finish(self._begun, *self._rows_of(self._made, length, self._begun.unseen))
