"""The runner of mutants: an edit is seen by the tests of its child, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants import REPO

pytestmark = [pytest.mark.process, pytest.mark.lint]

TABLE = """
[packages]
kl = ["tests/algorithms/test_losses.py", "-k", "test_a_kl_is_as_before"]

[[mutants]]
id = "bound"
file = "hpcrl/algorithms/kl/low_var_kl.py"
package = "kl"
old = "BOUND = 10.0"
new = "BOUND = 11.0"

[[mutants]]
id = "same"
file = "hpcrl/algorithms/kl/low_var_kl.py"
package = "kl"
old = "BOUND = 10.0"
new = "BOUND = 5.0 * 2"

[[mutants]]
id = "hangs"
file = "hpcrl/algorithms/kl/low_var_kl.py"
package = "kl"
old = "BOUND = 10.0"
new = "BOUND = 10.0; import time; time.sleep(600)"

[[mutants]]
id = "ends"
file = "hpcrl/algorithms/kl/low_var_kl.py"
package = "kl"
old = "BOUND = 10.0"
new = "BOUND = 10.0; import os; os._exit(0)"
"""
SCRIPT = """
import sys
from pathlib import Path
import tools.mutants as it
it.TABLE = Path(sys.argv[1])
packages, mutants = it.read_table(it.TABLE)
it.preload()
for mutant in [*it.unedited(packages, mutants), *mutants]:
    found = it.run(mutant, 4 if mutant.id == "hangs" else 200)
    print(mutant.id, found.noticed, found.by, flush=True)
"""


def test_an_edit_is_noticed_or_not(tmp_path: Path) -> None:
    """Without an edit the tests pass; with one that matters they fail, and the failing test is named; one that changes
    nothing survives; one that hangs, or ends the process at once, does not pass for one that its tests let live."""
    table = tmp_path / "mutants.toml"
    table.write_text(TABLE)
    source = REPO / "hpcrl/algorithms/kl/low_var_kl.py"
    before = source.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(table)], cwd=REPO, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert found["unedited-kl"] == ["False"]
    assert found["bound"][0] == "True" and "test_a_kl_is_as_before" in found["bound"][1]
    assert found["same"] == ["False"]
    assert found["hangs"][0] == "True" and "4 s" in found["hangs"][1]
    assert found["ends"][0] == "True"
    assert source.read_bytes() == before
