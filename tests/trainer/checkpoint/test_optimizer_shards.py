"""Each rank writes and reads its own part of the optimizer's state: what Megatron would have gathered, bit for bit, and
without its memory."""

from __future__ import annotations

import importlib.util
import math
import sys
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.files.torch_dist import TorchDist
from hpcrl.planning.formulas.parameters import Count, Layout
from hpcrl.planning.formulas.training_memory import checkpoint_bytes, rank_on
from tests.support import families
from tests.support.ranks import on_fake_device, on_fake_gpu, run_ranks

SHAPES = [(7,), (4, 5), (3, 2, 4), (1, 6), (6, 1), (2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rectangles_of_a_range(shape: tuple[int, ...]) -> None:
    """Together they are the range, in order; of a matrix there are three at most."""
    from hpcrl.trainer.checkpoint.optimizer_shards import boxes

    numbers = torch.arange(prod(shape)).view(shape)
    for begin in range(prod(shape)):
        for end in range(begin + 1, prod(shape) + 1):
            found = list(boxes(shape, begin, end))
            cut = [
                numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].flatten()
                for offsets, sizes in found
            ]
            assert torch.cat(cut).tolist() == list(range(begin, end))
            assert len(found) <= 2 * len(shape) - 1


# ---- the same as Megatron's


def stock() -> Any:
    """Megatron's DistributedOptimizer as it is installed."""
    name = "megatron.core.optimizer.distrib_optimizer"
    spec = importlib.util.spec_from_file_location("megatron.core.optimizer.stock", sys.modules[name].__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DistributedOptimizer


def save_both_ways(opts: Options, ours: Path, theirs: Path) -> None:
    """A checkpoint of states without two equal numbers, and the same from what Megatron gathers."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from hpcrl.trainer.checkpoint.save_load import Position, save

    policy = _filled(opts)
    save(policy, policy.ranks, ours, Position(1, 1), "run")
    name = "sharded_param_state_fully_reshardable"
    with mock.patch.object(DistributedOptimizer, name, getattr(stock(), name)):
        save(policy, policy.ranks, theirs, Position(1, 1), "run")


def load_and_save(opts: Options, source: Path, target: Path) -> None:
    from hpcrl.trainer.checkpoint.save_load import Position, latest, load_checkpoint, save

    policy = _filled(opts)
    load_checkpoint(policy, policy.ranks, latest(source), "run")
    save(policy, policy.ranks, target, Position(1, 1), "run")


def _built(opts: Options, ranks: Any = None) -> Any:
    from megatron.core.optimizer import optimizer_config

    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import capabilities, model

    # of an optimizer on the CPU, which is where all of this is, Megatron looks for Transformer Engine
    with mock.patch.object(capabilities, "_need"), mock.patch.object(optimizer_config, "is_te_min_version"):
        return model.build(opts, ranks or parallel_state.initialize(opts))


def _filled(opts: Options, ranks: Any = None) -> Any:
    from hpcrl.trainer.checkpoint import optimizer_shards

    policy = _built(opts, ranks)
    optimizer_shards.before_load(policy.optimizer)
    torch.manual_seed(policy.ranks.rank)
    for adam in optimizer_shards._torch_adams(policy.optimizer):
        for parameter, state in adam.state.items():
            for tensor in (parameter, *state.values()) if torch.is_tensor(parameter) else ():
                if tensor.numel() > 1:
                    tensor.data.copy_(torch.rand(tensor.shape))
    return policy


def states(path: Path) -> dict[str, torch.Tensor]:
    stored = TorchDist(path / "iter_0000001")
    return {name: stored.read(name) for name in stored.all if name.startswith("optimizer.state.")}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), name


OFFLOAD = {"megatron": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}}
#: family, ranks, layout in which it is saved; ranks, layout in which it is loaded
CHANGES: dict[str, tuple[str, int, dict[str, Any], int, dict[str, Any]]] = {
    "dp3 to dp2": ("glm4", 3, {}, 2, {}),
    "tp2 to dp3": ("qwen3", 2, {"tensor_model_parallel_size": 2}, 3, {}),
    "tp2 to dp2": ("qwen3", 2, {"tensor_model_parallel_size": 2}, 2, {}),
    "cp2 to one": ("qwen3", 2, {"context_parallel_size": 2}, 1, {}),
    "ep2 to dp2": ("qwen3_moe", 2, {"expert_model_parallel_size": 2}, 2, {}),
    "offloaded, dp3 to pp2": ("glm4", 3, OFFLOAD, 2, {"pipeline_model_parallel_size": 2, **OFFLOAD}),
    "ep2 to pp2": ("qwen3_moe", 4, {"expert_model_parallel_size": 2}, 2, {"pipeline_model_parallel_size": 2}),
}


@pytest.mark.process
@pytest.mark.parametrize("change", CHANGES)
def test_states_are_megatrons(tmp_path: Path, change: str) -> None:
    """A checkpoint holds what Megatron's own does, which is read into another layout without a bit that differs."""
    family, n, layout, others, other = CHANGES[change]
    model = str(families.make(tmp_path / "model", family, odd=n == 3))
    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    first = Options(hf_checkpoint=model, actor_num_gpus_per_node=n, lr=1e-3, **layout)
    run_ranks(n, save_both_ways, first, ours, theirs)
    wanted = states(theirs)
    assert_same(states(ours), wanted)
    second = Options(hf_checkpoint=model, actor_num_gpus_per_node=others, lr=1e-3, **other)
    for source in (ours, theirs):
        run_ranks(others, load_and_save, second, source, again / source.name)
        assert_same(states(again / source.name), wanted)


# ---- the memory that it takes

BIG = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "vocab_size": 8000,
}
OTHER = 64e6  #: bytes that Python, its allocator and first imports may take besides
#: in host memory; on the device, whose tensors are zeros as soon as they are on the host; an offloaded optimizer
WHERE: dict[str, tuple[int, dict[str, Any]]] = {"host": (2, {}), "device": (1, {}), "offloaded": (1, OFFLOAD)}


def rise(work: Any) -> tuple[int, Any]:
    """How much this process's memory rises above what it is now, at most; and what `work` gives."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    made = work()
    return _status("VmHWM") - before, made


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def saved_and_loaded(opts: Options, directory: Path) -> dict[str, int]:
    """On a rank: what a save takes of the host; and what a load does, the model being built included."""
    from hpcrl.trainer.checkpoint.save_load import Position, latest, load_checkpoint, save

    policy = _filled(opts)
    saving, _ = rise(lambda: save(policy, policy.ranks, directory, Position(1, 1), "run"))
    assert all(p.untyped_storage().resizable() for p in policy.model.parameters()), "or they could not be put away"
    loading, _ = rise(lambda: load_checkpoint(policy, policy.ranks, latest(directory), "run"))
    return {"save": saving, "load": loading, "states": sum(p.numel() for p in policy.model.parameters()) * 12}


def on_the_device(opts: Options, directory: Path, step: str) -> dict[str, int]:
    """On a rank of the fake device: what a save takes of the host, or building a model and loading it."""
    from hpcrl.planning.rehearsal import device as fake_device
    from hpcrl.trainer.checkpoint.save_load import Position, latest, load_checkpoint, save

    with fake_device.FakeDevice(large=math.inf):
        ranks = fake_device.join(opts)
        if step == "save":
            policy = _filled(opts, ranks)
            taken, _ = rise(lambda: save(policy, ranks, directory, Position(1, 1), "run"))
        else:

            def start() -> Any:
                built = _built(opts, ranks)
                load_checkpoint(built, ranks, latest(directory), "run")
                return built

            taken, policy = rise(start)
        return {step: taken, "states": sum(p.numel() for p in policy.model.parameters()) * 12}


@pytest.mark.process
@pytest.mark.parametrize("where", WHERE)
def test_the_host_holds_what_is_estimated(tmp_path: Path, where: str) -> None:
    """A save takes a few tensors of the host, a load no more than is estimated; both would be much more if states were
    gathered."""
    n, fields = WHERE[where]
    model = families.make(tmp_path / "model", "qwen3", **BIG)
    opts = Options(hf_checkpoint=str(model), actor_num_gpus_per_node=n, lr=1e-3, **fields)
    config = read_config(model)
    terms = rank_on(opts, find_family(config, ""), config, Layout.from_options(opts, BIG["num_hidden_layers"]), 0).host
    if where == "host":
        (found, *_) = run_ranks(n, saved_and_loaded, opts, tmp_path / "c")
    else:
        found = on_fake_device(on_the_device, opts, tmp_path / "c", "save")
        found |= on_fake_device(on_the_device, opts, tmp_path / "c", "load")
    few = checkpoint_bytes(Options(), Count(0, 0), Layout.from_options(opts, 1), BIG["vocab_size"] * BIG["hidden_size"])
    assert found["save"] <= few + OTHER < 0.5 * found["states"], found
    loading = terms["save or load"] + terms["optimizer"]
    assert found["load"] <= 1.1 * loading + OTHER, found
    if where == "offloaded":
        assert found["load"] >= 0.9 * loading, "an estimate, not a bound"


def named_before_a_step(path: str, fields: dict[str, Any]) -> tuple[set[str], str]:
    """On a rank whose policy has taken no step: states of its first parameter in a checkpoint, or why there is none."""
    from hpcrl.errors import HpcrlError
    from hpcrl.planning.rehearsal import device as fake_device
    from hpcrl.trainer.checkpoint.save_load import Position, everything
    from hpcrl.trainer.megatron import model

    opts = Options(hf_checkpoint=path, lr=1e-6, loss_type="sft_loss", rollout_max_response_len=64, **fields)
    with fake_device.FakeDevice():
        policy = model.build(opts, fake_device.join(opts, 0))
        try:
            saved = everything(policy, policy.ranks, Position(0, 0))
        except HpcrlError as error:
            return set(), str(error)
    return set(saved["optimizer"]["param_state"][0]), ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("told", "names"),
    [
        ({}, {"param", "exp_avg", "exp_avg_sq"}),
        ({"use_precision_aware_optimizer": True}, {"param", "exp_avg", "exp_avg_sq"}),
        (
            {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
            set(),
        ),
    ],
    ids=["plain", "precise", "half offloaded"],
)
def test_a_checkpoint_of_before_the_first_step(tmp_path: Path, told: dict[str, Any], names: set[str]) -> None:
    """While a critic alone learns, Transformer Engine's Adam (its stand-in) has no states; every reader asks for them."""
    path = str(families.make(tmp_path, "qwen3"))
    found, said = on_fake_gpu(named_before_a_step, path, {"megatron": told})
    assert found == names and ("before its first step" in said) == (not names)
