"""What the server does before vLLM's own part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import REPO

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from hpcrl.engine.server import inspect_models_here
inspect_models_here()
from vllm.model_executor.models import registry

class NoPython(registry.subprocess.Popen):
    def __init__(self, command, *given, **named):
        assert sys.executable not in command, "another process"
        super().__init__(command, *given, **named)

registry.subprocess.Popen = NoPython
found = registry.ModelRegistry.models["Qwen3ForCausalLM"].inspect_model_cls()
print(json.dumps([found.architecture, found.is_text_generation_model]))
"""


def test_a_model_is_looked_at_in_the_server(tmp_path: Path) -> None:
    """Where vLLM has kept nothing of the model's class, no other process imports vLLM to look at it."""
    env = {"PYTHONPATH": str(REPO), "VLLM_TARGET_DEVICE": "cpu", "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["Qwen3ForCausalLM", True]
    assert list(tmp_path.glob("modelinfos/*Qwen3ForCausalLM.json"))
