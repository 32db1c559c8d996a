"""A sweep as a table: a line a run, the best one first, and the mean and spread over the seeds of each setting.

Invariants: it only reads, and a second look reads only what has come since.  Runs are ranked by held-out accuracy, each
run's best evaluation, as soon as one of them has evaluated, else by reward; a sweep that has neither is in the order of
its submission.  A setting some of whose seeds have no number comes after those that have all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import msgspec

from hpcrl.config.value_types import shown_value
from hpcrl.plain_text import strip_control
from hpcrl.report.file_tail import FileTail
from hpcrl.report.metrics import WINDOW, last_records, number, parse_record, step_rows
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import Status
from hpcrl.report.status_text import aligned, shorten_path, step_of
from hpcrl.run.sweep_file import SweepFile, SweepRun

SEED = "seed"  #: the last part of the options whose runs are one setting


class Evaluation(NamedTuple):
    """An evaluation on held-out prompts.

    Attributes:
        accuracy: the mean over the evaluation sets.
        after: how many steps had been done.
    """

    accuracy: float
    after: int


class SweepRow(msgspec.Struct):
    """One run of a sweep.

    Attributes:
        name: of its directory.
        values: by swept option.
        status: in brief.
        accuracy: of its best evaluation, None without one.
        accuracy_after: how many steps had been done at that evaluation.
        reward: mean of its last WINDOW steps.
    """

    name: str
    values: dict[str, Any]
    status: Status
    accuracy: float | None = None
    accuracy_after: int | None = None
    reward: float | None = None


class SettingRow(msgspec.Struct):
    """The runs that differ in their seed alone.

    Attributes:
        values: what they share, by swept option.
        runs: how many there are.
        counted: how many of them have the number that they are ranked by, and so are in its mean.
        accuracy, reward: the means.
        accuracy_spread, reward_spread: the standard deviations, None for one run.
    """

    values: dict[str, Any]
    runs: int
    counted: int
    accuracy: float | None = None
    accuracy_spread: float | None = None
    reward: float | None = None
    reward_spread: float | None = None


class SweepStatus(msgspec.Struct):
    """A whole sweep, for a table or a program (`--json`).

    Attributes:
        by: what the runs are ranked by: "accuracy", "reward" or "".
        best: the name of the best run so far, "" while there is none.
        runs: the best first.
        settings: the best first; none where no seed is swept.
    """

    sweep: str
    swept: list[str]
    job_id: str
    by: str
    best: str
    runs: list[SweepRow]
    settings: list[SettingRow] = []
    notes: list[str] = []


def sweep_status(root: Path, sweep: SweepFile, rows: Sequence[SweepRow], notes: Sequence[str] = ()) -> SweepStatus:
    """What is known of a sweep.

    Args:
        rows: of its runs, as `sweep_row` makes them, in the order of `sweep.runs`.
    """
    by = next((by for by in ("accuracy", "reward") if any(getattr(row, by) is not None for row in rows)), "")
    ranked = _ranked(rows, by)
    best = ranked[0].name if by else ""
    settings = sorted(_ranked(list(_settings(rows, by)), by), key=lambda row: row.counted < row.runs)
    return SweepStatus(str(root), sweep.swept, sweep.job_id, by, best, ranked, settings, list(notes))


def sweep_row(swept: SweepRun, run: Run, status: Status, evaluations: BestEvaluations) -> SweepRow:
    """What is known of one run of a sweep.

    Args:
        evaluations: what is known already of the stages of all its runs.
    """
    found = next((found for stage in reversed(run.parts) if (found := evaluations[stage.root].look())), None)
    row = SweepRow(swept.name, swept.values, status)
    if found:
        row.accuracy, row.accuracy_after = found
    if run.stage:
        steps = step_rows(last_records(run.stage.root / "metrics.jsonl", WINDOW + 4))[-WINDOW:]
        rewards = [step["rollout/reward"] for step in steps if number(step.get("rollout/reward"))]
        row.reward = mean(rewards) if rewards else None
    return row


class BestEvaluation:
    """Follows a stage's metrics.jsonl for the evaluation with the highest accuracy, the first of several.

    That before the training tells nothing of what the run does, and does not count.
    """

    def __init__(self, stage: Path) -> None:
        self._tail = FileTail(stage / "metrics.jsonl")
        self._starts = 0
        self._best: Evaluation | None = None

    def look(self) -> Evaluation | None:
        """The best one so far; None without any."""
        while lines := self._tail.new():
            if self._starts != self._tail.starts:  # a later start of the run has rewritten the file
                self._starts = self._tail.starts
                self._best = None
            for line in lines:
                row = parse_record(line) if b'"eval/' in line else None
                if row is not None and row["rollout_id"] >= 0:
                    self._take(row)
        return self._best

    def _take(self, row: dict[str, Any]) -> None:
        found = [
            value
            for name, value in row.items()
            if name.startswith("eval/") and name.endswith("/accuracy") and number(value)
        ]
        if found and (self._best is None or mean(found) > self._best.accuracy):
            self._best = Evaluation(mean(found), row["rollout_id"] + 1)


class BestEvaluations(dict[Path, BestEvaluation]):
    """By a stage's directory; made when first asked for."""

    def __missing__(self, stage: Path) -> BestEvaluation:
        self[stage] = BestEvaluation(stage)
        return self[stage]


