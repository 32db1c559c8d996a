"""What roles find in their environment: whose GPUs they see, and what their libraries are told before they are
imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.roles import devices
from hpcrl.plan import Host, Plan, make_plan
from hpcrl.run import gpu_environment
from hpcrl.run.compile_cache.role_cache import ALSO
from hpcrl.run.gpu_environment import (
    CACHES,
    TABLE,
    Where,
    compile_caches,
    missing,
    overruled,
    private_directory,
    wanted,
)
from hpcrl.run.role import RoleContext
from hpcrl.run.rundir import RunDir
from hpcrl.trainer.start.torchrun import DUMPS, cpu_threads, prepare_environment


def options(**values: Any) -> Options:
    return Options(**({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2} | values))


def plan(**values: Any) -> Plan:
    return make_plan(options(**values), [Host("a", 4, "10.0.0.1", "ib0")], "run")


def shown(role: str, index: int, inherited: str | None, slot: int | None = None, **values: Any) -> str | None:
    return devices(plan(**values), role, index, "a", slot, inherited).get("CUDA_VISIBLE_DEVICES")


# ---- GPUs


def test_roles_of_a_host_share_its_gpus_out() -> None:
    assert shown("trainer", 0, "4,5,6,7") == shown("trainer", 1, "4,5,6,7") == "4,5", (
        "all of the trainer's, as under torchrun"
    )
    assert [shown("engine", index, "4,5,6,7") for index in (0, 1)] == ["6", "7"]
    assert shown("rollout", 0, "4,5,6,7") is None


def test_engine_does_not_take_trainers_gpus() -> None:
    """An engine never takes the trainer's GPUs for its own."""
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=0,1 holds 2 GPUs, the plan uses 4 slots of this host"):
        shown("engine", 0, "0,1", rollout_num_gpus_per_engine=2)


def test_gpus_that_are_bound_to_tasks() -> None:
    """srun --gpus-per-task=1: every task sees one GPU, under the number 0 or its own."""
    assert [shown("trainer", index, "0", slot=index) for index in (0, 1)] == ["0", "0"]
    assert [shown("engine", index, str(2 + index), slot=2 + index) for index in (0, 1)] == ["2", "3"]
    assert shown("trainer", 1, "0,1,2,3", slot=1) == "0,1", "tasks that see all of the host's"
    with pytest.raises(UsageError, match="holds 1.*bound to this task, 2 are needed: slots 2-3.*--gpu-bind=none"):
        shown("engine", 0, "0", slot=2, rollout_num_gpus_per_engine=2)


def test_a_machine_without_gpus_is_told_of_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hpcrl.run.gpu_environment.GPUS", (str(tmp_path / "nvidia[0-9]*"),))
    assert shown("trainer", 0, None) is None and shown("engine", 0, None) is None
    (tmp_path / "nvidia0").touch()
    assert shown("trainer", 0, None) == "0,1" and shown("engine", 1, None) == "3"
    assert shown("trainer", 0, "") is None and shown("engine", 0, "NoDevFiles") is None, "hidden: the run is on CPUs"


# ---- what Megatron and the CUDA libraries read


SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}


