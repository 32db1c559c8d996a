"""A real compiler's work is kept: torch.compile on one node, and none of it on the next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.run.gpu_environment import CACHES
from tests.support.compilations import Compiler
from tests.support.runs import REPO

pytestmark = pytest.mark.process

#: a process of a role: what earlier ones have compiled is unpacked, something is compiled, and that is packed
ROLE = """
import os, sys
from pathlib import Path
from hpcrl.run.compile_cache import role_cache as kept_code
from hpcrl.run.compile_cache.role_cache import KeptCode
from hpcrl.config.options import Options
from hpcrl.run.rundir import RunDir

kept_code.LAST, kept_code.QUIET = 60.0, 0.0
code = KeptCode(Options(hf_checkpoint=sys.argv[1]), RunDir(sys.argv[2]), "trainer", (0,), os.environ)
os.environ |= code.variables
code.watch()
import torch

torch.manual_seed(0)
found = torch.compile(lambda x, y: (torch.nn.functional.silu(x) * y).softmax(-1).sum())(*torch.randn(2, 64, 64))
print(found.item().hex())
code.finish()
"""


def test_next_node_compiles_nothing(tmp_path: Path) -> None:
    """A node compiles with a real compiler; one with an empty disk asks it for nothing, and has the same number bit for
    bit."""
    compiler = Compiler(tmp_path / "compiler")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")

    def role(run: str) -> tuple[str, int, str]:
        """(its number, runs of the compiler, what it said) on a new node, whose disk has the same path."""
        shutil.rmtree(tmp_path / "node", ignore_errors=True)
        (tmp_path / "node").mkdir()
        words = [sys.executable, "-c", ROLE, str(tmp_path / "model"), str(tmp_path / "runs" / run)]
        # torch puts the place of its cache into the environment of whatever process has compiled, such as this one's
        environment = {name: value for name, value in os.environ.items() if name not in CACHES} | compiler.environment
        environment |= {"TMPDIR": str(tmp_path / "node"), "PYTHONPATH": str(REPO)}
        environment["TORCHDYNAMO_DISABLE"] = "0"
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1], compiler.taken(), done.stderr

    number, compiled, said = role("first")
    assert compiled > 0 and "packed" in said
    again, compiled_again, said = role("second")
    assert (again, compiled_again) == (number, 0) and "unpacked" in said and "note" not in said
