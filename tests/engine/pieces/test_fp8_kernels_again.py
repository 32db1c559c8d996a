"""FP8 layers of vLLM's own whose kernels are made again with every load, updated by our calls of a worker as vLLM makes
them: with no configuration set.

What a GPU would have is held by mocks: the experts' kernel with the all-to-all between ranks, the linear layer's kernel.
The layers, their quantization methods, the layerwise reload, the worker's calls and our receiver are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytestmark = pytest.mark.vllm
BLOCK = [128, 128]
HIDDEN = INNER = 128
EXPERTS = 4
OWN = EXPERTS // 2  #: of each of two ranks
#: all-to-alls whose makers ask for vLLM's configuration, and the class that each makes
BACKENDS = {
    "deepep_v2": "DeepEPV2PrepareAndFinalize",
    "flashinfer_nvlink_one_sided": "FlashInferNVLinkOneSidedPrepareAndFinalize",
}


class Model(torch.nn.Module):
    """A linear layer and experts, as a model of vLLM's has them."""

    def __init__(self, linear: Any, experts: Any) -> None:
        super().__init__()
        self.up_proj = linear
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Module()
        self.mlp.experts.routed_experts = experts

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """By the layers' own loaders; the parameters that were loaded."""
        loaded = set()
        for name, tensor in weights:
            parts = name.split(".")
            if parts[0] == "up_proj":
                parameter = getattr(self.up_proj, parts[1])
                parameter.weight_loader(parameter, tensor)
                loaded.add(name)
                continue
            number, leaf, kind = int(parts[2]), parts[3], parts[4]
            shard = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[leaf]
            target = ("w2_" if shard == "w2" else "w13_") + kind
            experts = self.mlp.experts.routed_experts
            parameter = getattr(experts, target)
            parameter.weight_loader(parameter, tensor, name, shard, number, return_success=True)
            loaded.add(f"mlp.experts.routed_experts.{target}")
        return loaded


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Of the experts of all ranks."""
    chance = torch.Generator().manual_seed(seed)
    names = ["up_proj"]
    names += [f"mlp.experts.{n}.{leaf}" for n in range(EXPERTS) for leaf in ("gate_proj", "up_proj", "down_proj")]
    found = {}
    for name in names:
        found[f"{name}.weight"] = torch.randn(HIDDEN, INNER, generator=chance).to(torch.float8_e4m3fn)
        found[f"{name}.weight_scale_inv"] = torch.rand(1, 1, generator=chance)
    return found


@dataclass
class Engine:
    """One worker.

    Attributes:
        asked: at each time that a kernel was made, whether the configuration was set.
        kernels: of experts, that were made.
    """

    worker: Any
    model: Model
    asked: list[bool]
    kernels: list[Any]

    def update(self, tensors: dict[str, torch.Tensor], last: bool = True) -> None:
        """By the calls of a resharded update; without `last` the sender is lost before its end."""

        def receive(load: Callable[[list[tuple[str, torch.Tensor]], bool], None]) -> None:
            load(list(tensors.items()), last)
            if not last:
                raise ConnectionError("lost")

        reader = SimpleNamespace(receive=receive, assembly=SimpleNamespace(most=0), close=lambda: None)
        joined: Future[Any] = Future()
        joined.set_result(reader)
        self.worker._hpcrl_joining = joined
        self.worker.start_weight_update()
        self.worker.hpcrl_take_pieces()
        self.worker.finish_weight_update()

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether the model has these tensors, of the experts its own."""
        experts = self.model.mlp.experts.routed_experts
        ours = [self.model.up_proj.weight, *experts.w2_weight, *experts.w13_weight[:, :INNER]]
        theirs = [tensors["up_proj.weight"]]
        theirs += [tensors[f"mlp.experts.{n}.{leaf}.weight"] for leaf in ("down_proj", "gate_proj") for n in range(OWN)]
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A started engine's worker, the first of two that share experts, holding checkpoint 0."""
    import vllm.distributed
    from safetensors.torch import save_file
    from vllm.config import (
        VllmConfig,
        get_current_vllm_config,
        get_current_vllm_config_or_none,
        set_current_vllm_config,
    )
    from vllm.model_executor import parameter
    from vllm.model_executor.kernels import linear as linear_kernels
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.platforms import PlatformEnum
    from vllm.v1.worker.gpu_worker import Worker

    from hpcrl.engine.weight_loading import Receiver
    from hpcrl.engine.weight_receiver import WorkerExtension
    from tests.support.breakable.fp8_on_cpu import Widened

    asked: list[bool] = []
    kernels: list[Any] = []

    class Asks(Widened):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            asked.append(get_current_vllm_config() is config)

    def make_kernel(prepare: Any, experts: Any) -> Any:
        asked.append(get_current_vllm_config() is config)
        kernels.append((prepare, experts))
        return kernels[-1]

    config = VllmConfig()
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, enforce_eager=True, model=str(request.getfixturevalue("tmp_path"))
    )
    save_file(checkpoint(0), f"{config.model_config.model}/model.safetensors")
    before = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    monkeypatch.setitem(linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [Asks, *before])
    for module in (vllm.distributed, linear, parameter, fp8):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0, raising=False)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    all_to_all = mock.Mock(maybe_roundup_layer_hidden_size=lambda size, _: size)
    manager = SimpleNamespace(world_size=2, dp_world_size=2, rank=0, get_handle=lambda _: object())
    monkeypatch.setattr(all2all_utils, "get_ep_all2all_manager", lambda: manager)
    monkeypatch.setattr(all2all_utils, BACKENDS[request.param], all_to_all, raising=False)
    chosen = oracle.Fp8MoeBackend.TRITON, type("Kernels", (mock.Mock,), {})
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: chosen)
    monkeypatch.setattr(oracle.mk, "FusedMoEKernel", make_kernel)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    coded = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=BLOCK)
    with set_current_vllm_config(config):
        up = linear.ReplicatedLinear(HIDDEN, INNER, bias=False, quant_config=coded, prefix="up_proj")
        model = Model(up, experts_of(request.param, coded))
        record_metadata_for_reloading(model)
        model.load_weights(iter(checkpoint(0).items()))
        for layer in (up, model.mlp.experts.routed_experts):
            layer.quant_method.process_weights_after_loading(layer)
    assert get_current_vllm_config_or_none() is None, "as where vLLM calls a worker"
    receiver = Receiver(mock.Mock(), config, SimpleNamespace(type="cuda"), model)
    worker = object.__new__(type("OurWorker", (WorkerExtension, Worker), {}))
    worker.vllm_config = config
    worker.rank = 0
    worker.weight_transfer_engine = receiver
    worker._weight_update_active = False
    worker.model_runner = mock.Mock()
    asked.clear()
    return Engine(worker, model, asked, kernels)


