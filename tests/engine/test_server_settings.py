"""What a vLLM server is started with, and how its death is explained: all without vLLM."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.engine.health import ServerLog, reason
from hpcrl.engine.multi_node import variables
from hpcrl.engine.server import command_line
from hpcrl.engine.server_settings import (
    EMPTY,
    Build,
    check_version,
    cpu_threads,
    flags,
    kv_cache_bytes,
    server_environment,
    share_flags,
)
from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.plan import Host, Plan, local_hosts, make_plan
from hpcrl.run import gpu_environment
from hpcrl.run.gpu_environment import Where, wanted
from hpcrl.run.peers import IDLE, MeetingPeer
from hpcrl.weights.update_backend import backend
from tests.support.layouts import config_of

CPU, CUDA = Build("0.32.0", True), Build("0.32.0", False)
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def options(model: str = "m", **values: Any) -> Options:
    return Options(**({"hf_checkpoint": model, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2} | values))


def plan(o: Options, *hosts: Host) -> Plan:
    return make_plan(o, list(hosts) or local_hosts(o), "run")


def test_small_gpu_leaves_room_for_update(tmp_path: Path) -> None:
    """The share of a small GPU leaves room for a weight update."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3", odd=False)))
    rounds = {"update_weight_buffer_size": 512 << 20, "weight_transfer": "nccl"}
    mine = share_flags(options(str(tmp_path), **rounds), 4 << 30)["gpu_memory_utilization"]
    assert mine == 0.87, "7/8 but for a small layer"
    assert share_flags(options(str(tmp_path), **rounds), 80 << 30) == {}
    given = options(str(tmp_path), **rounds, vllm={"gpu_memory_utilization": 0.9})
    assert share_flags(given, 4 << 30) == {}


@pytest.mark.parametrize(
    ("wish", "cpu", "hosts", "found"),
    [
        ("auto", True, 1, "hpcrl_shm"),
        ("auto", True, 2, "hpcrl_gloo"),
        ("auto", False, 1, "hpcrl_vllm"),
        ("auto", False, 2, "hpcrl_vllm"),
        ("shm", True, 1, "hpcrl_shm"),
        ("gloo", True, 1, "hpcrl_gloo"),
        ("gloo", False, 2, "hpcrl_gloo"),
        ("nccl", False, 1, "hpcrl_nccl"),
        ("shm", True, 2, "--weight-transfer shm needs trainer"),
        ("nccl", True, 1, "--weight-transfer nccl needs CUDA"),
    ],
)
def test_the_way_of_the_weights(wish: str, cpu: bool, hosts: int, found: str) -> None:
    o = options(weight_transfer=wish)
    where = plan(o, Host("a", 4)) if hosts == 1 else plan(o, Host("a", 2), Host("b", 2))
    if found.startswith("--"):
        with pytest.raises(UsageError, match=found):
            backend(o, where, cpu)
    else:
        assert backend(o, where, cpu) == found


def test_flags_on_cpu_and_cuda(model: str) -> None:
    o = options(model, bf16=False, rollout_max_context_len=512, seed=5, vllm={"max_num_seqs": 9, "block_size": 16})
    cpu = flags(o, plan(o), 1, 4711, CPU)
    assert cpu["dtype"] == "float32"
    assert cpu["port"] == 4711 and cpu["host"] == "127.0.0.1"
    assert cpu["max_model_len"] == 512 and cpu["seed"] == 6
    assert cpu["enforce_eager"] is True and cpu["distributed_executor_backend"] == "uni"
    assert cpu["max_num_seqs"] == 9 and cpu["block_size"] == 16, "the user's come last"
    assert cpu["logprobs_mode"] == "processed_logprobs"
    assert cpu["generation_config"] == "vllm"
    assert cpu["middleware"][-1] == "hpcrl.engine.key_guard.RunKeyGuard", "the outermost"
    assert cpu["weight_transfer_config"] == {"backend": "hpcrl_shm"}
    wide = options(model, rollout_num_gpus_per_engine=2)
    cuda = flags(wide, plan(wide), 0, 1, CUDA)
    assert cuda["dtype"] == "bfloat16" and cuda["tensor_parallel_size"] == 2
    assert cuda["weight_transfer_config"] == {"backend": "hpcrl_vllm"}
    assert not {"enforce_eager", "kv_cache_memory_bytes", "max_model_len", "distributed_executor_backend"} & set(cuda)


