"""A run directory for the pages."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hpcrl.report.timeline.spans import ATTEMPT, BEGINS, GENERATE, READY, SAVED, STEP, TRAIN, WAIT
from tests.report.timeline.test_node_hours import PLAN, head, lines, span
from tests.support.rundirs import NOW, log, make, put, steps

EVIL = "</pre><script>alert(1)</script> &amp; \x1b[31m \u202egnp.exe <img src=x onerror=y> {{ 1 }} {% x %}"
PLAN_JSON = msgspec.json.encode(PLAN).decode()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two nodes that has ended; its samples are hostile."""
    root = make(tmp_path / "run", phase="finished")
    begun = (NOW - 1000) / 3600
    put(root / "attempts" / "0" / "plan.json", json.loads(PLAN_JSON))
    put(root / "attempts" / "0" / "peers" / "trainer-0.json", {"role": "trainer", "start": 0, "total": 3, "pid": 1})
    about = {"stage": "", "attempt": 0}
    lines(
        root / "timeline" / "launcher-0.jsonl", head("launcher", opened=begun), span(BEGINS, begun, **about),
        span(ATTEMPT, begun, begun + 0.2, status="finished", **about),
    )  # fmt: skip
    here = root / "timeline" / "attempt-0"
    trained = [
        row
        for n in range(3)
        for row in (
            span(WAIT, begun + 0.05 * (n + 1), begun + 0.05 * (n + 1) + 0.02),
            span(TRAIN, begun + 0.05 * (n + 1) + 0.02, begun + 0.05 * (n + 2)),
            span(STEP, begun + 0.05 * (n + 1), begun + 0.05 * (n + 2), rollout_id=n),
        )
    ]
    ready = span(READY, begun + 0.05, rollout_id=0)
    saved = span(SAVED, begun + 0.2, rollout_id=3)
    lines(here / "trainer-0.jsonl", head("trainer", opened=begun), ready, *trained, saved)
    lines(here / "rollout-0.jsonl", head("rollout", opened=begun), span(GENERATE, begun + 0.05, begun + 0.07, engine=0))
    for n in range(3):
        more = {"perf/wait_time_ratio": 0.4 - n / 10, "staleness/share/0": 0.9 - n / 10, "rollout/reward": 0.5 + n / 9}
        speeds = {"perf/tokens_per_sec": 1000.0 + n, "perf/rollout_time": 1.0 + n, "perf/train_time": 0.5 + n}
        log(root, *steps(1, first=n, each=2.0 + n, **more, **speeds))
    log(root, {"rollout_id": 2, "eval/<b>/accuracy": 0.5})
    sample = {"group": 0, "index": 0, "prompt": EVIL, "response": EVIL, "label": EVIL, "reward": 1.0, "status": EVIL}
    (root / "samples").mkdir()
    (root / "samples" / "00000002.jsonl").write_text(json.dumps(sample) + "\n")
    (root / "recipe.toml").write_text(f"# {EVIL}\n")
    return root
