"""Every family: Megatron computes what transformers computes, in every layout, and gives its weights back bit for bit.

The reference runs in the test process; Megatron's ranks are forked (tests/support/ranks.py).  One group of ranks walks
through all models.
"""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import families
from tests.support.ranks import run_ranks
from tests.support.tiny import with_images
from tests.trainer.megatron import test_model_parity as parity
from tests.trainer.step import test_invariance as invariance

pytestmark = pytest.mark.process

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
#: layout -> (ranks, options, whether it is for dense models, for those with experts)
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool, bool]] = {
    "one rank": (1, {}, True, True),
    "tp2": (2, TP2, True, False),
    "tp2 sp": (2, SP2, True, True),
    "pp2": (2, PP2, True, True),
    "cp2": (2, {"context_parallel_size": 2}, True, True),
    "ep2": (2, EP2, False, True),
    "tp2 sp ep2 etp1": (2, {**SP2, **EP2, **ETP1}, False, True),
    "tp2 sp ep2 etp2": (4, {**SP2, **EP2}, False, True),
    "tp2 sp pp2 ep2 etp1": (4, {**SP2, **PP2, **EP2, **ETP1}, False, True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        f"{kind} {size}": families.make(root / f"{kind}-{size}", kind, size == "odd")
        for kind in families.SIZES
        for size in ("plain", "odd")
    }


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Any]:
    return {name: reference(path) for name, path in models.items()}


def reference(path: Path) -> Any:
    """A model in transformers, fp32."""
    from transformers import AutoModelForCausalLM

    eager = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **eager).eval()


