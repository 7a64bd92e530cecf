"""Draws the rooms of the package, one floor above another, from the imports that the code has.

  python -m benchmarks.house

Writes `docs/pictures/house.png`. A room is a module or a package directly in `alfish`. It stands one floor above the
highest room that it imports, and an arrow leads from each room to those that it imports; an arrow that follows from
two others is left out. The number is the room's lines.
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
PICTURE = PROJECT / "docs" / "pictures" / "house.png"
WIDTH, HEIGHT, GAP = 1.75, 0.62, 0.28  # of a box, inches
SHADES = ["#e3edf7", "#e9f3e6", "#fdf1dc", "#f8e3e1", "#ece6f4"]


def imported(path: Path) -> Iterator[str]:
    """Yields each room that a file imports at run time, once for each import."""

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
        package, _, rest = name.partition(".")
        room = rest.partition(".")[0]
        if (
            package == "alfish"
            and room
            and ((PACKAGE / f"{room}.py").is_file() or (PACKAGE / room / "__init__.py").is_file())
        ):
            yield room


def rooms() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Returns the lines of each room, and the rooms that it imports."""
    lines: dict[str, int] = {}
    arrows: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
        arrows.setdefault(room, set()).update(set(imported(path)) - {room})
    return lines, arrows


def floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Returns each room's floor: 0 where it imports nothing, else one above the highest room that it imports.

    Raises:
      RecursionError: rooms import each other in a circle.
    """
    found: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in found:
            found[room] = 1 + max((floor(below) for below in arrows[room]), default=-1)
        return found[room]

    for room in arrows:
        floor(room)
    return found


def direct(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the arrows that do not follow from two others."""

    def reached(room: str) -> set[str]:
        return arrows[room].union(*(reached(below) for below in arrows[room]))

    return {
        room: {below for below in belows if not any(below in reached(other) for other in belows - {below})}
        for room, belows in arrows.items()
    }


def draw(path: Path) -> None:
    lines, arrows = rooms()
    level = floors(arrows)
    num_floors = 1 + max(level.values())
    by_floor = [sorted(room for room in level if level[room] == k) for k in range(num_floors)]
    place: dict[str, tuple[float, float]] = {}
    widest = max(len(on_floor) for on_floor in by_floor)
    for k, on_floor in enumerate(by_floor):
        if k:  # above what it imports
            on_floor.sort(key=lambda room: sum(place[below][0] for below in arrows[room]) / len(arrows[room]))
        for column, room in enumerate(on_floor):
            place[room] = ((widest - len(on_floor)) / 2 + column + 0.5) * (WIDTH + GAP), k * (HEIGHT + 2 * GAP)
    width, height = widest * (WIDTH + GAP) + GAP, num_floors * (HEIGHT + 2 * GAP)
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    for room, belows in direct(arrows).items():
        for below in belows:
            (x, y), (to_x, to_y) = place[room], place[below]
            arrow = {"arrowstyle": "-|>", "color": "#8899aa", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", (to_x, to_y + HEIGHT / 2), (x, y - HEIGHT / 2), arrowprops=arrow, zorder=1)
    for room, (x, y) in place.items():
        corner = x - WIDTH / 2, y - HEIGHT / 2
        color = SHADES[level[room] % len(SHADES)]
        axis.add_patch(
            plt.Rectangle(corner, WIDTH, HEIGHT, facecolor=color, edgecolor="#445566", linewidth=0.9, zorder=2)
        )
        is_package = (PACKAGE / room).is_dir()
        axis.text(x, y + 0.07, f"{room}/" if is_package else room, ha="center", va="center", fontsize=10, zorder=3)
        axis.text(x, y - 0.17, f"{lines[room]:,}", ha="center", va="center", fontsize=7.5, color="#667788", zorder=3)
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
