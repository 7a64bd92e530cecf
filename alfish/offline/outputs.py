"""Outputs for data sets: a directory in alfish's own layout, or a Minari data set in HDF5.

No files remain after an error, and a data set gets its name when it is complete (`data_set.EpisodeWriter`).
"""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
from absl import logging
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from alfish.errors import UsageError, first_line, optional_module
from alfish.offline.data_set import DataSetWriter, EpisodeWriter
from alfish.offline.episode import Episode
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources import SCHEMES
from alfish.processes.inheritance import variable_set
from alfish.runs.files import temporary_of

MINARI_VARIABLE = "MINARI_DATASETS_PATH"  # Minari reads the variable whenever it looks up its data directory
MINARI_REMARKS = r"`\w+` is set to None|env_spec is None"  # Minari's warnings about metadata, which are hidden


def open_writer(output: str, spaces: Spaces = NO_SPACES, env_spec: EnvSpec | None = None) -> EpisodeWriter:
    """Returns a writer for `minari:namespace/name-v0`, or for a directory.

    Args:
      output: `minari:namespace/name-v0`, or the path of a directory that is new or empty.
      spaces: spaces of the episodes; episodes of a Minari data set can be written only if both spaces are known.
      env_spec: gymnasium's specification of the episodes' environment, which Minari stores; see `rebuildable`.

    Raises:
      UsageError: the output exists, or cannot be written to; nothing was changed.
    """
    scheme, colon, where = output.partition(":")
    if colon and scheme == "minari":
        return MinariWriter(where, spaces, env_spec)
    if colon and scheme in SCHEMES:
        raise UsageError(
            f"{output!r} can only be read; a data set can be written to a directory, or to minari:namespace/name-v0"
        )
    return DataSetWriter(output, spaces)


def rebuildable(env_spec: EnvSpec | None) -> EnvSpec | None:
    """Returns the spec if a file can store it and gymnasium can make the environment from it, else None."""
    if env_spec is None or any(wrapper.kwargs is None for wrapper in env_spec.additional_wrappers):
        return None
    try:
        plain = EnvSpec.from_json(env_spec.to_json())
    except (TypeError, ValueError):  # an argument is an object that JSON cannot represent, such as a class
        return None
    try:
        gymnasium.make(plain, disable_env_checker=True).close()
    except Exception as error:  # the code of the environment or of a wrapper may raise anything
        logging.warning(
            "The data set does not record how to make %s, because making it failed: %s", plain.id, first_line(error)
        )
        return None
    return plain


def _groups_of_hdf5(space: Any) -> Iterator[str]:
    """Yields the keys of a space that HDF5 does not accept as names."""
    if isinstance(space, spaces.Dict):
        yield from (key for key in space if "/" in str(key) or key in ("", "."))
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            yield from _groups_of_hdf5(part)


class MinariWriter(EpisodeWriter):
    """Writes a Minari data set with Minari's own API. Images are not compressed as JPEG.

    The description that `finish` receives is stored as the metadata's entry 'alfish'. The description's 'algorithm' and
    its 'seeds', one for each episode, are also stored in Minari's own fields.

    Args:
      dataset_id: id of the data set, `namespace/name-v0`. Its directory is inside the directory that the environment
        variable `MINARI_DATASETS_PATH` names, by default `~/.minari/datasets`.
      data_spaces: spaces of the episodes.
      env_spec: specification for `recover_environment`; None means that Minari cannot make the environment.

    Raises:
      UsageError: Minari is not installed, or the id is not a valid name or is already in use.
      RunError: a file cannot be written; raised by each method.
    """

    def __init__(self, dataset_id: str, data_spaces: Spaces, env_spec: EnvSpec | None = None):
        optional_module("minari", "minari", "a Minari data set")
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.storage.datasets_root_dir import get_dataset_path

        try:
            parse_dataset_id(dataset_id)
        except (ValueError, TypeError) as error:  # TypeError if the id has no version
            raise UsageError(
                f"{dataset_id!r} is not the name of a Minari data set, which looks like namespace/name-v0"
            ) from error
        for kind, space in zip(Spaces._fields, data_spaces):
            if (key := next(_groups_of_hdf5(space), None)) is not None:
                raise UsageError(
                    f"minari:{dataset_id} cannot store the {kind} {key!r}, because '/' separates groups in HDF5; write "
                    "to a directory instead, or rename the key"
                )
        self._id = dataset_id
        self._spaces = data_spaces
        self._env_spec = env_spec
        self._path = get_dataset_path(dataset_id)
        if self._path.exists():
            raise UsageError(
                f"minari:{dataset_id} already exists ({self._path}); choose another name or version, or move the "
                "existing one away"
            )
        making = temporary_of(get_dataset_path() / dataset_id.replace("/", "-"))
        super().__init__(f"minari:{dataset_id}", making)
        self._data_set: Any = None

    def _write(self, episodes: list[Episode]) -> None:
        from minari.data_collector import EpisodeBuffer

        buffers = [
            EpisodeBuffer(
                observations=episode.observations,
                actions=episode.actions,
                rewards=episode.rewards,  # type: ignore[arg-type]  # arrays are written like lists
                terminations=episode.terminated,  # type: ignore[arg-type]
                truncations=episode.truncated,  # type: ignore[arg-type]
            )
            for episode in episodes
        ]
        if self._data_set is None:
            self._data_set = self._created(buffers)
        else:
            self._data_set.update_dataset_from_buffer(buffers)

    def _put_in_place(self, about: dict[str, Any]) -> None:
        from minari.namespace import create_namespace, list_local_namespaces

        if self._data_set is None:  # no episode was added
            self._data_set = self._created([])
        storage = self._data_set.storage
        if about.get("seeds"):
            storage.update_episode_metadata([{"seed": seed} for seed in about["seeds"]])
        named = {"algorithm_name": about["algorithm"]} if "algorithm" in about else {}
        storage.update_metadata({**named, "alfish": about})
        namespace = self._id.rpartition("/")[0]
        if namespace and namespace not in list_local_namespaces():
            create_namespace(namespace)
        os.replace(self._making / self._id, self._path)

    def _created(self, buffers: list[Any]) -> Any:
        """Creates the data set in a directory that Minari does not list."""
        import minari

        with variable_set(MINARI_VARIABLE, str(self._making)), warnings.catch_warnings():
            warnings.filterwarnings("ignore", MINARI_REMARKS, UserWarning)
            return minari.create_dataset_from_buffers(
                self._id,
                buffers,
                env=self._env_spec,
                observation_space=self._spaces.observation,
                action_space=self._spaces.action,
                description="written by alfish; the entry 'alfish' records its origin",
                data_format="hdf5",
                jpeg_encoding=False,
            )