def test_batches_of_spread_experts(model: str) -> None:
    """Every GPU's experts get the rows of all parts: a part takes its share of vLLM's own tokens."""
    spread = {"data_parallel_size": 2, "enable_expert_parallel": True}
    opts = options(model, rollout_num_gpus=2, rollout_num_gpus_per_engine=2, vllm=spread)
    assert flags(opts, plan(opts), 0, 1, CUDA)["max_num_batched_tokens"] == 4096
    chosen = options(model, rollout_num_gpus_per_engine=2, vllm={**spread, "max_num_batched_tokens": 600})
    assert flags(chosen, plan(chosen), 0, 1, CUDA)["max_num_batched_tokens"] == 600
    assert "max_num_batched_tokens" not in flags(options(model), plan(options(model)), 0, 1, CUDA)


def test_an_engine_over_hosts_is_one_vllm(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 GPUs on four hosts: each part says which it is, and where they meet."""
    hosts = [Host(name, 8, f"10.0.0.{i}", "ib0") for i, name in enumerate("tabcd")]
    o = options(model, actor_num_gpus_per_node=8, rollout_num_gpus=32, rollout_num_gpus_per_engine=32)
    p = plan(o, *hosts)
    assert [place.host for place in p.engine_nodes(0)] == list("abcd")
    with pytest.raises(HpcrlError, match="engine 0 spans 4 hosts, and HPCRL_ENGINE_MEETING is not set"):
        flags(o, p, 0, 1, CUDA)
    meeting = MeetingPeer(host="10.0.0.1", port=4001, rpc_port=4002)

    def part(number: int, wanted: Options) -> dict[str, Any]:
        for name, value in variables(meeting, number).items():
            monkeypatch.setenv(name, value)
        return flags(wanted, p, 0, 1, CUDA)

    common = {"nnodes": 4, "master_addr": "10.0.0.1", "master_port": 4001, "tensor_parallel_size": 32}
    first, last = part(0, o), part(3, o)
    assert first.items() >= {**common, "node_rank": 0}.items() and "headless" not in first
    assert last.items() >= {**common, "node_rank": 3, "headless": True}.items()
    assert "data_parallel_rpc_port" not in first
    divided = part(2, o.model_copy(update={"vllm": {"data_parallel_size": 4}}))
    told = {
        "tensor_parallel_size": 8,
        "data_parallel_size": 4,
        "data_parallel_rpc_port": 4002,
        "data_parallel_address": "10.0.0.1",
    }
    assert divided.items() >= told.items()
    base = {"PATH": "/bin"}
    assert [server_environment(o, p, 0, base, CUDA, node)["VLLM_HOST_IP"] for node in range(4)] == [
        h.address for h in hosts[1:]
    ]
    assert backend(o.model_copy(update={"colocate": True}), p, True) == "hpcrl_gloo", (
        "parts on other hosts share no memory with the trainer"
    )


@pytest.mark.parametrize("cut", [{"rollout_top_p": 0.9}, {"rollout_top_k": 5}])
def test_logprobs_of_all_tokens(model: str, cut: dict[str, float]) -> None:
    """Log-probs are of all tokens, whatever they are sampled from."""
    o = options(model, **cut)
    assert flags(o, plan(o), 0, 1, CPU)["logprobs_mode"] == "raw_logprobs"


EXPERTS = CONFIG | {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def test_who_tells_the_experts_and_when_nobody_can(model: str) -> None:
    """vLLM itself on CUDA; on a CPU its routers, which see no token that is cached."""

    def found(build: Build, **values: Any) -> dict[str, Any]:
        o = options(model, use_rollout_routing_replay=True, **values)
        return flags(o, plan(o), 0, 1, build)

    with pytest.raises(DataError):  # of no model that is known
        found(CPU)
    (Path(model) / "config.json").write_text(json.dumps(EXPERTS))
    assert found(CPU)["enable_prefix_caching"] is False and "enable_return_routed_experts" not in found(CPU)
    assert found(CUDA)["enable_return_routed_experts"] is True and "enable_prefix_caching" not in found(CUDA)
    for build, values, said in (
        (
            CPU,
            {"vllm": {"enable_prefix_caching": True}},
            "experts of cached tokens, --vllm-enable-prefix-caching is given",
        ),
        (
            CUDA,
            {"deterministic_mode": True},
            "--deterministic-mode turns off; leave",
        ),
        (CUDA, {"vllm": {"enable_prefix_caching": False}}, "which --no-vllm-enable-prefix-caching turns off"),
    ):
        with pytest.raises(UsageError, match=f"--use-rollout-routing-replay: vLLM.*{re.escape(said)}"):
            found(build, **values)
    (Path(model) / "config.json").write_text(json.dumps(EXPERTS | {"model_type": "qwen3"}))
    with pytest.raises(UsageError, match="replays the choice.*qwen3 model in.*has none; leave"):
        found(CPU)


@pytest.mark.parametrize("name", ["port", "worker_extension_cls", "middleware", "dtype", "max_model_len", "api_key"])
def test_what_the_run_depends_on_cannot_be_overridden(model: str, name: str) -> None:
    o = options(model, vllm={name: "x"})
    with pytest.raises(UsageError, match=rf"\[vllm\]: {name} cannot be set"):
        flags(o, plan(o), 0, 1, CPU)


def test_latent_attention_on_cpus_keeps_its_settings(model: str) -> None:
    """A user's setting that would bring back a kernel of the CPU build that is wrong is refused, on CPUs alone."""
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}))

    def found(build: Build, **vllm: Any) -> dict[str, Any]:
        o = options(model, vllm=vllm)
        return flags(o, plan(o), 0, 1, build)

    custom = {"custom_ops": ["-rotary_embedding"]}
    assert found(CPU, attention_backend="CPU_MLA", compilation_config=custom)["compilation_config"] == custom
    for name, value in {
        "attention_backend": "TORCH_SDPA",
        "attention_config": {"backend": "TORCH_SDPA"},
        "compilation_config": {"custom_ops": ["all"]},
    }.items():
        with pytest.raises(UsageError, match=f"--vllm-{name.replace('_', '-')}: .*latent attention"):
            found(CPU, **{name: value})
        assert found(CUDA, **{name: value})[name] == value
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    drawn = found(CPU, speculative_config=drafts)["speculative_config"]
    assert drawn == drafts | {"attention_backend": "CPU_MLA"}
    assert found(CPU, speculative_config=drawn)["speculative_config"] == drawn
    assert found(CUDA, speculative_config=drafts)["speculative_config"] == drafts
    other = drafts | {"attention_backend": "TORCH_SDPA"}
    with pytest.raises(UsageError, match=r"--vllm-speculative-config\.attention-backend: .*latent attention"):
        found(CPU, speculative_config=other)
    assert found(CUDA, speculative_config=other)["speculative_config"] == other


