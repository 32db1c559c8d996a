"""`hpcrl selftest --first-hour`: the checks to make first on new GPUs, and the lines of logs that name kernels.

Invariant: which groups are run follows from the number of GPUs alone; what their kind lacks, a check says itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcrl.report.file_tail import end_of_text

#: group -> its checks
GROUPS = {
    "one": (
        *("environment", "devices", "transformers", "stream_order", "ipc", "sleep_wake", "engine_update"),
        *("large_update", "engine_logprobs", "save_resume", "qwen3_rates"),
    ),
    "eight": ("collectives", "bandwidth", "engine_loss"),
    "moe-fp8": ("moe_fp8",),
}
#: what vLLM and hpcrl call the kernels that they chose, and the memory that was left
NAMES = re.compile(
    r"[Bb]ackend|all2all|kernel|FlashInfer|FlashAttention|DeepG[Ee][Mm][Mm]|KV cache (memory|size|layout)"
    r"|[Gg]raph captur|: layers "
)
#: what vLLM's lines begin with, or hpcrl's
PREFIX = re.compile(r"^(\(.*? pid=\d+\) )*([A-Z]+ \d\d-\d\d )?\d\d:\d\d:\d\d (\[\S+:\d+\] )?")
LONGEST = 300  #: characters of a line that are kept
MOST = 60  #: lines of a run


def groups(gpus: int) -> list[str]:
    """Those for a machine with so many GPUs: on one no expert parallelism, on a CPU everything that one host can do."""
    return ["one", *(["eight"] if gpus > 1 else []), *(["moe-fp8"] if gpus != 1 else [])]


def checks_of(gpus: int) -> list[str]:
    """The checks of these groups."""
    return [name for group in groups(gpus) for name in GROUPS[group]]


def kernel_lines(directory: Path) -> dict[str, list[str]]:
    """Run, or "ranks" -> lines of its logs that name kernels, each once, without time and process.

    Args:
        directory: of the self-test.
    """
    found: dict[str, list[str]] = {}
    for log in sorted(directory.glob("work/runs/*/logs/*/*.log")) + sorted(directory.glob("logs/*.log")):
        name = log.parents[2].name if log.parents[3].name == "runs" else "ranks"
        parts = [(PREFIX.match(line), line) for line in end_of_text(log).splitlines() if NAMES.search(line)]
        lines = [line[begin.end() :][:LONGEST] for begin, line in parts if begin]
        found[name] = list(dict.fromkeys([*found.get(name, []), *lines]))[:MOST]
    return found
