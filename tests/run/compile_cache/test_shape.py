"""What a shape depends on, and what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.plan import Host, make_plan
from hpcrl.run.compile_cache import shape
from hpcrl.run.compile_cache.shape import gpu_kinds, machine_facts, pipeline_stages, role_facts, shape_of

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "_name_or_path": "a"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def name(
    model: Path,
    role: Any = "engine",
    part: tuple[int, ...] = (0,),
    at: str = "/tmp/c",
    base: dict[str, str] | None = None,
    **values: Any,
) -> str:
    options = Options(hf_checkpoint=str(model), **values)
    return shape_of(role_facts(role, options, part) | machine_facts(Path(at), base or {}))


def test_what_decides_compiled_code_is_in_the_shape(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Role, part, model, layout, numbers, processor, driver, packages, Python and directory: each has its own shape."""
    first = name(model)
    others = [
        name(model, "trainer"),
        name(model, part=(1,)),
        name(model, at="/scratch/c"),
        name(model, bf16=False),
        name(model, rollout_num_gpus=4, rollout_num_gpus_per_engine=2),
    ]
    trainer = [name(model, "trainer", tensor_model_parallel_size=2), name(model, "trainer", context_parallel_size=2)]
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    others.append(name(model))
    (model / "config.json").write_text(json.dumps(CONFIG))
    for what, value in {
        "_lines": lambda path, names: ["flags : avx2"],
        "version": lambda package: "9.9",
        "gpu_kinds": lambda: ["Model: H100"],
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(shape, what, value)
            others.append(name(model))
    with monkeypatch.context() as patch:
        patch.setattr(shape.sys, "prefix", "/elsewhere")
        others.append(name(model))
    assert len({first, *others, *trainer}) == 1 + len(others) + len(trainer)
    assert name(model) == first


def test_compilers_are_in_the_shape(model: Path, tmp_path: Path) -> None:
    """Which compilers a role would call, by its variables and on its PATH, and what CUDA code they make."""
    (folder := tmp_path / "bin").mkdir()
    found = [name(model, base={"PATH": str(folder)})]
    for compiler, text in (("g++", "12"), ("g++", "12.3"), ("nvcc", "12"), ("gcc-9", "9")):
        (path := folder / compiler).write_text(text)
        path.chmod(0o755)
        found.append(name(model, base={"PATH": str(folder), "CC": "gcc-9"}))
    for also in ({"CXX": "clang++"}, {"CUDA_HOME": "/opt/cuda"}, {"TORCH_CUDA_ARCH_LIST": "9.0"}):
        found.append(name(model, base={"PATH": str(folder), **also}))
    assert len(set(found)) == len(found)
    assert name(model, base={"PATH": str(folder), "CC": "gcc-9", "USER": "a"}) == found[4]


def test_what_does_not_is_not(model: Path) -> None:
    """Settings that change from run to run, the model's place, and what its file says of nothing, cost no hit."""
    first = name(model)
    assert first == name(model, seed=5, lr=1e-5, num_rollout=7, vllm={"gpu_memory_utilization": 0.5})
    place = model / "copy"
    place.mkdir()
    changed = CONFIG | {"_name_or_path": "b", "transformers_version": "0"}
    (place / "config.json").write_text(json.dumps(dict(reversed(changed.items()))))
    assert first == name(place)


def test_every_process_has_the_same_name_without_torch(model: Path) -> None:
    """Another process gives a shape the same name, and imports no torch for it."""
    code = (
        "import sys; from pathlib import Path; from tests.run.compile_cache.test_shape import name; "
        f"print(name(Path({str(model)!r})), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [name(model), "False"]


def test_kinds_of_gpus_are_read_from_the_drivers_files(tmp_path: Path) -> None:
    """Kind and driver of NVIDIA's and AMD's GPUs; not their serial numbers, which differ between nodes."""
    for number, uuid in enumerate(("GPU-1", "GPU-2")):
        card = tmp_path / f"nvidia/gpus/{number}"
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: {uuid}\n")
    (tmp_path / "nvidia/version").write_text("NVRM version: 570.1\nGCC version: 12\n")
    for number, target in enumerate((0, 90402)):
        (tmp_path / f"amd/{number}").mkdir(parents=True)
        (tmp_path / f"amd/{number}/properties").write_text(f"cpu_cores_count 4\ngfx_target_version {target}\n")
    found = gpu_kinds(tmp_path / "nvidia", tmp_path / "amd")
    assert found == ["Model: NVIDIA H100", "NVRM version: 570.1", "gfx_target_version 90402"]
    assert gpu_kinds(tmp_path / "none", tmp_path / "none") == []


def test_pipeline_stages_of_a_host() -> None:
    options = Options(actor_num_nodes=4, actor_num_gpus_per_node=2, rollout_num_gpus=0, pipeline_model_parallel_size=2)
    plan = make_plan(options, [Host(name, 2, "", "") for name in "abcd"], "run")
    assert [pipeline_stages(options, plan, host) for host in "abcd"] == [(0,), (0,), (1,), (1,)]
