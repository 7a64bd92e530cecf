"""Counts the lines that a reader of a module needs.

python tests/tools/lines_to_read.py alfish.algorithms.sac [--show] [--depth=1]

They are those of the module, of each file of the package that defines a name it imports, and so on. A name that a
package only passes on counts for the file that defines it. Packages that a reader of an algorithm takes for
granted are left out.
"""

import argparse
import ast
import functools
from pathlib import Path

import alfish

PACKAGE = Path(alfish.__file__).parent
TAKEN_FOR_GRANTED = ("errors", "nest", "parameters", "runs", "compiler", "specs", "processes")


def file_of(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def imports(file: Path) -> list[tuple[str, str]]:
    """Returns module and name of each import from the package."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "alfish":
            found += [(node.module, alias.name) for alias in node.names]
    return found


def definition(module: str, name: str) -> Path | None:
    """Returns the file that defines a name which a module has."""
    file = file_of(f"{module}.{name}") or file_of(module)
    if file is None or file.name != "__init__.py":
        return file
    for source, passed_on in imports(file):
        if passed_on == name and source != module:
            return definition(source, name)
    return file


def needed(module: str, depth: int = 1000) -> dict[Path, int]:
    """Returns the lines of each file that a reader needs.

    Args:
      module: name of the module.
      depth: number of times that imports are followed.
    """
    found: dict[Path, int] = {}
    level = [file_of(module)]
    while level and depth >= 0:
        following = []
        for file in level:
            if file is None or file in found:
                continue
            if file.relative_to(PACKAGE).parts[0].removesuffix(".py") in TAKEN_FOR_GRANTED:
                continue
            found[file] = len(file.read_text().splitlines())
            following += [definition(*one) for one in imports(file)]
        level, depth = following, depth - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--depth", type=int, default=1000, help="number of times that imports are followed")
    parser.add_argument("--show", action="store_true", help="also the lines of each file")
    arguments = parser.parse_args()
    for module in arguments.modules:
        files = needed(module, arguments.depth)
        print(f"{module}: {sum(files.values())} lines in {len(files)} files")
        if arguments.show:
            for file, lines in sorted(files.items(), key=lambda item: -item[1]):
                print(f"  {lines:5} {file.relative_to(PACKAGE.parent)}")


if __name__ == "__main__":
    main()