def experts_of(backend: str, coded: Any) -> Any:
    """vLLM's own holder of experts, as the first of two data-parallel ranks has it."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    sizes = {"tp_size": 1, "pcp_size": 1, "dp_size": 2, "ep_size": 2, "sp_size": 1}
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    parallel = FusedMoEParallelConfig(**sizes, **ranks, use_ep=True, all2all_backend=backend, enable_eplb=False)
    places = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=2,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=places.local_num_experts,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.from_str("silu"),
        device="cpu",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    return RoutedExperts("mlp.experts", torch.bfloat16, config, coded, expert_map_manager=places)


def test_kernels_are_made_again_by_our_calls(engine: Engine) -> None:
    """By an update that arrives whole."""
    made = len(engine.kernels)
    engine.update(checkpoint(1))
    assert engine.holds(checkpoint(1)) and not engine.holds(checkpoint(0))
    assert len(engine.kernels) == made + 1
    assert len(engine.asked) == 2 and all(engine.asked)


def test_kernels_are_made_again_for_a_lost_update(engine: Engine) -> None:
    """By one whose sender is lost once a part of the experts was loaded, and by the next after it."""
    from vllm.config import set_current_vllm_config

    new = checkpoint(1)
    part = {name: tensor for name, tensor in new.items() if ".experts.0." in name}
    with pytest.raises(ConnectionError):
        engine.update(part, last=False)
    engine.worker.hpcrl_abandon()
    engine.update(new)
    assert engine.holds(new) and engine.asked and all(engine.asked)
    receiver = engine.worker.weight_transfer_engine
    with set_current_vllm_config(engine.worker.vllm_config):  # as vLLM's own update_weights, which then fails
        receiver.start_weight_update()
        receiver.load(list(part.items()), False)
    made = len(engine.kernels)
    engine.worker.hpcrl_abandon()
    assert len(engine.kernels) == made + 1 and all(engine.asked)
