"""Draws the packages of alfish in layers, from the imports in the code.

  python -m benchmarks.package_graph

Writes `docs/pictures/packages.png`. A box is a package or a module directly in `alfish`, with its number of lines. It
is one layer above the highest package that it imports. An arrow leads from each package to those that it imports; an
arrow that follows from two others is left out.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import PROJECT

PACKAGE = PROJECT / "alfish"
PICTURE = PROJECT / "docs" / "pictures" / "packages.png"
WIDTH, HEIGHT, GAP = 1.75, 0.62, 0.28  # of a box, inches
SHADES = ["#e3edf7", "#e9f3e6", "#fdf1dc", "#f8e3e1", "#ece6f4"]


def imported(path: Path) -> Iterator[str]:
    """Yields the package of each import of a file at run time."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from walk(child)

    for name in walk(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        package = rest.partition(".")[0]
        if (
            top == "alfish"
            and package
            and ((PACKAGE / f"{package}.py").is_file() or (PACKAGE / package / "__init__.py").is_file())
        ):
            yield package


def packages() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Returns the lines of each package, and the packages that it imports."""
    lines: dict[str, int] = {}
    imports: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        lines[package] = lines.get(package, 0) + len(path.read_text().splitlines())
        imports.setdefault(package, set()).update(set(imported(path)) - {package})
    return lines, imports


def layers(imports: dict[str, set[str]]) -> dict[str, int]:
    """Returns each package's layer: 0 if it imports nothing, else one above the highest package that it imports.

    Raises:
      RecursionError: packages import each other in a circle.
    """
    found: dict[str, int] = {}

    def layer(package: str) -> int:
        if package not in found:
            found[package] = 1 + max((layer(below) for below in imports[package]), default=-1)
        return found[package]

    for package in imports:
        layer(package)
    return found


def direct(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the dependencies that do not follow from two others."""

    def reached(package: str) -> set[str]:
        return imports[package].union(*(reached(below) for below in imports[package]))

    return {
        package: {below for below in belows if not any(below in reached(other) for other in belows - {below})}
        for package, belows in imports.items()
    }


def draw(path: Path) -> None:
    lines, imports = packages()
    level = layers(imports)
    num_layers = 1 + max(level.values())
    by_layer = [sorted(package for package in level if level[package] == k) for k in range(num_layers)]
    place: dict[str, tuple[float, float]] = {}
    widest = max(len(in_layer) for in_layer in by_layer)
    for k, in_layer in enumerate(by_layer):
        if k:  # above what it imports
            in_layer.sort(
                key=lambda package: sum(place[below][0] for below in imports[package]) / len(imports[package])
            )
        for column, package in enumerate(in_layer):
            place[package] = ((widest - len(in_layer)) / 2 + column + 0.5) * (WIDTH + GAP), k * (HEIGHT + 2 * GAP)
    width, height = widest * (WIDTH + GAP) + GAP, num_layers * (HEIGHT + 2 * GAP)
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    for package, belows in direct(imports).items():
        for below in belows:
            (x, y), (to_x, to_y) = place[package], place[below]
            arrow = {"arrowstyle": "-|>", "color": "#8899aa", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", (to_x, to_y + HEIGHT / 2), (x, y - HEIGHT / 2), arrowprops=arrow, zorder=1)
    for package, (x, y) in place.items():
        corner = x - WIDTH / 2, y - HEIGHT / 2
        color = SHADES[level[package] % len(SHADES)]
        axis.add_patch(
            plt.Rectangle(corner, WIDTH, HEIGHT, facecolor=color, edgecolor="#445566", linewidth=0.9, zorder=2)
        )
        is_package = (PACKAGE / package).is_dir()
        axis.text(
            x, y + 0.07, f"{package}/" if is_package else package, ha="center", va="center", fontsize=10, zorder=3
        )
        axis.text(x, y - 0.17, f"{lines[package]:,}", ha="center", va="center", fontsize=7.5, color="#667788", zorder=3)
    axis.set_xlim(0, width - GAP)
    axis.set_ylim(-HEIGHT / 2 - GAP, height - GAP)
    axis.set_axis_off()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(PICTURE)


if __name__ == "__main__":
    main()
