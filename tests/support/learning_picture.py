"""The table of a campaign and the picture of docs/algorithms.md, of what tests/soak/test_learning.py has found.

LEARNED=learned.jsonl make soak SOAK=learn
python -m tests.support.learning_picture learned.jsonl docs/learning.png
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

GRID = "#dddddd"


class Learned(NamedTuple):
    """Held-out accuracy of one run: before its first rollout, and at equal distances up to its last."""

    name: str
    control: bool
    seed: int
    rollouts: list[int]
    accuracy: list[float]


def keep(path: Path, found: Learned) -> None:
    """Append one run to the file."""
    with path.open("a") as file:
        file.write(json.dumps(found._asdict()) + "\n")


def read(path: Path) -> list[Learned]:
    """All runs of the file; of one that was made again, the last."""
    rows = [Learned(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(row.name, row.seed): row for row in rows}.values())


def table(found: list[Learned]) -> str:
    """First and last accuracy, a line a name and a column a seed."""
    seeds = sorted({row.seed for row in found})
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for row in found:
        cells[row.name][row.seed] = f"{row.accuracy[0]:.2f} -> {row.accuracy[-1]:.2f}"
    lines = ["| |" + "".join(f" seed {seed} |" for seed in seeds), "|---|" + "---|" * len(seeds)]
    lines += [f"| `{name}` |" + "".join(f" {of.get(seed, '')} |" for seed in seeds) for name, of in cells.items()]
    return "\n".join(lines)


def draw(found: list[Learned], path: Path) -> None:
    """One panel for the estimators, one for the controls; a colour a name, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, control in zip(panels, (False, True), strict=True):
        names = list(dict.fromkeys(row.name for row in found if row.control is control))
        for row in (row for row in found if row.control is control):
            label = row.name if row.seed == min(r.seed for r in found if r.name == row.name) else None
            panel.plot(row.rollouts, row.accuracy, color=f"C{names.index(row.name)}", label=label, linewidth=1.2)
        panel.set_title("controls" if control else "estimators", fontsize=10, loc="left")
        panel.set_xlabel("rollouts")
        panel.grid(color=GRID, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=8, frameon=False, loc="upper left" if control else "lower right")
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("held-out accuracy")
    FigureCanvasAgg(figure).print_png(str(path))


if __name__ == "__main__":
    rows = read(Path(sys.argv[1]))
    print(table(rows))
    draw(rows, Path(sys.argv[2]))
