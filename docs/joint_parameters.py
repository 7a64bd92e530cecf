"""Reads `low, high: text` in the `Args:` of a docstring as two parameters with the same text."""

import re
from typing import Any

from griffe import Extension, Object

JOINT = re.compile(r"^( +)(\w+(?:, \w+)+)(:.*\n?(?:\1 +.*\n?)*)", re.MULTILINE)


def separated(docstring: str) -> str:
    return JOINT.sub(
        lambda found: "".join(f"{found[1]}{name}{found[3].rstrip()}\n" for name in found[2].split(", ")), docstring
    )


class JointParameters(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = separated(obj.docstring.value)
