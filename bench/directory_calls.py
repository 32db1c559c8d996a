"""What each process of one real run asks of the run directory's file system while it trains.

    python bench/directory_calls.py [--rollouts 5]

The quick start's second stage is run with every process under strace.  Counted are the system calls that name the run
directory, from the first training step to the last, in two kinds: looks, of which a process makes so many a second
whether anything happens or not, and what is written and removed, which belongs to the work and is told for each rollout
and each group.  A run has one launcher, one rollout process and one rank 0, however many hosts it has; what further
hosts add is in bench/hosts.py.

Bounds that are checked: launcher and rollout process make at most 10 looks a second each; a group costs at most 4 calls.
Writes bench/results/directory_calls.md; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
GROUPS = 64
#: words of a command line -> whose process it is
PROCESSES = {
    "hpcrl.rollout.main": "rollout process",
    "hpcrl.trainer.main": "trainer rank 0",
    "hpcrl.launch.host": "process of the host",
    "hpcrl.launch.launcher_watchdog": "watchdog of the launcher",
    "hpcrl.engine": "engine",
    "bin/hpcrl": "launcher",
}
CALL = re.compile(r"(?P<pid>\d+) +(?P<time>\d+\.\d+) (?P<what>\w+)\(")
WRITES = ("O_WRONLY", "O_RDWR", "O_CREAT")


def trace(run: Path, log: Path, rollouts: int) -> None:
    """Run the second stage of the quick start under strace."""
    words = ["--run-dir", run, "--sft.num-rollout=2", f"--grpo.num-rollout={rollouts}", "--grpo.eval-interval=1000"]
    words += [f"--grpo.rollout-batch-size={GROUPS}"]
    command = ["strace", "-f", "-ttt", "-s", "4096", "-e", "trace=%file,%process", "-o", log, sys.executable]
    command += [Path(sys.executable).with_name("hpcrl"), "run", REPO / "examples" / "quickstart.toml", *words]
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL, timeout=1200)


def steps(run: Path) -> list[float]:
    """When each training step of the stage ended, in unix time."""
    rows = map(json.loads, (run / "grpo" / "metrics.jsonl").read_text().splitlines())
    return [row["time"] for row in rows if "train/loss" in row]


def calls(run: Path, log: Path) -> Iterator[tuple[float, str, str]]:
    """(time, whose, line) of every call that names the run directory; threads and children that run no program of
    their own count as their parent's."""
    owner: dict[str, str] = {}
    with open(log, errors="replace") as lines:
        for line in lines:
            if not (found := CALL.match(line)):
                continue
            pid, what = found["pid"], found["what"]
            if what in ("clone", "clone3", "fork", "vfork") and (child := re.search(r"= (\d+)$", line)):
                owner[child[1]] = owner.get(pid, "")
            elif what == "execve":
                owner[pid] = next((name for word, name in PROCESSES.items() if word in line), owner.get(pid, ""))
            elif str(run) in line and "<unfinished" not in line and owner.get(pid):
                yield float(found["time"]), owner[pid], line


def measure(rollouts: int) -> tuple[dict[str, dict[str, float]], float]:
    """Whose -> looks a second, other calls a second, and calls on the files of groups each; seconds."""
    looks, work, groups = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        run, log = Path(folder) / "run", Path(folder) / "strace"
        trace(run, log, rollouts)
        begin, *_, end = steps(run)
        for time, whose, line in calls(run, log):
            if begin <= time <= end:
                written = any(word in line for word in ("rename", "unlink", "mkdir", *WRITES))
                (groups if "/bank/" in line else work if written else looks)[whose] += 1
    seconds, made = end - begin, GROUPS * (rollouts - 1)
    return {
        whose: {
            "looks": looks[whose] / seconds,
            "writes": work[whose] / (rollouts - 1),
            "group": groups[whose] / made,
        }
        for whose in sorted({*looks, *work, *groups})
    }, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5)
    args = parser.parse_args()
    found, seconds = measure(args.rollouts)
    lines = [
        "# What each process of one run asks of the file system of its run directory",
        "",
        f"`python bench/directory_calls.py`: {args.rollouts - 1} steps of the quick start, {GROUPS} groups each, "
        f"{seconds:.0f} s under strace.",
        "",
        "| process | looks a second | calls that write or remove, a step | on the files of groups, a group |",
        "|---|---|---|---|",
        *(
            f"| {whose} | {row['looks']:.1f} | {row['writes']:.1f} | {row['group']:.1f} |"
            for whose, row in found.items()
        ),
    ]
    (REPO / "bench" / "results" / "directory_calls.md").write_text("\n".join(lines) + "\n")
    print(json.dumps(found))
    few = all(found[whose]["looks"] <= 10 for whose in ("launcher", "rollout process"))
    return 0 if few and found["rollout process"]["group"] <= 4 else 1


if __name__ == "__main__":
    sys.exit(main())
