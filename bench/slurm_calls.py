"""What one run asks of slurmctld, from its submission to its end, next to a job of the same shape that does nothing.

    python bench/slurm_calls.py [--nodes 2,3] [--rollouts 3,30]

On a real Slurm (tools/cluster) the quick start is submitted as one ordinary job, and then a script with the same head
that calls srun once.  `sdiag` counts the remote procedure calls that slurmctld has served of each kind; those of the
cluster itself (nodes that register, accounting) are left out.  A run is measured with few rollouts and with more: what
the second asks for beyond the first is what time costs.

Bounds that are checked: what a run asks for does not grow with its time, nor with its nodes, but for the word of each
node's slurmd that a step of it has ended there.
Writes bench/results/slurm_calls.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of bench/, whose queue.py would hide the standard library's

from tests.support.cluster import Cluster  # noqa: E402
from tests.support.slurm import ENV  # noqa: E402

#: kinds that slurmctld gets from its own nodes and database, whatever runs, or from our watching
OTHERS = re.compile(
    r"MESSAGE_|REQUEST_PING|REQUEST_STATS|ACCOUNTING|RESPONSE|REQUEST_PERSIST|COMPLETE|CTLD_MULT|REQUEST_JOB_STEP_CREATE_"
)
ENDED = "REQUEST_STEP_COMPLETE"  #: slurmd's word, for each step and node
SLACK = 3  #: calls by which two runs may differ: what srun asks again, say


def served(cluster: Cluster) -> Counter[str]:
    """Kind -> how many calls slurmctld has served of it."""
    said = cluster.run(["sdiag"]).stdout.partition("statistics by message type")[2].partition("statistics by user")[0]
    found = re.findall(r"^\s*([A-Z_]+)\s*\(\s*\d+\)\s*count:(\d+)", said, re.MULTILINE)
    return Counter({kind: int(count) for kind, count in found if not OTHERS.match(kind)})


def measured(cluster: Cluster, words: list[str | Path]) -> Counter[str]:
    """What a submission and its job ask for; `words` print its number and return at once."""
    before = served(cluster)
    said = cluster.run([str(word) for word in words], env=ENV, cwd=REPO).stdout
    job = int(re.search(r"\d+", said)[0])
    # not with squeue, whose calls would be counted: the job's end is in accounting
    for _ in range(1500):
        if (rows := cluster.sacct(job, "State")) and rows[0][0] not in ("PENDING", "RUNNING", "COMPLETING"):
            break
        cluster.run(["sleep", "1"])
    assert rows[0][0] == "COMPLETED", rows
    return served(cluster) - before


def submission(nodes: int, rollouts: int, root: Path) -> list[str | Path]:
    words: list[str | Path] = [sys.executable, "-m", "hpcrl", "submit", REPO / "examples/quickstart.toml"]
    words += ["--run-dir", root, "--actor-num-nodes", str(nodes - 1), "--layout", "homogeneous", "--time", "60"]
    words += [f"--sft.num-rollout={rollouts}", f"--grpo.num-rollout={rollouts}", "--grpo.eval-interval=1000"]
    return [*words, "--set", "trainer.gpus_per_node=0", "engine.gpus_per_node=0", "trainer.mem=6G", "engine.mem=6G"]


def plain(script: Path, target: Path) -> list[str | Path]:
    """sbatch of a script with the same head that calls srun once."""
    head = [line for line in script.read_text().splitlines() if line.startswith("#")]
    target.write_text("\n".join([*head, "srun --overlap true", "sleep 20", ""]))
    return ["sbatch", "--parsable", target]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,3")
    parser.add_argument("--rollouts", default="3,30")
    args = parser.parse_args()
    numbers = [int(text) for text in args.nodes.split(",")]
    few, many = map(int, args.rollouts.split(","))
    columns: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "cluster"
        shared.mkdir()
        cluster = Cluster(shared, visible=[Path(folder)])
        try:
            for nodes in numbers:
                root = shared / f"run-{nodes}"
                columns[f"run, {nodes} nodes"] = measured(cluster, submission(nodes, few, root))
                columns[f"plain, {nodes} nodes"] = measured(cluster, plain(root / "job.sbatch", shared / f"{nodes}.sh"))
            longer = f"run, {numbers[0]} nodes, {many // few} times the steps"
            columns[longer] = measured(cluster, submission(numbers[0], many, shared / "longer"))
        finally:
            cluster.stop()
    kinds = sorted({kind for column in columns.values() for kind in column})
    lines = [
        "# What a run asks of slurmctld",
        "",
        f"`python bench/slurm_calls.py`: remote procedure calls from the submission to the end, {few} steps of each of "
        "two stages; `plain` is a job with the same head that calls srun once.",
        "",
        f"| | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {kind} | {' | '.join(str(column[kind]) for column in columns.values())} |" for kind in kinds),
        f"| in all | {' | '.join(str(column.total()) for column in columns.values())} |",
    ]
    (REPO / "bench" / "results" / "slurm_calls.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    totals = {name: column.total() for name, column in columns.items()}
    print(json.dumps(totals))
    runs = [column.total() - column[ENDED] for name, column in columns.items() if name.startswith("run")]
    return 0 if max(runs) - min(runs) <= SLACK else 1


if __name__ == "__main__":
    sys.exit(main())