@pytest.fixture(scope="module")
def wanted(references: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """transformers' logits of each sequence."""
    found = {}
    for name, model in references.items():
        with torch.no_grad():
            found[name] = [model(ids[None]).logits[0] for ids in parity.sequences(model.config.vocab_size)]
    return found


# ---- on the ranks


def walk(every: list[Any]) -> list[Any]:
    """(logits, exported tensors) of each model, one after another in the same groups."""
    ranks, found = None, []
    for opts in every:
        policy = parity.start(opts, ranks)
        ranks = policy.ranks
        found.append((parity.logits(policy), parity.exported(policy)))
    return found


# ---- tests


def check_logits(results: list[Any], i: int, wanted: list[torch.Tensor], name: str) -> None:
    """Those of model `i` of a walk, against transformers'."""
    rows, values = joined([r[i][0] for r in results if r[i][0] is not None])
    assert torch.equal(rows, torch.arange(len(rows)))
    place = 0
    for logits in wanted:
        assert float(logits.abs().max()) > 0.5  # not all alike
        error = float((values[place : place + len(logits)] - logits).abs().max())
        assert error <= 1e-4, f"{name}: {error:.1e}"
        place += -(-len(logits) // parity.PAD) * parity.PAD


def joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all context-parallel ranks in order, of data-parallel ranks those of one."""
    rows, values = (torch.cat(some) for some in zip(*parts, strict=True))
    first = {row: at for at, row in reversed(list(enumerate(rows.tolist())))}
    return torch.tensor(sorted(first)), values[[first[row] for row in sorted(first)]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_weights_are_those_of_transformers(
    models: dict[str, Path], wanted: dict[str, list[torch.Tensor]], layout: str
) -> None:
    n, fields, dense, sparse = LAYOUTS[layout]
    names = [name for name in models if (sparse if name.split()[0] in families.EXPERTS else dense)]
    results = run_ranks(n, walk, [parity.options(models[name], n, fields) for name in names], timeout=120)
    for i, name in enumerate(names):
        check_logits(results, i, wanted[name], name)
        check_weights(results[0][i][1], load_file(models[name] / "model.safetensors"), name)


def check_weights(exported: list[tuple[str, torch.Tensor]], files: dict[str, torch.Tensor], name: str) -> None:
    """Those of a walk are what the files hold, all of it, bit for bit."""
    assert sorted(n for n, _ in exported) == sorted(files), name
    assert all(torch.equal(tensor, files[n]) for n, tensor in exported), name


#: made of sums of a chunk's decays, in which transformers and we lose as much: 1.3e-5 each against fp64, row by row
DECAYS = ("dt_bias", "A_log", "in_proj_a.weight")
#: layout -> models; with experts the odd ones, of the others one with biases and one with norms on both sides
SPARSE = [f"{kind} odd" for kind in families.EXPERTS]
GRADIENTS = {
    "one rank": ["qwen2 odd", "llama plain", "glm4 plain", *SPARSE, "qwen3_5_text odd", "qwen3_5_moe_text plain"],
    "tp2": ["qwen3_5_text odd"],
    "tp2 sp": ["qwen2 odd", "glm4 plain", *SPARSE, "qwen3_5_text odd"],
    "pp2": [*SPARSE, "qwen3_5_text odd"],
    "cp2": [*SPARSE, "qwen3_5_text odd"],
    "ep2": SPARSE,
    "tp2 sp ep2 etp1": SPARSE,
    "tp2 sp ep2 etp2": SPARSE,
}
#: with the distributed optimizer, each DP rank has but a part of the gradient
WHOLE = {"megatron": {"use_distributed_optimizer": False}}
#: with four layers, of which two neighbours are of one kind
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
}
#: one dense family, one with experts, one with latent attention, one with delta nets; and all others
FEW = ["qwen2", "glm4_moe", "deepseek_v3", "qwen3_next"]
MORE = [kind for kind in families.SIZES if kind not in FEW]


@pytest.fixture(scope="module")
def gradients(models: dict[str, Path], references: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """transformers' gradients under the names of the files, of every model in GRADIENTS."""
    names = sorted({name for names in GRADIENTS.values() for name in names})
    return {name: gradients_of(references[name], load_file(models[name] / "model.safetensors")) for name in names}


def gradients_of(hf: Any, files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the made-up loss, in transformers, under the names of the files."""
    vocab = hf.config.vocab_size
    for ids, weight in zip(parity.sequences(vocab), parity.weights_of_loss(vocab), strict=True):
        (hf(ids[None]).logits[0] * weight).sum().backward()
    return families.apart({n: p.grad for n, p in hf.named_parameters()}, files)


@pytest.mark.parametrize("layout", GRADIENTS)
def test_gradients_are_those_of_transformers(
    models: dict[str, Path], gradients: dict[str, dict[str, torch.Tensor]], layout: str
) -> None:
    n, fields, *_ = LAYOUTS[layout]
    every = [parity.options(models[x], n, fields, **WHOLE) for x in GRADIENTS[layout]]
    results = run_ranks(n, parity.on_each, "gradients", every)[0]
    for name, found in zip(GRADIENTS[layout], results, strict=True):
        check_gradients(found, gradients[name], load_file(models[name] / "model.safetensors"), name)


def check_gradients(
    found: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    files: dict[str, torch.Tensor],
    name: str,
    decays: float = 1e-4,
) -> None:
    """Of every tensor, against transformers'.

    decays: the most for what is summed up of a chunk's decays; with four layers these sums cancel so far that two of
        ours in different order are 1e-4 apart.
    """
    for tensor in found.keys() - wanted.keys():  # a buffer: what counts the router's tokens has left it alone
        assert tensor.endswith("e_score_correction_bias")
        assert torch.equal(found[tensor], files[tensor])
    for tensor, gradient in wanted.items():
        error = float((found[tensor] - gradient).norm() / gradient.norm().clamp(min=1e-6))
        most = decays if tensor.endswith(DECAYS) else 1e-5
        assert error < most, f"{name}: {tensor}: relative error {error:.1e}"


def walk_with_gradients(every: list[Any]) -> list[Any]:
    """(logits, gradients) of each model, one after another in the same groups."""
    ranks, found = None, []
    for opts in every:
        policy = parity.start(opts, ranks)
        ranks = policy.ranks
        found.append((parity.logits(policy), parity.gradients(policy)))
    return found


@pytest.mark.parametrize("kinds", [FEW, pytest.param(MORE, marks=pytest.mark.soak)], ids=["few", "more"])
def test_virtual_stages(tmp_path: Path, kinds: list[str]) -> None:
    """Four layers on two pipeline ranks, which hold the first and third, the second and last; two micro-batches."""
    deep = {
        kind: families.make(
            tmp_path / kind, kind, odd=True, **(HYBRID if kind in families.DELTA_NETS else {"num_hidden_layers": 4})
        )
        for kind in kinds
    }
    fields = {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "megatron": {"use_distributed_optimizer": False}}
    results = run_ranks(2, walk_with_gradients, [parity.options(x, 2, fields) for x in deep.values()], timeout=240)
    for i, (kind, model) in enumerate(deep.items()):
        hf, files = reference(model), load_file(model / "model.safetensors")
        with torch.no_grad():
            wanted = [hf(ids[None]).logits[0] for ids in parity.sequences(hf.config.vocab_size)]
        check_logits(results, i, wanted, kind)
        check_gradients(results[0][i][1], gradients_of(hf, files), files, kind, decays=3e-4)


CP2 = {"context_parallel_size": 2}
STEPS = {
    "ep2": (2, EP2),
    "cp2 ep2": (2, {**CP2, **EP2}),
    "tp2 sp ep2 etp1": (2, {**SP2, **EP2, **ETP1}),
    "pp2 ep2 edp1": (4, {**PP2, **EP2}),
    "ep2 edp2": (4, EP2),
}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path]) -> dict[str, float]:
    return run_ranks(1, invariance.train_on_rank, [steps(models, 1, {})])[0][0]


def steps(models: dict[str, Path], n: int, fields: dict[str, Any]) -> Any:
    packing = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "use_rollout_logprobs": True}
    return invariance.options(models["glm4_moe odd"], n, **packing, **fields)


@pytest.mark.parametrize("layout", STEPS)
def test_expert_layout_does_not_matter(models: dict[str, Path], one_rank: dict[str, float], layout: str) -> None:
    """With the distributed optimizer, which splits the experts' gradients otherwise than those of the rest."""
    n, fields = STEPS[layout]
    for (found,) in run_ranks(n, invariance.train_on_rank, [steps(models, n, fields)]):
        for name in ("train/loss", "train/grad_norm", "second/train/loss", "second/train/grad_norm"):
            assert found[name] == pytest.approx(one_rank[name], rel=1e-5), name


def test_latent_attention_across_context_ranks(models: dict[str, Path]) -> None:
    """The shared rotated keys' gradient is added up over every rank that used them."""

    def run(n: int, fields: dict[str, Any]) -> dict[str, float]:
        opts = invariance.options(models["deepseek_v3 odd"], n, micro_batch_size=2, use_rollout_logprobs=True, **fields)
        return run_ranks(n, invariance.train_on_rank, [opts])[0][0]

    whole = run(1, {})
    found = run(2, {**CP2, **EP2})
    for name in ("train/loss", "train/grad_norm", "second/train/loss", "second/train/grad_norm"):
        assert found[name] == pytest.approx(whole[name], rel=1e-5), name


def with_a_leak(opts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of packed sequences, and of the same rows taken for one sequence."""
    policy = parity.start(opts)
    apart = parity.logits(policy)
    stock = parity.pack
    try:
        parity.pack = lambda parts, *where: stock([torch.cat(parts)], *where)  # type: ignore[assignment]
        joined = parity.logits(policy)
    finally:
        parity.pack = stock  # type: ignore[assignment]
    assert apart is not None and joined is not None
    return apart[1], joined[1]


def as_kimi(models: dict[str, Path], directory: Path) -> Path:
    """The odd DeepSeek-V3 as a Kimi-K2 in `directory`, which is returned."""
    source = models["deepseek_v3 odd"]
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    (directory / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return directory


@pytest.mark.soak
@pytest.mark.parametrize("layout", [name for name, (*_, sparse) in LAYOUTS.items() if sparse])
def test_kimi_k2_in_every_layout(
    models: dict[str, Path],
    wanted: dict[str, list[torch.Tensor]],
    gradients: dict[str, dict[str, torch.Tensor]],
    tmp_path: Path,
    layout: str,
) -> None:
    """Logits, weights and gradients, as of the family that stands for it in `make test-all`."""
    n, fields, *_ = LAYOUTS[layout]
    model = as_kimi(models, tmp_path)
    files = load_file(model / "model.safetensors")
    results = run_ranks(n, walk, [parity.options(model, n, fields)], timeout=120)
    check_logits(results, 0, wanted["deepseek_v3 odd"], "kimi_k2")
    check_weights(results[0][0][1], files, "kimi_k2")
    if layout in GRADIENTS:
        [found] = run_ranks(n, parity.on_each, "gradients", [parity.options(model, n, fields, **WHOLE)])[0]
        check_gradients(found, gradients["deepseek_v3 odd"], files, "kimi_k2")


def test_sequences_of_latent_attention_are_apart(
    models: dict[str, Path], wanted: dict[str, list[torch.Tensor]], tmp_path: Path
) -> None:
    """A row that saw the sequence before its own would show; Kimi-K2 is DeepSeek-V3 under another name."""
    ((apart, joined),) = run_ranks(1, with_a_leak, parity.options(as_kimi(models, tmp_path), 1, {}))
    first, second, *_ = wanted["deepseek_v3 odd"]
    start = -(-len(first) // parity.PAD) * parity.PAD
    rows = slice(start, start + len(second))
    assert float((apart[rows] - second).abs().max()) <= 1e-4
    assert float((joined[len(first) : len(first) + len(second)] - second).abs().max()) > 0.05


def test_layout_of_delta_nets_does_not_matter(models: dict[str, Path]) -> None:
    """Two optimizer steps; every rank under CP computes the same sequences, and counts only its own rows."""

    def trained(n: int, fields: dict[str, Any]) -> list[dict[str, float]]:
        packing = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "use_rollout_logprobs": True}
        opts = invariance.options(models["qwen3_5_text odd"], n, **packing, **fields)
        return [found for (found,) in run_ranks(n, invariance.train_on_rank, [opts])]

    (one,) = trained(1, {})
    for found in (*trained(2, TP2), *trained(2, CP2)):
        for name in ("train/loss", "train/grad_norm", "second/train/loss", "second/train/grad_norm"):
            assert found[name] == pytest.approx(one[name], rel=1e-5), name


def test_correction_biases_stay_in_full_precision(models: dict[str, Path]) -> None:
    opts = parity.options(models["glm4_moe odd"], 2, EP2).model_copy(update={"bf16": True})
    found = run_ranks(2, parity.on_each, "exported", [opts])[0][0]
    files = load_file(models["glm4_moe odd"] / "model.safetensors")
    for name, tensor in found:
        assert torch.equal(tensor, files[name] if "correction_bias" in name else files[name].bfloat16()), name


TOY = """
from hpcrl.models.shared import dense
from hpcrl.models.family import Family

FAMILY = Family(
    model_type="toy",
    transformer=lambda config: dense.settings(config) | {"add_qkv_bias": True},
    gpt=dense.gpt,
    rules=dense.RULES,
)
"""


def walk_with_more_families(directory: str, every: list[Any]) -> list[Any]:
    import hpcrl.models

    hpcrl.models.__path__.append(directory)
    return walk(every)


def test_a_file_makes_a_family(models: dict[str, Path], wanted: dict[str, list[torch.Tensor]], tmp_path: Path) -> None:
    (tmp_path / "toy_family.py").write_text(TOY)
    config = json.loads((models["qwen2 odd"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "toy"}))
    (tmp_path / "model.safetensors").write_bytes((models["qwen2 odd"] / "model.safetensors").read_bytes())
    ((_, values), _), *_ = run_ranks(1, walk_with_more_families, str(tmp_path), [parity.options(tmp_path, 1, {})])[0]
    assert torch.allclose(values[: len(wanted["qwen2 odd"][0])], wanted["qwen2 odd"][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_text_inside_a_model_with_images(
    models: dict[str, Path], wanted: dict[str, list[torch.Tensor]], tmp_path: Path, kind: str
) -> None:
    """The published form of Qwen3.5: settings in text_config, tensors under language_model, and what is ignored."""
    name = f"{kind}_text odd"
    model = with_images(models[name], tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["model_type"] == kind
    (((_, values), exported),) = run_ranks(1, walk, [parity.options(model, 1, {})])[0]
    assert torch.allclose(values[: len(wanted[name][0])], wanted[name][0], rtol=0, atol=1e-4)
    files = load_file(models[name] / "model.safetensors")
    assert {n.replace("model.language_model.", "model.", 1) for n, _ in exported} == files.keys()
    assert all(torch.equal(tensor, files[n.replace("model.language_model.", "model.", 1)]) for n, tensor in exported)


def test_weights_of_virtual_stages_come_back(tmp_path: Path) -> None:
    model = families.make(tmp_path, "glm4_moe", num_hidden_layers=4)
    fields = {**PP2, **EP2, "num_virtual_stages_per_pipeline_rank": 2}
    found = dict(run_ranks(4, parity.on_each, "exported", [parity.options(model, 4, fields)])[0][0])
    files = load_file(model / "model.safetensors")
    assert found.keys() == files.keys()
    assert all(torch.equal(tensor, files[name]) for name, tensor in found.items())


def most_alive(opts: Any) -> tuple[int, int]:
    """(tensors of an export that were alive at once, those with memory of their own) on this rank, model's own not
    counted."""
    from hpcrl.trainer.megatron.hf_weights import export

    policy = parity.start(opts)
    own = {parameter.data_ptr() for module in policy.modules for parameter in module.parameters()}
    alive: list[weakref.ref[torch.Tensor]] = []
    most = real = 0
    for _, tensor in export(policy):
        if tensor.device.type != "meta" and tensor.data_ptr() not in own:
            real += 1
        if tensor.device.type == "meta" or tensor.data_ptr() not in own:
            alive.append(weakref.ref(tensor))
        del tensor
        most = max(most, sum(found() is not None for found in alive))
    return most, real


def test_experts_go_to_rank_0_one_by_one(models: dict[str, Path]) -> None:
    opts = parity.options(models["qwen3_moe plain"], 4, {**SP2, **EP2})
    (most, real), *others = run_ranks(4, most_alive, opts)
    assert most <= 3 < real  # queries, keys and values are made together
    assert [found for _, found in others] == [0, 0, 0]


# ---- what is refused

GATE, UP = (f"model.layers.1.mlp.experts.5.{name}.weight" for name in ("gate_proj", "up_proj"))
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


CHANGES: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({GATE: None}, f"the model lacks {GATE}"),
    ({BIAS: None}, f"the model lacks {BIAS}"),
    (
        {GATE.replace(".5.", ".8."): torch.ones(32, 64)},
        r"holds in excess model.layers.1.mlp.experts.8.gate_proj.weight",
    ),
    ({UP: torch.ones(31, 64)}, rf"{UP} is \[31, 64\], config.json asks for \[32, 64\]"),
    (
        {"model.layers.2.eh_proj.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
        "^$",
    ),
]


def test_misfit_expert_tensors_on_every_rank(models: dict[str, Path], tmp_path: Path) -> None:
    """Expert tensors that do not fit are named on every rank."""
    every = []
    for number, (change, _) in enumerate(CHANGES):
        tensors = load_file(models["glm4_moe plain"] / "model.safetensors") | change
        (directory := tmp_path / str(number)).mkdir()
        save_file(
            {name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors"
        )
        (directory / "config.json").write_bytes((models["glm4_moe plain"] / "config.json").read_bytes())
        every.append(parity.options(directory, 2, EP2))
    for messages in run_ranks(2, parity.refused_on_rank, every, True):
        for message, (_, text) in zip(messages, CHANGES, strict=True):
            assert re.search(text, message), message


def test_weights_of_another_model_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models["glm4 plain"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((models["qwen2 plain"] / "model.safetensors").read_bytes())
    ((message,),) = run_ranks(1, parity.refused_on_rank, [parity.options(tmp_path, 1, {})])
    assert re.search("the model lacks .*gate_up_proj.* and holds in excess .*gate_proj", message), message


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3 plain", EP2, "--expert-model-parallel-size 2: the model's config.json has no experts"),
    (
        "glm4_moe plain",
        {**SP2, **ETP1},
        "--expert-tensor-parallel-size 1 with --tensor-model-parallel-size 2 and .* not add up",
    ),
    ("glm4_moe plain", TP2, "--tensor-model-parallel-size 2: Megatron trains .*; add --sequence-parallel"),
    ("glm4 plain", {"spec": ["slime_plugins.models.glm5", "get_glm5_spec"]}, "--spec .* names no model family"),
    (
        "qwen3 plain",
        {"spec": ["slime_plugins.models.glm4", "get_glm_spec"]},
        "is a glm4 model, config.json says 'qwen3'",
    ),
    (
        "glm4_moe plain",
        {"megatron": {"moe_router_bias_update_rate": 1e-3}},
        "--moe-router-bias-update-rate 0.001 cannot be",
    ),
    ("qwen3_moe plain", {"megatron": {"moe_aux_loss_coeff": 1e-3}}, "--moe-aux-loss-coeff 0.001 cannot be"),
    ("qwen3_moe plain", {"megatron": {"moe_z_loss_coeff": 1e-3}}, "--moe-z-loss-coeff 0.001 cannot be"),
    ("qwen3_moe plain", {"megatron": {"moe_router_topk": 4}}, "--moe-router-topk 4: the model's config.json says 2"),
]


def test_misfit_layouts_and_settings(models: dict[str, Path]) -> None:
    """Layouts and settings that do not fit are refused."""
    every = [parity.options(models["qwen3 plain"], 1, {})]
    every += [parity.options(models[model], 2, fields) for model, fields, _ in REFUSED]
    good, *messages = run_ranks(1, parity.refused_on_rank, every, True)[0]
    assert good == ""
    for message, (_, _, text) in zip(messages, REFUSED, strict=True):
        assert message.startswith("UsageError")
        assert re.search(text, message), message


def test_slimes_recipe_of_a_dense_model_is_taken(models: dict[str, Path]) -> None:
    """It gives EP 1 and ETP 1 to every model, whatever TP is."""
    fields = {**SP2, **ETP1, "spec": ["slime_plugins.models.glm4", "get_glm_spec"]}
    for (message,) in run_ranks(2, parity.refused_on_rank, [parity.options(models["glm4 plain"], 2, fields)]):
        assert message == ""