def test_gated_delta_nets_on_cpus(model: str) -> None:
    """What the CPU build cannot do with them is set, or refused where the user asks for it; a GPU has its own way."""
    (Path(model) / "config.json").write_text(json.dumps(CONFIG | {"linear_num_value_heads": 4}))

    def found(build: Build, **values: Any) -> dict[str, Any]:
        o = options(model, **values)
        return flags(o, plan(o), 0, 1, build)

    cached = {"vllm": {"enable_prefix_caching": True}}
    assert found(CPU)["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in found(CUDA)
    assert found(CUDA, **cached)["enable_prefix_caching"] is True
    with pytest.raises(UsageError, match="--vllm-enable-prefix-caching: .*seed"):
        found(CPU, **cached)
    with pytest.raises(UsageError, match="--no-bf16: .*bf16 alone"):
        found(CPU, bf16=False)
    assert found(CUDA, bf16=False)["dtype"] == "float32"


def test_text_part_of_a_model_with_images(model: str) -> None:
    """It comes from the trainer, so nothing may have the engine read the files; a run that trains nothing does."""
    whole = {"model_type": "qwen3_5", "text_config": CONFIG | {"model_type": "qwen3_5_text"}}
    (Path(model) / "config.json").write_text(json.dumps(whole))

    def found(**values: Any) -> dict[str, Any]:
        o = options(model, **values)
        return flags(o, plan(o), 0, 1, CUDA)

    assert found()["hf_overrides"] == {"architectures": ["Qwen3_5ForCausalLM"]}
    assert "hf_overrides" not in found(debug_rollout_only=True)
    for method in ("ngram", "suffix"):  # which need no files
        drafted = found(vllm={"speculative_config": {"method": method, "num_speculative_tokens": 2}})
        assert drafted["load_format"] == EMPTY and "hf_overrides" in drafted
    with pytest.raises(UsageError, match="--vllm-speculative-config: .*its drafting layers"):
        found(vllm={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}})
    for name, value in {"load_format": "auto", "hf_overrides": {"a": 1}, "quantization": "fp8"}.items():
        with pytest.raises(UsageError, match=f"--vllm-{name.replace('_', '-')}: .*qwen3_5 model"):
            found(vllm={name: value})


