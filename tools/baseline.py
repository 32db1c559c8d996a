"""What the suite and the benches come to before anything is removed: tests/baseline.toml, and how it is measured.

    python -m tools.mutants --record           # which mutants the core tests of their room notice, which all of them
    python -m tools.baseline coverage          # lines of the package that the fast tests run
    python -m tools.baseline skipped MARKS XML...   # skipped tests in the --junitxml files of runs with `-m MARKS`
    python -m tools.baseline cpu_seconds MARKS      # CPU time of each folder in the last run of CI with `-m MARKS` here
    python -m tools.baseline bench [--runs 5] [NAME...]     # medians of all figures of each bench, or of these

Invariants: a measurement replaces its own table, and no other; numbers are written in one order, so that the file
differs only where they do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent
FILE = REPO / "tests" / "baseline.toml"
HEADER = "# Measured, never edited: tools/baseline.py says with which commands."
#: tests that start no process, and are not only about text
FAST = "core and not process and not vllm"
#: benches of which medians are recorded -> the options that they are run with
BENCHES = {
    "queue": ("--quick", "--only", "memcpy,zmq,zmq-curve,ours"),
    "rollout": ("--rounds", "1"),
    "weights": ("--quick", "--no-hosts"),
    "trainer": ("--quick", "--only", "one rank,dp2"),
}
RUNS = 5


def read(path: Path | None = None) -> dict[str, Any]:
    """The recorded tables, by name; none where nothing is recorded."""
    path = path or FILE
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(name: str, table: Mapping[str, Any], path: Path | None = None) -> None:
    """Replace one table.

    Args:
        name: of the table, with dots where it is one of several of a kind.
        table: numbers, texts and lists of texts, by key.
    """
    path = path or FILE
    tables = _flat(read(path)) | {name: dict(table)}
    lines = [HEADER]
    for title in sorted(tables):
        lines += ["", f"[{title}]", *(f"{_key(key)} = {_value(value)}" for key, value in sorted(tables[title].items()))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _flat(tables: Mapping[str, Any], above: str = "") -> dict[str, dict[str, Any]]:
    """Dotted name -> what is in that table itself."""
    found: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        own = {key: value for key, value in table.items() if not isinstance(value, dict)}
        if own:
            found[above + name] = own
        found |= _flat({key: value for key, value in table.items() if isinstance(value, dict)}, f"{above}{name}.")
    return found


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"    {json.dumps(each)},\n" for each in value) + "]" if value else "[]"
    return json.dumps(value)


# ---- skipped tests and coverage


def skipped(reports: Sequence[Path]) -> int:
    """How many tests pytest's --junitxml files tell as skipped."""
    suites = [suite for report in reports for suite in ET.parse(report).getroot().iter("testsuite")]
    return sum(int(suite.get("skipped", 0)) for suite in suites)


def measure_coverage(arguments: Sequence[str]) -> None:
    """Run the fast tests in one process, and record by package which share of its lines they run.

    Args:
        arguments: of pytest, further ones.

    Raises:
        CalledProcessError: if a test fails.
    """
    with tempfile.TemporaryDirectory(prefix="baseline-") as folder:
        data, told = (Path(folder) / name for name in ("data", "told.json"))
        coverage = [sys.executable, "-m", "coverage"]
        kept = f"--data-file={data}"
        pytest = ["-m", "pytest", "-q", "-m", FAST, *arguments]
        subprocess.run([*coverage, "run", kept, "--source=hpcrl", *pytest], cwd=REPO, check=True)
        subprocess.run([*coverage, "json", kept, "-q", "-o", told], cwd=REPO, check=True)
        files = json.loads(told.read_text())["files"]
    write("coverage", covered({name: found["summary"] for name, found in files.items()}))


def covered(files: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Percent of lines that were run, of each folder of hpcrl and of all of it.

    Args:
        files: path -> coverage's summary of the file.
    """
    lines: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, found in files.items():
        parts = Path(name).parts
        for place in ("all", parts[1] if len(parts) > 2 else "files"):
            lines[place][0] += found["covered_lines"]
            lines[place][1] += found["num_statements"]
    return {place: round(100 * run / total, 1) for place, (run, total) in lines.items() if total}


# ---- benches


def measure_bench(name: str, runs: int) -> dict[str, float]:
    """The median over runs of each figure that a bench prints as JSON in its last line."""
    every: dict[str, list[float]] = defaultdict(list)
    for number in range(runs):
        words = [sys.executable, f"bench/{name}.py", *BENCHES[name]]
        done = subprocess.run(words, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
        figures = dict(_figures(json.loads(done.stdout.splitlines()[-1])))
        print(f"{name}, run {number + 1} of {runs}: {figures}", flush=True)
        for key, value in figures.items():
            every[key].append(value)
    return {key: round(statistics.median(values), 4) for key, values in every.items()}


def _figures(found: Mapping[str, Any], above: str = "") -> list[tuple[str, float]]:
    """(name, number) of each, with the names of the objects that it is in before its own."""
    flat: list[tuple[str, float]] = []
    for key, value in found.items():
        if isinstance(value, dict):
            flat += _figures(value, f"{above}{key} ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat.append((above + key, float(value)))
    return flat


def main(arguments: list[str]) -> int:
    """Measure what is named, and write it; 2 where nothing is named."""
    what, given = (arguments[0], arguments[1:]) if arguments else ("", [])
    if what == "coverage":
        measure_coverage(given)
    elif what == "skipped":
        marks, *reports = given
        write("skipped", read().get("skipped", {}) | {marks: skipped([Path(report) for report in reports])})
    elif what == "cpu_seconds" and len(given) == 1:
        found = json.loads((REPO / ".pytest_cache" / "v" / "cpu_seconds" / given[0]).read_text())
        write(f"cpu_seconds.{given[0]}", found)
    elif what == "bench":
        runs = int(given.pop(given.index("--runs") + 1)) if "--runs" in given else RUNS
        for name in [word for word in given if word != "--runs"] or BENCHES:
            write(f"bench.{name}", measure_bench(name, runs))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
