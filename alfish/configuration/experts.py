"""Policies of saved runs as experts for imitation."""

from collections.abc import Sequence
from pathlib import Path

import gin

from alfish.algorithms.imitation.expert import Expert, PolicyExpert
from alfish.configuration import opening
from alfish.errors import UsageError
from alfish.offline.data_set import INDEX_FILE
from alfish.parameters import NonNegativeInt, checked, imports


@gin.configurable(module="alfish")
@checked
def saved_policy(
    root_dir: str = gin.REQUIRED,
    checkpoint: str | NonNegativeInt = "latest",
    leaves: Sequence[str] | None = None,
    allow_import: Sequence[str] = (),
    policy: str | None = None,
) -> Expert:
    """Returns the policy of a run as a frozen expert, with its memory and transforms.

        DAgger.expert = @saved_policy
        saved_policy.root_dir = 'runs/sac_pendulum'

    Checkpoints of the new run store a checksum of the expert's weights instead of the weights. Commands that only act
    (`alfish evaluate`, `alfish.load`) do not read the expert.

    Args:
      root_dir: directory of the expert's run.
      checkpoint: name of the checkpoint: 'latest', 'best' or environment steps.
      leaves: paths of the observation's leaves that the expert sees. Several leaves are concatenated in this order.
        None means the whole observation.
      allow_import: modules that the expert's configuration may import, in addition to alfish's modules and modules that
        are already imported. The setting has no effect in the configuration of another person's run: there, only the
        modules that were allowed when that run was opened may be imported.
      policy: name of the policy, in a run with several policies; None means the only policy.

    Raises:
      UsageError: the run or checkpoint does not exist, or its configuration imports a module that is not allowed.
    """
    if (Path(root_dir) / INDEX_FILE).is_file():
        raise UsageError(
            f"{root_dir} is a data set, which cannot label new rows; give a run with saved_policy.root_dir, or clone "
            "the data with BC"
        )
    allowed = imports.allowed()
    with gin.config_scope(None):
        found = opening.load(root_dir, checkpoint, "cpu", allow_import if allowed is None else allowed, policy)
    return PolicyExpert(found.algorithm, found.transforms, found.action_space, root_dir, leaves)
