"""Progress of a stage on the screen: the launcher follows metrics.jsonl and shows the numbers that matter.

Invariant: it only reads, and reads every byte once; on a terminal it is one bar, elsewhere a line every few seconds, so
that a job's log stays readable.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from hpcrl.report.file_tail import FileTail
from hpcrl.report.metrics import parse_record
from hpcrl.run.rundir import RunDir

EVERY = 15.0  #: seconds between lines where there is no terminal
GLANCE = 0.5  #: seconds between looks at the file
FORMAT = "{desc}: {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"

#: metric -> how it is shown
SHOWN = {
    "rollout/reward": "reward {:.3f}",
    "train/loss": "loss {:.3f}",
    "rollout/response_len/mean": "length {:.1f}",
    "staleness/max": "staleness {:.0f}",
    "perf/tokens_per_sec": "{:.0f} tok/s",
}


class Progress:
    """One bar for one stage.  total: rollouts; the trainer corrects it if it is not known before."""

    def __init__(self, rundir: RunDir, title: str, total: int | None) -> None:
        self.rundir, self.title, self.total = rundir, title, total
        self.done = self.start = 0
        self.latest: dict[str, Any] = {}
        self.accuracy: dict[str, float | None] = {}
        self._tail, self._looked = FileTail(rundir.metrics_file), 0.0
        self._begun = self._told = time.monotonic()
        self._line, self._working = "", False
        self._bar = tqdm(total=total, desc=title, dynamic_ncols=True, bar_format=FORMAT) if sys.stderr.isatty() else None

    def poll(self) -> None:
        """Look at the run and bring the screen up to date.  Cheap: may be called as often as one likes."""
        now = time.monotonic()
        if now - self._looked >= GLANCE:
            self._looked = now
            self._look()
            if self._bar is not None:
                self._draw(self._bar)
            elif now - self._told >= EVERY:
                self._tell(now)

    def _look(self) -> None:
        while lines := self._tail.new():
            for row in filter(None, map(parse_record, lines)):
                if "train/loss" in row:
                    self.latest, self.done = row, row["rollout_id"] + 1
                found = {k.split("/")[1]: v for k, v in row.items() if k.startswith("eval/") and k.endswith("/accuracy")}
                self.accuracy |= found
        if not self._working and (trainer := self.rundir.find("trainer", 0)):
            self._working, self.total, self.start = True, trainer["total"], trainer["start"]
            self.done = max(self.done, self.start)

    def _draw(self, bar: tqdm) -> None:
        bar.total, bar.initial, bar.n = self.total, self.start, max(bar.n, self.start)  # what is resumed is no speed of ours
        bar.set_description_str(self.title if self._working else f"{self.title} (starting)", refresh=False)
        bar.set_postfix_str(self.text(), refresh=False)
        bar.update(self.done - bar.n)
        bar.refresh()

    def _tell(self, now: float) -> None:
        """A line, unless it would say the same again."""
        line = f"{self.title}: {self.done}/{'?' if self.total is None else self.total}  {self.text() or 'starting'}"
        if line != self._line:
            minutes, seconds = divmod(int(now - self._begun), 60)
            print(f"{line}  [{minutes:02d}:{seconds:02d}]", file=sys.stderr, flush=True)
        self._line, self._told = line, now

    def text(self) -> str:
        """The latest numbers in one line."""
        row = dict(self.latest)
        if "rollout/reward" in row:  # the policy loss is 0 where its ratios are 1: it says nothing
            row.pop("train/loss", None)
        if "perf/tokens_per_sec" not in row and row.get("perf/step_time"):  # fine-tuning: the tokens that were learned
            row["perf/tokens_per_sec"] = row.get("perf/train_tokens", 0.0) / row["perf/step_time"]
        parts = [how.format(row[name]) for name, how in SHOWN.items() if row.get(name) is not None]
        return ", ".join(
            [*parts, *(f"{name} accuracy {value:.2f}" for name, value in self.accuracy.items() if value is not None)]
        )

    def close(self) -> None:
        """Show where the stage ended."""
        self._look()
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.close()
        else:
            self._tell(time.monotonic())
