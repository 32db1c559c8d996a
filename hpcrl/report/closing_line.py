"""What a run says at its end: what there is to look at and to continue with, and held-out means before and after.

Invariant: the numbers come from metrics.jsonl and from nowhere else; a command is named only where it has something to
work on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcrl.config.options import Options
from hpcrl.report.metrics import held_out_means, measure, read_metrics
from hpcrl.report.not_learning import notes_of
from hpcrl.report.sample_records import held_out_sets, steps_of
from hpcrl.report.status_text import shorten_path
from hpcrl.run.rundir import TRACKER


def held_out(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Held-out set -> (rollout id, mean reward) of every evaluation, in order."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(directory / "metrics.jsonl"):
        for name, value in held_out_means(row).items():
            found.setdefault(name, []).append((row["rollout_id"], value))
    return found


def closing_line(directory: Path, root: Path) -> str:
    """`held-out accuracy: 0.41 -> 0.83 runs/...`, or where the run is if nothing was evaluated.

    Each of several sets has its name; after one evaluation alone there is one number; of rewards that are not all 0 or
    1 it is `held-out reward`.

    Args:
        directory: the stage whose evaluations count.
        root: the run.
    """
    # without ~, since scripts read this line
    where = root.relative_to(Path.cwd()) if root.is_relative_to(Path.cwd()) else root
    if not (sets := held_out(directory)):
        return f"finished  {where}"
    shown = {
        name: " -> ".join(f"{points[i][1]:.2f}" for i in ((0, -1) if len(points) > 1 else (0,)))
        for name, points in sets.items()
    }
    values = ", ".join(f"{name} {numbers}" if len(shown) > 1 else numbers for name, numbers in shown.items())
    return f"held-out {measure(read_metrics(directory / 'metrics.jsonl'))}: {values}  {where}"


def remarks(directory: Path) -> list[str]:
    """What a reader of the numbers of a stage has to know."""
    return notes_of(directory, list(read_metrics(directory / "metrics.jsonl")))


def what_next(options: Options, directory: Path, root: Path) -> Iterator[str]:
    """The commands that continue from a finished run, a line each.

    Args:
        options, directory: of its last stage.
    """
    run = shorten_path(str(root))
    yield f"curves and costs:  hpcrl report {run}"
    if steps_of(directory):
        yield f"its samples:       hpcrl samples {run}"
    elif sets := held_out_sets(directory):
        yield f"its samples:       hpcrl samples {run} --eval {sets[0]}"
    if (Path(options.save or directory / "checkpoints") / TRACKER).is_file():
        yield f"export the model:  hpcrl convert to-hf {run}"
        yield f"train on:          hpcrl resume {run} --num-rollout N"
