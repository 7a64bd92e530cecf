"""The format of the parameters that differ between the runs of a sweep:

    NAME=grid(...)         each of these values; with samplers other than grid, any of them
    NAME=choice(...)       any of these values
    NAME=uniform(a, b)     a number between a and b
    NAME=log(a, b)         a positive number whose logarithm is uniform
    NAME=int(a, b)         an integer, both ends included

NAME is a parameter as in a gin file, and values of grid and choice are written as in a gin file: `grid('relu',
'tanh')`.
"""

import io
import re
import tokenize
from collections.abc import Sequence

from alfish.errors import UsageError
from alfish.parameters.varied import INTEGER, LISTS, NUMBER, RANGES, Parameter, check_range

FORMS = "grid(...), choice(...), uniform(a, b), log(a, b) or int(a, b)"


def corners(parameters: Sequence[Parameter]) -> list[list[str]]:
    """Returns bindings of several runs that contain each example of each parameter at least once."""
    first = [parameter.items[0] for parameter in parameters]
    points = [first]
    for k, parameter in enumerate(parameters):
        points += [[*first[:k], item, *first[k + 1 :]] for item in parameter.examples[1:]]
    return [[f"{one.name}={value}" for one, value in zip(parameters, point)] for point in points]


def parse(argument: str) -> Parameter:
    """Returns the parameter of a `--search` argument.

    Raises:
      UsageError: the argument is not a search, or the ends of a range are in the wrong order or infinite.
    """
    said = f"--search={argument}"
    match = re.fullmatch(r"\s*([\w./]+)\s*=\s*(\w+)\((.*)\)\s*", argument, re.DOTALL)
    if match is None or match[2] not in (*LISTS, *RANGES) or not argument.isprintable():
        raise UsageError(f"{said} is not a search space: write NAME={FORMS}")
    name, kind, inner = match.groups()
    items = _split(inner, said)
    if name == "Trainer.seed":
        raise UsageError(f"{said}: seeds repeat a trial; write --seeds=3 for three runs of each trial")
    if kind in LISTS:
        if not items or len(set(items)) < len(items):
            raise UsageError(f"{said}: {kind}(...) requires one or more distinct values")
        return Parameter(name, kind, items)
    number = INTEGER if kind == "int" else NUMBER
    if len(items) != 2 or not all(re.fullmatch(number, item) for item in items):
        raise UsageError(f"{said}: {kind}(a, b) requires two {'integers' if kind == 'int' else 'numbers'}")
    low, high = map(float, items)
    check_range(low, high, said, f"{kind}({items[1]}, {items[0]})")
    if kind == "log" and low <= 0:
        raise UsageError(f"{said}: log(a, b) requires positive numbers; use uniform(a, b) for other numbers")
    return Parameter(name, kind, items)


def _split(text: str, said: str) -> tuple[str, ...]:
    """Returns the parts of a text between commas that are outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.replace("\n", " ")).readline):
            if token.type != tokenize.OP:
                continue
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == "," and depth == 0:
                parts.append(text[start : token.start[1]])
                start = token.end[1]
    except (tokenize.TokenError, SyntaxError) as error:
        raise UsageError(f"{said}: its values are not valid gin ({error.args[0]})") from error
    last = text[start:]
    return tuple(part.strip() for part in [*parts, *([last] if last.strip() else [])])
