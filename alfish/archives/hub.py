"""Runs in repositories of the Hugging Face hub, named as `hf:org/name` or `hf:org/name@revision`."""

import re
from pathlib import Path

from alfish.archives.manifest import check_directory
from alfish.errors import RunError, UsageError, first_line

PREFIX = "hf:"
_NAME = re.compile(r"hf:([\w\-.]+/[\w\-.]+)(?:@([\w\-./]+))?", re.ASCII)


def download(name: str) -> Path:
    """Returns the directory, in the hub's cache, of a packed run; only this function uses the network.

    Args:
      name: as `hf:org/name`, with a branch, tag or commit as `hf:org/name@revision`.

    Raises:
      UsageError: the extra 'hub' is missing, the name has another form, or the repository has no packed run.
      RunError: it cannot be downloaded.
    """
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise UsageError(f"{name!r} is no repository of the hub; name it as hf:org/name or hf:org/name@revision")
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"{name} needs the extra 'hub': pip install 'alfish[hub]'") from error
    repository, revision = matched.groups()
    try:
        directory = Path(huggingface_hub.snapshot_download(repository, revision=revision))
    except Exception as error:  # of the network, the hub, or the disk
        raise RunError(f"{name} cannot be downloaded: {first_line(error)}") from error
    check_directory(directory, name)
    return directory