def _ranked(rows: Sequence[Any], by: str) -> list[Any]:
    """The rows with the highest value first, and those without one last; the others keep their order."""
    value = {id(row): getattr(row, by) if by else None for row in rows}
    return sorted(rows, key=lambda row: -value[id(row)] if value[id(row)] is not None else float("inf"))


def _settings(rows: Sequence[SweepRow], by: str) -> Iterable[SettingRow]:
    """The settings, if there are several runs of any that differ in their seed.

    Args:
        by: what the runs are ranked by, "" for nothing.
    """
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        own = {option: value for option, value in row.values.items() if not _is_seed(option)}
        groups.setdefault(repr(own), []).append(row)
    if all(len(group) == 1 for group in groups.values()):
        return
    for group in groups.values():
        values = {option: value for option, value in group[0].values.items() if not _is_seed(option)}
        accuracies = [row.accuracy for row in group if row.accuracy is not None]
        rewards = [row.reward for row in group if row.reward is not None]
        counted = {"accuracy": len(accuracies), "reward": len(rewards)}.get(by, 0)
        yield SettingRow(values, len(group), counted, *_spread(accuracies), *_spread(rewards))


def _is_seed(option: str) -> bool:
    return option.rpartition(".")[2] == SEED


def _spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """(mean, standard deviation), as far as there are."""
    return (mean(values) if values else None), (stdev(values) if len(values) > 1 else None)


# ---- as text


def sweep_page(found: SweepStatus) -> str:
    """The whole table, for a terminal, a file or a pipe."""
    counts = Counter(row.status.phase for row in found.runs)
    states = ", ".join(f"{count} {phase}" for phase, count in counts.items())
    job = f", job array {found.job_id}" if found.job_id else ""
    lines = [f"{strip_control(shorten_path(found.sweep))}: {len(found.runs)} runs{job}: {states}", "", _runs(found)]
    if found.settings:
        seeds = ", ".join(option for option in found.swept if _is_seed(option))
        lines += ["", f"mean and standard deviation over {seeds}:", _setting_table(found)]
    if notes := _explained(found):
        lines += ["", *notes]
    return "\n".join(lines)


def _runs(found: SweepStatus) -> str:
    rows = []
    for row in found.runs:
        s = row.status
        cells = {"": "*" if row.name == found.best else ""}
        cells |= {option.upper(): shown_value(value) for option, value in row.values.items()}
        cells |= {"STATE": s.phase, "STEP": step_of(s) or "-", "REWARD": _shown(row.reward)}
        cells |= {"LOSS": _shown(s.loss)} if row.reward is None else {}
        cells |= {"ACCURACY": _shown(row.accuracy), "AFTER": _count(row.accuracy_after), "JOB": s.job_id or "-"}
        rows.append(cells | {" ": s.message})
    return _table(rows)


def _setting_table(found: SweepStatus) -> str:
    rows = []
    for row in found.settings:
        cells = {option.upper(): shown_value(value) for option, value in row.values.items()}
        runs = str(row.runs) if row.counted in (0, row.runs) else f"{row.counted} of {row.runs}"
        cells |= {"RUNS": runs, "ACCURACY": _with_spread(row.accuracy, row.accuracy_spread)}
        rows.append(cells | {"REWARD": _with_spread(row.reward, row.reward_spread)})
    return _table(rows)


def _table(rows: Sequence[dict[str, str]]) -> str:
    """Rows under their heads; a column that is empty everywhere is left out."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    columns = {head: [strip_control(row.get(head, "-")) for row in rows] for head in heads}
    kept = {head: column for head, column in columns.items() if not {"", "-"}.issuperset(column)}
    return aligned([[head.strip(), *column] for head, column in kept.items()])


def _explained(found: SweepStatus) -> Iterable[str]:
    """What the marks and columns mean."""
    lines = []
    if found.by == "accuracy":
        lines.append("* best by ACCURACY: held-out accuracy at each run's best evaluation, AFTER so many steps")
    if found.by == "reward":
        lines.append("* best by REWARD; no run has evaluated yet")
    if any(row.reward is not None for row in found.runs):
        lines.append(f"REWARD: mean of the last {WINDOW} steps")
    return [*lines, *(f"note: {strip_control(note)}" for note in found.notes)]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _with_spread(value: float | None, spread: float | None) -> str:
    return _shown(value) if spread is None else f"{_shown(value)} +- {spread:.3f}"