def test_one_hardware_queue_for_megatron() -> None:
    """One hardware queue where Megatron relies on it."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for_megatron = lambda o: wanted("trainer", Where(o))  # noqa: E731
    assert wanted("trainer", Where(options())) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_cached_size_mb:64",
        **SAFE,
    }
    assert for_megatron(options(tensor_model_parallel_size=2))[name] == "1"
    assert for_megatron(options(context_parallel_size=2))[name] == "1"
    assert name not in for_megatron(options(pipeline_model_parallel_size=2, expert_model_parallel_size=2))


def test_determinism_is_asked_of_every_library() -> None:
    deterministic, plain = (wanted("trainer", Where(options(deterministic_mode=on))) for on in (True, False))
    assert {name: value for name, value in deterministic.items() if name not in plain} == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "Ring",
    }


def test_what_flags_of_megatrons_ask_for() -> None:
    blocks = options(megatron={"fp8": "e4m3", "fp8_recipe": "blockwise"})
    assert wanted("trainer", Where(blocks))["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" not in wanted("trainer", Where(options()))
    registers = wanted("trainer", Where(options(megatron={"nccl_ub": True})))
    assert registers["PYTORCH_ALLOC_CONF"] == "pinned_max_cached_size_mb:64"
    assert "PYTORCH_ALLOC_CONF" not in wanted("engine", Where(options())), "vLLM's sleep has pools of its own"


def test_user_setting_is_reported_with_reason() -> None:
    """A variable that the user has set is reported, with the reason for another value."""
    wishes = wanted("trainer", Where(options(tensor_model_parallel_size=2), "ib0", 4))
    base = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
    }
    said = list(overruled(wishes, base))
    assert [line.split()[0] for line in said] == [
        "CUDA_DEVICE_MAX_CONNECTIONS=8",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512",
    ]
    assert "stays; hpcrl would set CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue" in said[0]
    left = missing(wishes, base)
    assert left == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0", **SAFE}
    assert list(overruled(wishes, {})) == [] and missing(wishes, {}) == wishes


def test_the_page_has_every_variable_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    rows = {line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")}
    assert {variable.name for variable in TABLE} <= rows
    assert all(len(variable.why.split()) > 3 and variable.roles for variable in TABLE)


def test_threads_of_a_rank_whose_adam_is_on_the_cpu() -> None:
    offload = {"megatron": {"optimizer_cpu_offload": True}}
    assert cpu_threads(options(), 64, 8) == 1
    assert cpu_threads(options(**offload), 64, 8) == 8
    assert cpu_threads(options(**offload), 4, 8) == 1


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opts = options(tensor_model_parallel_size=2, train_env_vars={"NCCL_DEBUG": "INFO"})
    for name in (
        *CACHES,
        *ALSO,
        *DUMPS,
        "PYTORCH_ALLOC_CONF",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "NCCL_DEBUG",
    ):
        monkeypatch.setenv(name, "mine")  # so that all are put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/fast/triton")
    monkeypatch.setattr(gpu_environment.tempfile, "gettempdir", lambda: str(tmp_path))
    context = RoleContext(
        RunDir.create(tmp_path / "run"), opts, make_plan(opts, [Host("a", 4, "10.0.0.1", "ib0")], "run"), 0
    )
    code = prepare_environment(context, (0, 1))
    assert code.where and code.where.here.parent == tmp_path / f"hpcrl-cache-{os.getuid()}"
    expected = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "OMP_NUM_THREADS": "5",
        "TRITON_CACHE_DIR": "/fast/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{code.where.here}/inductor",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "NCCL_DEBUG": "INFO",
        "PATH": f"{os.path.dirname(sys.executable)}:/bin",
        "TORCH_FR_DUMP_TEMP_FILE": f"{context.rundir.logs}/nccl-trace-rank-",
    }
    assert {name: os.environ.get(name) for name in expected} == expected


# ---- compile caches


def test_compile_caches_per_node_and_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile caches belong to this node and this user."""
    monkeypatch.setattr(gpu_environment.tempfile, "gettempdir", lambda: str(tmp_path))
    found = compile_caches({"VLLM_CACHE_ROOT": "/mine"})
    root = tmp_path / f"hpcrl-cache-{os.getuid()}"
    assert found == {name: str(root / folder) for name, folder in CACHES.items() if name != "VLLM_CACHE_ROOT"}
    assert root.stat().st_mode & 0o777 == 0o700
    assert compile_caches({}) == {name: str(root / folder) for name, folder in CACHES.items()}, (
        "the same in the next run"
    )
    assert compile_caches(dict.fromkeys(CACHES, "x")) == {}


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_directory_open_to_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A directory that another user could have filled is not used."""
    monkeypatch.setattr(gpu_environment.tempfile, "gettempdir", lambda: str(tmp_path))
    root = tmp_path / f"hpcrl-cache-{os.getuid()}"
    spare = tmp_path / "spare"
    if what == "open to others":
        root.mkdir()
        root.chmod(0o755)
    elif what == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "theirs")
    else:
        root.touch()
    assert not private_directory(root)
    assert set(compile_caches({}, spare).values()) == {str(spare / folder) for folder in CACHES.values()}


def test_another_users_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    assert private_directory(tmp_path / "cache")
    monkeypatch.setattr(gpu_environment.os, "getuid", lambda: mine + 1)
    assert not private_directory(tmp_path / "cache")
