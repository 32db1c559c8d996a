"""Submission: `hpcrl submit` until it has printed the job's id, beside `sbatch` alone of the same script.

    python bench/submit.py [--rounds 7]

Each round submits the quick start as a heterogeneous job to a real Slurm (tools/cluster), and then the script that was
submitted once more with sbatch; jobs are to begin in an hour, and are cancelled at once.  Prints a table (also to
bench/results/submit.md) and, as its last line, one JSON object of the medians.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from tests.support.cluster import Cluster  # noqa: E402
from tests.support.slurm import ENV  # noqa: E402

SITE = ["--set", "trainer.mem=1G", "engine.mem=1G", "trainer.extra.begin=now+1hour"]


def timed(cluster: Cluster, *command: str | Path) -> tuple[float, str]:
    began = time.perf_counter()
    done = cluster.run([str(word) for word in command], env=ENV)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "cluster"
        shared.mkdir()
        cluster = Cluster(shared, visible=[Path(folder)])
        rows = []
        try:
            for number in range(rounds):
                root = shared / f"run-{number}"
                words = [
                    sys.executable,
                    "-m",
                    "hpcrl",
                    "submit",
                    REPO / "examples/quickstart.toml",
                    "--run-dir",
                    root,
                    *SITE,
                ]
                ours, out = timed(cluster, *words)
                bare, again = timed(cluster, "sbatch", "--parsable", root / "job.sbatch")
                empty, _ = timed(cluster, "true")  # what entering the cluster's namespaces takes
                cluster.run(["scancel", re.match(r"job (\d+)", out)[1], again.split(";")[0].strip()])
                rows.append((ours - empty, bare - empty))
        finally:
            cluster.stop()
    ours, bare = (statistics.median(column) for column in zip(*rows, strict=True))
    table = [
        "# Submission",
        "",
        f"Median of {rounds} rounds, a heterogeneous job of two components on an idle test cluster.",
        "",
        "| | seconds | range |",
        "|---|---|---|",
    ]
    for name, column in zip(("`hpcrl submit`", "`sbatch` alone"), zip(*rows, strict=True), strict=True):
        table.append(f"| {name} | {statistics.median(column):.2f} | {min(column):.2f} .. {max(column):.2f} |")
    table += [f"| beyond sbatch | {ours - bare:.2f} | (bound: 1) |", ""]
    print("\n".join(table))
    (REPO / "bench/results/submit.md").write_text("\n".join(table))
    print(json.dumps({"submit_s": round(ours, 3), "sbatch_s": round(bare, 3), "beyond_s": round(ours - bare, 3)}))


if __name__ == "__main__":
    main()
