"""Two whole runs whose engine compiles, on the disk of a new node each: the second compiles nothing, and no number
differs.  (On CPUs Megatron compiles nothing in either.)"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.compilations import Compiler
from tests.support.runs import POLICY, Run, metrics, recipe, samples

pytestmark = [pytest.mark.soak, pytest.mark.vllm]


@pytest.mark.parametrize("ranks", [2, 1], ids=["torchrun", "ranks"])
def test_second_run_compiles_nothing(tmp_path: Path, task: Path, ranks: int) -> None:
    """With torch.compile on, a run compiles, and the next run of its shape, with an empty node, nothing; rewards, losses
    and samples are the same bit for bit; each says what it found."""
    compiler = Compiler(tmp_path / "compiler")
    node = tmp_path / "n"
    found = []
    for name in ("first", "second"):
        shutil.rmtree(node, ignore_errors=True)
        node.mkdir()
        (path := tmp_path / name).mkdir()
        root = tmp_path / "runs" / name
        root.parent.mkdir(exist_ok=True)
        values = POLICY | {
            "run_dir": str(root),
            "actor_num_gpus_per_node": ranks,
            "num_rollout": 12,
            "engine_start_timeout": 600,
        }
        environment = compiler.environment | {"TMPDIR": str(node), "TORCHDYNAMO_DISABLE": "0"}
        run = Run(recipe(path, task, **values), "--vllm-no-enforce-eager", root=root, **environment)
        status, out = run.end(1200)
        assert status == 0, out + run.logs()
        logs = "".join(path.read_text() for path in root.glob("logs/attempt-*/*.log"))
        found.append((metrics(root), samples(root), compiler.taken(), logs))
    (numbers, texts, compiled, said), (again, texts_again, compiled_again, said_again) = found
    assert compiled > 0 and " packed in " in said
    assert compiled_again == 0 and " unpacked in " in said_again and "note: compile" not in said + said_again
    assert (again, texts_again) == (numbers, texts)
