"""Progress of a stage on the screen: the launcher follows metrics.jsonl and shows the numbers that matter.

Invariant: it only reads; on a terminal it is one bar, elsewhere a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from hpcrl.report.metrics import read
from hpcrl.rundir import RunDir

EVERY = 15.0  #: seconds between lines where there is no terminal
GLANCE = 0.5  #: seconds between looks at the file

#: metric -> how it is shown
SHOWN = {
    "rollout/reward": "reward {:.3f}",
    "train/loss": "loss {:.3f}",
    "rollout/response_len/mean": "length {:.1f}",
    "staleness/max": "staleness {:.0f}",
    "perf/tokens_per_sec": "{:.0f} tok/s",
}


class Progress:
    """One bar for one stage."""

    def __init__(self, rundir: RunDir, title: str, total: int | None) -> None:
        self.rundir, self.title = rundir, title
        self.seen, self.size, self.looked = 0, -1, 0.0
        self.latest: dict[str, Any] = {}
        self.accuracy: dict[str, float] = {}
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            desc=title,
            unit="step",
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.1 if terminal else EVERY,
            disable=False,
        )

    def poll(self) -> None:
        """Look at the run and bring the bar up to date."""
        if time.monotonic() - self.looked < GLANCE:
            return
        self.looked = time.monotonic()
        try:
            size = self.rundir.metrics_file.stat().st_size
        except FileNotFoundError:
            size = 0
        if size != self.size:
            self.size = size
            self._read()
        trainer = self.rundir.find("trainer", 0)
        self.bar.set_description_str(self.title if trainer else f"{self.title} (starting)", refresh=False)
        if trainer and self.bar.total != trainer["total"]:
            self.bar.total = trainer["total"]
        if sys.stderr.isatty():
            self.bar.refresh()

    def _read(self) -> None:
        done = 0
        for row in read(self.rundir.metrics_file):
            if "train/loss" in row:
                self.latest, done = row, row["rollout_id"] + 1
            self.accuracy |= {k.split("/")[1]: v for k, v in row.items() if k.startswith("eval/") and k.endswith("/accuracy")}
        self.bar.set_postfix_str(self.text(), refresh=False)
        self.bar.update(done - self.bar.n)

    def text(self) -> str:
        """The latest numbers in one line."""
        parts = [how.format(self.latest[name]) for name, how in SHOWN.items() if name in self.latest]
        return ", ".join([*parts, *(f"{name} accuracy {value:.2f}" for name, value in self.accuracy.items())])

    def close(self) -> None:
        self.looked = 0.0
        self.poll()
        self.bar.refresh()
        self.bar.close()