def test_a_model_directory_that_is_none(tmp_path: Path) -> None:
    o = options(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"--hf-checkpoint .*/nothing: no config.json there"):
        flags(o, plan(o), 0, 1, CPU)


def test_size_of_the_kv_cache() -> None:
    token = 2 * 2 * 2 * 32 * 4
    assert kv_cache_bytes(CONFIG, 128, 1000, 4, 2**40) == 128 * 1024 * token
    assert kv_cache_bytes(CONFIG, 1, 10, 4, 2**40) == 64 * 2**20
    assert kv_cache_bytes(CONFIG, 10**6, 10**6, 4, 2**34) == 2**32
    bare = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert kv_cache_bytes(bare, 1000, 1280, 2, 2**40) == 1000 * 1280 * 2 * 2 * 64 * 2
    latent = bare | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_cache_bytes(latent, 1000, 1280, 2, 2**40) == 1000 * 1280 * 2 * 576 * 2


def test_environment_of_a_server(model: str) -> None:
    o = options(model, deterministic_mode=True)
    base = {
        "PATH": "/bin",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_HOST_IP": "10.0.0.1",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    cpu = server_environment(o, plan(o), 0, base, CPU)
    assert cpu["VLLM_HOST_IP"] == "127.0.0.1" and cpu["GLOO_SOCKET_IFNAME"] == "lo"
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and cpu["VLLM_TARGET_DEVICE"] == "cpu"
    assert cpu["OMP_NUM_THREADS"] == "3", "what the user has set stays"
    ninja = os.path.dirname(sys.executable)
    assert cpu["PATH"] == f"{ninja}:/bin", "of an environment that is not activated"
    assert cpu["VLLM_SERVER_DEV_MODE"] == "1"
    assert int(cpu["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 2 * IDLE, (
        "the client, not the server, ends a connection that idles"
    )
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu
    cuda = server_environment(o, plan(o, Host("gpu1", 4)), 1, base, CUDA)
    assert cuda["CUDA_VISIBLE_DEVICES"] == "7" and cuda["VLLM_HOST_IP"] == "gpu1"
    assert not {"VLLM_TARGET_DEVICE", "GLOO_SOCKET_IFNAME"} & set(cuda)
    assert cuda["VLLM_BATCH_INVARIANT"] == "1"
    assert cuda["NCCL_ALGO"] == wanted("trainer", Where(o))["NCCL_ALGO"], (
        "trainer and engines have a communicator in common"
    )
    plain = server_environment(options(model), plan(options(model), Host("gpu1", 4)), 1, base, CUDA)
    assert not {"VLLM_BATCH_INVARIANT", "NCCL_ALGO"} & (set(plain) | set(cpu))


def toolkit(root: Path, version: str) -> str:
    """A CUDA toolkit with this nvcc, as its CUDA_HOME."""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    (root / "bin" / "nvcc").chmod(0o755)
    (root / "include").mkdir()
    (root / "include" / "cuda.h").touch()
    return str(root)


def test_nvcc_of_engines_with_fp8_blocks(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM's kernels are compiled: by the user's toolkit, else the first that is new enough, pip's among them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_environment, "CUDA", "/usual")
    there = os.path.isdir  # of pip's toolkits the one of this test, whatever is installed
    monkeypatch.setattr(
        os.path, "isdir", lambda path: there(path) and ("nvidia" not in str(path) or str(tmp_path) in path)
    )
    o = options(model)

    def home(found: Build = CUDA, **base: str) -> str | None:
        return server_environment(o, plan(o), 0, {"PATH": "/nowhere", **base}, found).get("CUDA_HOME")

    assert home() is None
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    Path(model, "config.json").write_text(json.dumps(CONFIG | blocks))
    assert home(CPU) is None and home(VLLM_USE_DEEP_GEMM="0") is None
    with pytest.raises(UsageError, match=r"nvcc 12\.9 .*none is in /usual; .*nvidia-cuda-nvcc"):
        home()
    old = toolkit(tmp_path / "module", "12.4")
    with pytest.raises(UsageError, match=f"none is in {old}, /usual"):
        home(PATH=f"{old}/bin")
    pip = toolkit(tmp_path / "nvidia" / "cu13", "13.5")
    assert home(PATH=f"{old}/bin") == pip
    new = toolkit(tmp_path / "newer", "12.9")
    assert home(PATH=f"{new}/bin") == new
    assert home(CUDA_HOME=new) == new
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "bin").symlink_to(f"{new}/bin")
    (Path(new) / "include" / "cuda.h").rename(tmp_path / "cuda.h")
    assert home(PATH=f"{tmp_path}/local/bin") == pip, "a script's place is no toolkit"
    with pytest.raises(UsageError, match=f"none is in {old}; "):
        home(CUDA_HOME=old)


def test_every_engine_has_a_seed_of_its_own(model: str) -> None:
    o = options(model, rollout_num_gpus=8, seed=2**32 - 3)
    seeds = [flags(o, plan(o), index, 1, CUDA)["seed"] for index in range(8)]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**32 for seed in seeds)


def test_threads_of_a_cpu_engine(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert cpu_threads(options(model), plan(options(model)), 0) == 4
    assert cpu_threads(options(model, deterministic_mode=True), plan(options(model)), 0) == 1


@pytest.mark.parametrize(
    ("found", "good"),
    [("0.32.0", 1), ("0.32.1+cu130", 1), ("0.33.0rc1", 1), ("1.0.0", 1), ("0.31.9", 0), ("0.26.0+cpu", 0)],
)
def test_an_older_vllm_is_refused(found: str, good: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A newer one than was tried gives a warning."""
    if good:
        check_version(found)
        assert (f"and {found} is installed" in capsys.readouterr().err) == (not found.startswith("0.32"))
    else:
        with pytest.raises(UsageError, match=f"vLLM {re.escape(found)} is installed, 0.32.*oldest version that"):
            check_version(found)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--max-num-seqs", type=int)
    made.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    made.add_argument("--disable-log-stats", action="store_true")
    made.add_argument("--served-model-name", nargs="+")
    made.add_argument("--allowed-origins", type=json.loads)
    made.add_argument("--weight-transfer-config", type=json.loads)
    made.add_argument("--middleware", action="append")
    return made


def test_fields_become_the_servers_own_flags() -> None:
    values = {
        "max_num_seqs": "8",
        "enforce_eager": False,
        "disable_log_stats": True,
        "served_model_name": ["a", "b"],
        "allowed_origins": ["x"],
        "weight_transfer_config": {"backend": "hpcrl_vllm"},
        "middleware": "m.C",
    }
    args = vars(parser().parse_args(command_line(parser(), values)))
    assert args == {
        "max_num_seqs": 8,
        "enforce_eager": False,
        "disable_log_stats": True,
        "served_model_name": ["a", "b"],
        "allowed_origins": ["x"],
        "weight_transfer_config": {"backend": "hpcrl_vllm"},
        "middleware": ["m.C"],
    }
    assert vars(parser().parse_args(command_line(parser(), {"middleware": ["m.C", "m.D"]})))["middleware"] == [
        "m.C",
        "m.D",
    ]
    assert command_line(parser(), {"disable_log_stats": False, "enforce_eager": "true"}) == ["--enforce-eager"]


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="--vllm-max-num-seq: .* did you mean --vllm-max-num-seqs?"):
        command_line(parser(), {"max_num_seq": 8})


CORE = "(EngineCore pid=7) ERROR 11-21 07:11:41 [core.py:123] "


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            [
                f"{CORE}ValueError: Available memory on node 0 (1/23) on kv cache allocation is less than requested "
                "memory",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            "ValueError: Available memory on node 0 (1/23) on kv cache allocation is less than requested memory",
        ),
        (
            [f"{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried", f"{CORE}RuntimeError: other"],
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
        ),
        (
            [
                "pydantic.ValidationError: 1 validation error for ModelConfig",
                "  Value error, User-specified max_model_len is greater",
            ],
            "Value error, User-specified max_model_len is greater",
        ),
        (
            ["\x1b[0;36m(APIServer pid=3)\x1b[0;0m OSError: [Errno 98] Address already in use"],
            "OSError: [Errno 98] Address already in use",
        ),
        ([f"{CORE}KeyError: first", f"{CORE}AssertionError: second", "INFO: Shutting down"], "AssertionError: second"),
        (
            [
                "ERROR 11-21 07:11:41 [core_client.py:1] Engine core proc EngineCore died unexpectedly, shutting "
                "down client."
            ],
            "Engine core proc EngineCore died unexpectedly, shutting down client.",
        ),
        (
            [
                "INFO: all is well",
                "WARNING: Exception caught. Request id: None",
                f"{CORE}ParallelLMHead: Failed to load weights",
            ],
            "",
        ),
        (
            ["    raise InvalidVersion(version)", "packaging.version.InvalidVersion: Invalid version: 'N/A'"],
            "packaging.version.InvalidVersion: Invalid version: 'N/A'",
        ),
        ([], ""),
    ],
)
def test_the_line_that_says_why(lines: list[str], found: str) -> None:
    assert reason(lines) == found


def test_a_reason_is_recent(capfd: pytest.CaptureFixture[str]) -> None:
    log = ServerLog(io.BytesIO(b"ValueError: an update was refused\n"))
    log.finish(5)
    assert log.explain() == "ValueError: an update was refused"
    assert log.last_line() == "ValueError: an update was refused"
    log.healthy = time.monotonic() + 60
    assert "does not say why" in log.explain()
    assert capfd.readouterr().err == "ValueError: an update was refused\n"
