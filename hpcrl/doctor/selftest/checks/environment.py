"""Driver, compilers, and modules that a run on GPUs compiles and imports work here, as `hpcrl doctor` tries them."""

from __future__ import annotations

from pathlib import Path

from hpcrl.doctor.selftest.registry import Check, Outcome, Skip
from hpcrl.doctor.selftest.whole_run import gpu_count
from hpcrl.launch.node_checks.gpu_needs import check_gpu_needs


def work(directory: Path) -> Outcome:
    if not gpu_count():
        raise Skip("no GPU: there is no driver")
    found = list(check_gpu_needs([]))
    bad = any(finding.level == "fail" for finding in found)
    return Outcome("failed" if bad else "passed", "; ".join(each.line() for each in found))


CHECK = Check("driver, compilers and modules work", 5, "launcher", work, ("torch",))
