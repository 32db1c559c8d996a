"""`hpcrl rehearse` of every shipped recipe and of every script of slime's that imports, at full size: nothing is wrong
with them, and each takes at most 60 s and 4 GiB of two cores.

    make soak SOAK=test_bounds                       # some 20 minutes of an idle machine
    HPCRL_TABLE=table.md make soak SOAK=test_bounds  # and a line of that file for each

A busy machine takes longer than it would alone, so processor seconds are what is held against two cores.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.config.slime.test_scripts import HONOURED, given
from tests.support.published_models import MODELS
from tests.support.small_recipes import EXAMPLES, FP8, IN_FP8, RECIPES

pytestmark = pytest.mark.soak

CORES, SECONDS, GIBIBYTES = 2, 60.0, 4.0
#: scripts that were written for other cards than an H100, and their card's GiB
CARDS = {"run-qwen3-4B-amd": 192, "run-qwen3-8B-amd": 192, "run-llama3.2-3B-Instruct-amd": 192}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
#: whose --hf-checkpoint is quantized
QUANTIZED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(IN_FP8, FP8),
    "low_precision/run-qwen3-4b-fp8": FP8,
    "run-qwen3-235B-A22B": FP8,
    "low_precision/run-qwen3-30b-a3b-fp8": FP8,
    "low_precision/run-qwen3-30B-A3B-int4": INT4,
}
#: scripts that cannot run here, and what is said of them: weights of 4 bits cannot be updated
WRONG = {"low_precision/run-qwen3-30B-A3B-int4": "quantization_config"}
#: scripts that train in FP8, for which there is no stand-in: the engines' settings and the checks of plan alone are judged
UNSHOWN = {"low_precision/run-qwen3-30b-a3b-fp8"}
#: recipes that make their model themselves; their config.json is that of examples/arithmetic.py
SMALL = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.toml") if path.stem not in RECIPES)


def config_of(name: str) -> dict[str, Any]:
    """The published config.json of a recipe's model, or of a script's."""
    model = RECIPES[name] if name in RECIPES else given(name)["model"]
    config = MODELS[model][1]
    quantized = {"quantization_config": QUANTIZED[name]} if name in QUANTIZED else {}
    return config | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]} | quantized


def recipe_of(name: str, directory: Path) -> list[str]:
    """The recipe, and what is said on the command line in addition to it."""
    if name in RECIPES:
        return [str(EXAMPLES / f"{name}.toml")]
    script = given(name)
    words = [script["program"], *shlex.split(script["arguments"])]
    command = [sys.executable, "-m", "hpcrl", "import", "--", *words]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    path = directory / "recipe.toml"
    path.write_text(found.stdout)
    return [str(path)]


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:  # it has ended
        return [pid]


def memory(pid: int) -> int:
    """Bytes of a process and all below it; what they share counts once."""
    total = 0
    for each in tree(pid):
        try:
            total += sum(map(int, re.findall(r"^Pss: +(\d+)", Path(f"/proc/{each}/smaps_rollup").read_text(), re.M)))
        except OSError:
            continue
    return total << 10


def measured(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """(what came of a command, processor seconds of it and all below it, most GiB of them at once)"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            most[0] = max(most[0], memory(process.pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        out, said = process.communicate(timeout=1800)
    finally:
        ended.set()
        looking.join(timeout=60)
        process.kill()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return subprocess.CompletedProcess(command, process.returncode, out, said), spent, most[0] / 2**30


def rehearsed(name: str, command: list[str], said: str = "") -> None:
    """Run it; it must find nothing, or what is `said`, within bounds."""
    found, spent, most = measured([sys.executable, "-m", "hpcrl", "rehearse", *command])
    ranks = ", ".join(re.findall(r"^rehearsed: (\d+ of \d+)", found.stdout, re.M))
    outcome = ("refused" if said else "ALARM") if found.returncode else "not shown" if name in UNSHOWN else "nothing"
    line = f"| {name} | {ranks} | {spent / CORES:.0f} | {most:.1f} | {outcome} |"
    print(line, found.stdout, found.stderr, sep="\n")
    if table := os.environ.get("HPCRL_TABLE"):
        with Path(table).open("a") as file:
            file.write(f"{line}\n{found.stderr}")
    if said:
        assert found.returncode == 2 and said in found.stderr
    else:
        assert found.returncode == 0, found.stderr
        assert ("cannot go through" in found.stdout) == (name in UNSHOWN), found.stdout
    assert spent <= CORES * SECONDS
    assert most <= GIBIBYTES


@pytest.mark.parametrize("name", [*RECIPES, *HONOURED])
def test_a_large_recipe_is_right_and_quick(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    card = ["--gpu-memory", str(CARDS[name])] if name in CARDS else []
    rehearsed(name, [*recipe_of(name, tmp_path), "--hf-checkpoint", str(tmp_path), *card], WRONG.get(name, ""))


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The models that the small recipes make: with experts or without."""
    found = {}
    for experts in (False, True):
        directory = tmp_path_factory.mktemp("prepared")
        command = [sys.executable, str(EXAMPLES / "arithmetic.py"), "--out", str(directory), "--seed", "1"]
        subprocess.run([*command, *["--experts", "16"] * experts], check=True, timeout=300)
        found[experts] = directory / "model"
    return found


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_is_right_and_quick(small_models: dict[bool, Path], name: str) -> None:
    model = small_models["--experts" in (EXAMPLES / name).read_text()]
    rehearsed(name, [str(EXAMPLES / name), "--hf-checkpoint", str(model)])
