"""The estimate: published sizes, sums over layouts, what changes a term, and the warnings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.rules.option_rules import build_options
from hpcrl.config.slime.arguments import translate
from hpcrl.errors import UsageError
from hpcrl.models.family import find_family
from hpcrl.models.files import fp8
from hpcrl.models.lora.settings import lora_settings
from hpcrl.plan import Host, make_plan
from hpcrl.planning.formulas.activations import logits_bytes, longest_sample, micro_batches, tokens_per_gpu
from hpcrl.planning.formulas.engine_memory import (
    engine_terms,
    gpu_weights,
    model_bytes,
    share,
    token_bytes,
    update_bytes,
    utilization,
)
from hpcrl.planning.formulas.flops import model_flops
from hpcrl.planning.formulas.nccl_memory import communicators, nccl_bytes, update_members
from hpcrl.planning.formulas.parameters import Count, Layout, on_stage, stage_layers, whole_model
from hpcrl.planning.formulas.training_memory import (
    BAND,
    GIB,
    ROUNDED,
    checkpoint_bytes,
    fullest_rank,
    gradient_bytes,
    host_bytes,
    optimizer_bytes,
    pinned,
    rank_on,
)
from hpcrl.planning.memory.fits import misfit
from hpcrl.planning.memory.report import (
    ASLEEP,
    SAMPLES,
    TRAINS,
    memory_lines,
    on_host,
    put_away,
    refuse_misfit,
    turns,
    verdict,
)
from tests.config.slime.guides import GUIDES
from tests.support.published_models import MODELS
from tests.support.small_recipes import IN_FP8
from tests.support.small_recipes import RECIPES as EXAMPLES

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "examples"
#: parameters in billions, as the models' own pages and files say; GLM-4.5 without its layer for further tokens
PUBLISHED = {
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-7B": 7.616, "Qwen3-0.6B": 0.596, "Qwen3-4B": 4.022, "Qwen3-8B": 8.191, "Qwen3-32B": 32.76,
    "Qwen3-30B-A3B": 30.53, "Qwen3-235B-A22B": 235.1, "Llama-3.1-8B": 8.030, "Llama-3.2-3B": 3.213, "GLM-4-9B-0414": 9.40,
    "GLM-4.5-Air": 106.85, "GLM-4.5": 352.8,
}  # fmt: skip
#: the same as their names and reports say, rounded; without layers for further tokens
ABOUT = {
    "DeepSeek-R1": 671, "Kimi-K2-Instruct": 1030, "Kimi-K2-Thinking": 1030, "Moonlight-16B-A3B": 16, "GLM-4.7-Flash": 30,
    "Qwen3-Next-80B-A3B": 80, "Qwen3.5-35B-A3B": 35, "Qwen3.5-27B": 27, "MiniMax-M2": 229, "MiMo-7B-RL": 7.6, "Qwen3-14B": 14.8,
}  # fmt: skip
REFERENCE = {
    "GLM4-9B": "GLM-4-9B-0414",
    "Qwen3-4B": "Qwen3-4B",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "GLM-4.5-355B": "GLM-4.5",
}


def of(name: str) -> tuple[Any, dict[str, Any]]:
    config = MODELS[name][1]
    return find_family(config, name), config


def test_adapters_take_little() -> None:
    """Qwen3-30B-A3B on four cards: with adapters there is room, with all weights trained there is none."""
    family, config = of("Qwen3-30B-A3B")
    four = {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}
    four |= {"expert_tensor_parallel_size": 1, "sequence_parallel": True, "colocate": True, "hf_checkpoint": "m"}
    full, lora = (fullest_rank(Options(**four, lora_rank=rank), family, config) for rank in (0, 16))
    assert full.gpu["weights"] < lora.gpu["weights"] < 1.1 * full.gpu["weights"]
    assert lora.gpu["gradients"] + lora.gpu["optimizer"] < 0.1 * full.gpu["gradients"]
    assert lora.total < 80e9 < full.total
    counted = model_flops(family, config, lora=lora_settings(Options(hf_checkpoint="m", lora_rank=16)))
    work = (1000.0, 500_000.0, 1000.0)
    assert 0.6 < counted.training(*work) / model_flops(family, config).training(*work) < 0.8


def test_the_longest_sample() -> None:
    opts = Options(hf_checkpoint="m", rollout_max_response_len=4000, rollout_max_prompt_len=500)
    assert longest_sample(opts) == 4500
    assert longest_sample(opts.model_copy(update={"rollout_max_context_len": 4096})) == 4096


def test_an_adapter_on_disk_and_on_the_host() -> None:
    """A background save keeps the adapter alone; what is put away lies in pinned blocks, one a parameter of the base;
    only a base that may be in torch_dist is put together on the GPU."""
    family, config = of("Qwen3-30B-A3B")
    four = {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}
    four |= {"expert_tensor_parallel_size": 1, "hf_checkpoint": "m", "lora_rank": 16, "async_save": True}
    found = fullest_rank(Options(**four), family, config)
    count = on_stage(family, config, Layout.from_options(Options(**four), 48), 0, {})
    assert found.adapter == 2 * count.trained
    assert found.host["async save"] == (2 + 12) * count.trained
    blocks = found.away - found.gpu["optimizer"] - found.gpu["weights"]
    experts = 48 * 32 * (2 + 1) * 2**20  # of 6 MiB in one of 8, and of 3 MiB in one of 4
    assert experts < blocks < 1.1 * experts
    joined = fullest_rank(Options(**four, ref_load="m_torch_dist"), family, config)
    assert joined.gpu["start"] == 2 * 48 * 32 * 2 * 768 * 2048
    assert found.gpu["start"] == 16 * 2**24


def guide(name: str, **changes: Any) -> Options:
    return build_options(translate(GUIDES[name][0]).values | changes)


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    family, config = of(next(model for start, model in REFERENCE.items() if name.startswith(start)))
    return family, quantized(config) if "FP8" in name else config


def quantized(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert whole_model(*of(name)).all / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.parametrize("name", ABOUT)
def test_parameters_are_about_what_names_say(name: str) -> None:
    """Within 2 %."""
    assert whole_model(*of(name)).all / 1e9 == pytest.approx(ABOUT[name], rel=0.02)


@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-30B-A3B", "GLM-4.5"])
def test_all_ranks_together_hold_the_model(name: str) -> None:
    family, config = of(name)
    tied = config["tie_word_embeddings"]
    layout = Layout(tp=2, pp=4, cp=1, ep=4, etp=1, copies=4, expert_copies=2, sequence_parallel=True, virtual_stages=1)
    layers = family.transformer(config)["num_layers"]
    assert sorted(n for stage in range(4) for n in stage_layers(layers, layout, stage, {})) == list(range(layers))
    counts = [on_stage(family, config, layout, stage, {}) for stage in range(4)]
    whole = whole_model(family, config)
    assert sum(count.expert for count in counts) * 4 == whole.expert
    # norms, routers and a tied embedding's copy lie on more than one rank
    more = sum(count.dense for count in counts) * 2 - whole.dense
    copy = config["vocab_size"] * config["hidden_size"] if tied else 0
    assert 0 <= more - copy <= 0.01 * whole.dense


def test_which_layers_lie_on_a_stage() -> None:
    layout = Layout(1, 4, 1, 1, 1, 1, 1, False, 2)
    assert stage_layers(16, layout, 1, {}) == [2, 3, 10, 11], "chunk i of every rank comes before chunk i + 1 of any"
    uneven = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
    plain = Layout(1, 4, 1, 1, 1, 1, 1, False, 1)
    assert [len(stage_layers(16, plain, stage, uneven)) for stage in range(4)] == [1, 6, 6, 3]
    assert [micro_batches(plain, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert micro_batches(layout, 0) == (4 + 6 + 1) / 2


def test_what_the_optimizer_takes() -> None:
    count = Count(1000, 800)
    layout = Layout(1, 1, 1, 1, 1, 4, 2, False, 1)
    own = 1000 / 4 + 800 / 2

    def taken(**megatron: Any) -> tuple[float, float]:
        options = Options(megatron=megatron)
        return optimizer_bytes(options, count, layout), host_bytes(options, [count], layout, [10])["optimizer"]

    careful = {"use_precision_aware_optimizer": True}
    assert taken() == (own * 12, 0)
    assert taken(use_distributed_optimizer=False) == (1800 * 12, 0)
    assert taken(**careful) == (own * 12, 0)
    assert taken(**careful, exp_avg_dtype="bf16") == (own * 10, 0)
    assert taken(optimizer_cpu_offload=True) == (own * 4, own * 16)
    assert taken(optimizer_cpu_offload=True, **careful) == (0, own * 16)
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    assert taken(**half) == (own * (6 + 2), own * 8) and taken(**half, **careful) == (own * 6, own * 8)
    assert optimizer_bytes(Options(bf16=False), count, layout) == own * 8
    assert gradient_bytes(Options()) == 4 and gradient_bytes(Options(megatron={"grad_reduce_in_fp32": False})) == 2


def test_tokens_and_logits() -> None:
    options = guide("GLM4-9B, 4 + 4")
    assert tokens_per_gpu(options) == 4608, "a response of 8192 tokens over CP 2 is less"
    assert tokens_per_gpu(guide("GLM4-9B, 4 + 4", rollout_max_response_len=32768)) == 16384
    family, config = model_of("GLM4-9B")
    layout = Layout.from_options(options, 40)
    ends = 4608 * 4096 * 2 * 2 / 2
    assert logits_bytes(options, config, layout) == 4608 * 151552 / 2 * 10 + ends
    chunks = guide("GLM4-9B, 4 + 4", log_probs_chunk_size=512)
    assert logits_bytes(chunks, config, layout) == 512 * 151552 / 2 * 10 + ends
    assert family.model_type == "glm4"


@pytest.mark.parametrize("name", GUIDES)
def test_the_guides_trainers_fit_as_they_are_known_to(name: str) -> None:
    """They run on 80 GB cards, with the engines asleep while they train."""
    options, (family, config) = guide(name), model_of(name)
    assert fullest_rank(options, family, config).total < 80 * GIB
    assert engine_terms(options, family, config, 80 * GIB).at_once > 8


def test_memory_of_355b() -> None:
    """The 355B model needs its CPU Adam and much host memory."""
    name = "GLM-4.5-355B, BF16 rollouts"
    family, config = model_of(name)
    with_it = guide(name)
    terms = fullest_rank(with_it, family, config).host
    assert 8 * terms["save or load"] < 250e9, "while it is loaded; a save takes less than 2 GB a rank"
    host = 8 * sum(terms.values()) / 1e12
    assert 0.7 < host < 1.6, f"{host:.2f} TB a node of 8; slime's own figure is 1.4 to 1.5"
    without = with_it.model_copy(update={"megatron": {**with_it.megatron, "optimizer_cpu_offload": False}})
    assert fullest_rank(without, family, config).total > 80 * GIB


def refused(options: Options, family: Any, config: dict[str, Any], gpu: float = 80.0) -> str:
    try:
        refuse_misfit(options, family, config, gpu)
    except UsageError as error:
        return str(error)
    return ""


def test_cheapest_change_is_named() -> None:
    """A trainer that does not fit is refused with the first change in order of cost whose estimate fits."""
    name = "GLM4-9B, 4 + 4"
    family, config = model_of(name)

    def said(gpu: float = 80.0, **changes: Any) -> str:
        return refused(guide(name, **changes), family, config, gpu)

    assert said() == ""
    assert "optimizer weigh most" in said(40) and said(40).endswith(
        "give --optimizer-cpu-offload --use-precision-aware-optimizer"
    )
    assert said(max_tokens_per_gpu=49152).endswith("give --log-probs-chunk-size 1024"), "which costs nothing"
    long = said(max_tokens_per_gpu=32768, log_probs_chunk_size=512, megatron={})
    assert "activations weigh most" in long
    assert "give --recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in long
    assert "more GPUs" in said(5)
    fixed = guide(name, max_tokens_per_gpu=49152, log_probs_chunk_size=1024)
    assert refused(fixed, family, config) == "", "the change makes it fit"
    assert "do not fit into" in "\n".join(
        memory_lines(guide(name, vllm={"gpu_memory_utilization": 0.05}), family, config)
    )


def test_allowances_alone_only_warn() -> None:
    """Where it would fit without the allowances for CUDA and NCCL, the plan warns, and refuses nothing."""
    name = "GLM4-9B, 4 + 4"
    family, config = model_of(name)
    terms = fullest_rank(guide(name), family, config)
    gpu = (terms.total - terms.allowed / 2) / GIB
    assert refused(guide(name), family, config, gpu) == ""
    lines = list(memory_lines(guide(name), family, config, gpu))
    assert any(line.startswith("warn: a trainer rank takes") for line in lines)
    last = verdict(guide(name), family, config, gpu, lines)
    assert last.startswith("does not fit: a trainer rank takes") and last.split(": ", 1)[1] not in "".join(lines)


def test_communicators_of_a_layout() -> None:
    """Those of one rank alone are not counted; the others as far as they reach, and an all-to-all's peers."""
    small = guide("Qwen3-4B, 2 + 6")
    assert communicators(small) == {"tp": (2, False), "world": (2, False)}
    big = communicators(guide("GLM-4.5-355B, BF16 rollouts"))
    assert big["tp"] == (8, False) and big["mp"] == (32, True) and big["ep"] == (16, True)
    assert 8 * GIB < nccl_bytes(guide("GLM-4.5-355B, BF16 rollouts")) < 12 * GIB, "over 10 GB is others' experience"
    assert nccl_bytes(small) < 2 * GIB


def test_what_updates_keep_is_there_in_every_phase() -> None:
    """The memory that pieces are sent from, and the communicator that they travel over."""
    family, config = model_of(name := "GLM4-9B, 4 + 4")
    pieces = guide(name, weight_transfer="nccl")
    whole = guide(name, weight_transfer="disk")
    kept, none = fullest_rank(pieces, family, config), fullest_rank(whole, family, config)
    bucket = pieces.update_weight_buffer_size
    assert kept.gpu["update buffers"] == bucket and none.gpu["update buffers"] == 0
    wire = nccl_bytes(pieces) - nccl_bytes(whole)
    assert wire > 0
    assert kept.phases["save"] == none.phases["save"] + bucket + wire
    assert kept.phases["weight update"] == kept.phases["save"] - kept.gpu["save"], "pieces gather nothing"
    assert none.gpu["weight update"] > 0, "whole tensors"
    assert BAND == fp8.BAND


def test_the_updates_communicator() -> None:
    assert update_members(guide("GLM4-9B, 4 + 4", weight_transfer="nccl")) == (8, True)
    assert update_members(guide("GLM4-9B, 4 + 4")) == (5, True), "rank 0 and the workers, by vLLM's own transfer"
    assert update_members(guide("GLM4-9B, colocated")) is None, "CUDA IPC within a host"
    assert update_members(guide("GLM-4.5-355B, BF16 rollouts")) == (64, True)
    assert update_members(guide("GLM4-9B, 4 + 4", weight_transfer="disk")) is None


def test_pinned_blocks_are_rounded() -> None:
    assert pinned(33 * 2**20) == 64 * 2**20
    assert pinned(ROUNDED) == ROUNDED and pinned(ROUNDED + 1) == ROUNDED + 1
    assert pinned(1000) == 1024


def test_of_a_shared_gpu_every_turn_is_looked_at() -> None:
    family, config = model_of(name := "GLM4-9B, colocated")

    def warned(**values: Any) -> str:
        return "\n".join(
            line for line in memory_lines(guide(name, **pieces, **values), family, config) if line.startswith("warn")
        )

    pieces = {"weight_transfer": "ipc"}
    options = guide(name, vllm={"gpu_memory_utilization": 0.7}, **pieces)
    trainer = fullest_rank(options, family, config)
    engine = engine_terms(options, family, config, 80 * GIB)
    found = turns(options, trainer, engine)
    assert trainer.total < found[TRAINS] < trainer.total + 3 * GIB, "all but a sleeping engine's rest is the trainer's"
    kept = trainer.gpu["update buffers"]
    assert kept and engine.total + trainer.allowed + kept == found[SAMPLES] < engine.total + 4 * GIB
    assert put_away(options, trainer, engine) == trainer.gpu["weights"] + trainer.gpu["optimizer"]
    light = options.model_copy(update={"vllm": {**options.vllm, "enable_eplb": True}})
    assert put_away(light, trainer, engine) == put_away(options, trainer, engine) + engine.gpu["weights"]
    assert warned(vllm={"gpu_memory_utilization": 0.7}) == ""
    said = warned(vllm={"gpu_memory_utilization": 0.97})
    assert "while the engines sample" in said
    fits = float(said.partition("utilization to ")[2].split()[0])
    assert fits < 0.97 and warned(vllm={"gpu_memory_utilization": fits}) == ""
    stays = warned(vllm={"gpu_memory_utilization": 0.7}, offload_rollout=False)
    assert "while the trainer trains" in stays and stays.endswith("leave out --no-offload-rollout")
    assert "--no-offload-train and --no-offload-rollout" in warned(offload_train=False, offload_rollout=False)
    text = "\n".join(memory_lines(options, family, config))
    assert "while the trainer trains" in text and "put away" in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_reference_recipes_fit(name: str) -> None:
    recipe_path = ROOT / "examples" / f"{name}.toml"
    (options,) = resolve_stages(load_recipe(recipe_path), {}, {"run": "r", "prepared": "p"})
    family, config = of(EXAMPLES[name])
    config = quantized(config) if name in IN_FP8 else config
    assert not [line for line in memory_lines(options, family, config) if line.startswith("warn")]
    terms = fullest_rank(options, family, config)
    usable = 79.1  # GiB of an H100 of 80 GB
    if options.actor_num_nodes > 1:
        taken = sum(on_host(options, terms, engine_terms(options, family, config, 80 * GIB)).values()) / 2**40
        for page in (recipe_path, ROOT / "docs" / "sizing.md"):
            assert f"{taken:.2f}" in page.read_text(), "what a host takes, as it is said there"
    asleep = ASLEEP if options.takes_turns else 0.0
    assert terms.phases["save"] + asleep <= (usable - 5) * GIB, "the first save, with 5 GiB to spare"


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("gpu", [60, 40, 24, 10])
def test_advice_that_is_taken_makes_it_fit(name: str, gpu: int) -> None:
    """Of every shipped recipe on smaller GPUs: with the flags that the refusal names it is not refused, whatever rules
    there are; or none of the changes makes it fit."""
    recipe = load_recipe(ROOT / "examples" / f"{name}.toml")
    folders = {"run": "r", "prepared": "p"}
    (options,) = resolve_stages(recipe, {}, folders)
    family, config = of(EXAMPLES[name])
    said = refused(options, family, config, gpu)
    found = misfit(options, family, config, gpu)
    if found is None:
        assert said == ""
        return
    if not found.change:
        assert not said or said.endswith("no flag makes it fit: give the trainer more GPUs")
        return
    overrides, _, _ = parse_flags(found.change.split(), {})
    (changed,) = resolve_stages(recipe, overrides, folders)
    assert misfit(changed, family, config, gpu) is None, found.change


def test_an_engines_cache() -> None:
    name = "Qwen3-4B, 2 + 6"
    options, (family, config) = guide(name), model_of(name)
    assert token_bytes(options, family, config) == 2 * 36 * 4 * 128 * 2
    assert (
        token_bytes(options.model_copy(update={"vllm": {"kv_cache_dtype": "fp8"}}), family, config) == 36 * 4 * 128 * 2
    )
    half = model_bytes(options, family, quantized(config))
    assert 0.5 < half / model_bytes(options, family, config) < 0.7


def test_data_parallel_engine_parts() -> None:
    """Data-parallel parts of an engine each hold everything but the experts."""
    family, config = model_of(name := "GLM-4.5-355B, BF16 rollouts")
    options = guide(name)
    assert (options.engine_data_parallel_size, options.engine_tensor_parallel_size) == (4, 8)
    count = whole_model(family, config)
    assert gpu_weights(options, family, config) == pytest.approx(2 * (count.expert / 32 + count.dense / 8))
    assert token_bytes(options, family, config) == 2 * 92 * 1 * 128 * 2


def test_layers_that_are_trained_along_are_counted() -> None:
    """Each tensor of MiMo's layer once, on the last stage; an optimizer step's operations grow by it and a further
    output layer."""
    family, config = of("MiMo-7B-RL")

    def held(stage: int, heads: int) -> int:
        layout = Layout(1, 2, 1, 1, 1, 1, 1, False, 1, heads=heads)
        return on_stage(family, config, layout, stage, {}).all

    hidden, width, biases = 4096, 11008, 4096 + 2 * 1024
    matrices = 2 * hidden * hidden + hidden * biases + hidden * hidden + 3 * hidden * width
    assert held(1, 1) - held(1, 0) == matrices + biases + 5 * hidden and held(0, 1) == held(0, 0)
    without, along = model_flops(family, config), model_flops(family, config, 1)
    assert (along.met - without.met, along.head - without.head) == (matrices, 0)
    added = along.training(7, 0, 5) - without.training(7, 0, 5)
    assert added == 3 * 2 * matrices * 7 + 2 * 2 * 151680 * hidden * 5, "the output layer itself has no gradient"


def test_held_layers_have_no_gradient() -> None:
    """Weights of a layer that is held alone, and neither gradients nor optimizer; a critic has none of them."""
    family, config = of("MiMo-7B-RL")

    def terms(**values: Any) -> Mapping[str, float]:
        options = Options(actor_num_gpus_per_node=2, pipeline_model_parallel_size=2, **values)
        return rank_on(options, family, config, Layout.from_options(options, config["num_hidden_layers"]), 1).gpu

    def more(name: str, of: Mapping[str, float], than: Mapping[str, float]) -> float:
        return of[name] - than[name]

    without, held = terms(), terms(mtp_num_layers=1)
    trained = terms(mtp_num_layers=1, enable_mtp_training=True)
    size = more("weights", held, without) / 2
    assert size > 2e8 and more("weights", trained, held) == 151680 * 4096 * 2, "a copy of the embedding"
    assert [more(name, held, without) for name in ("gradients", "optimizer", "loaded states")] == [0, 0, 0]
    assert [more(name, trained, without) for name in ("gradients", "optimizer")] == [4 * size, 12 * size]
    critic = {"advantage_estimator": "ppo"}
    for name in ("weights", "gradients", "optimizer"):
        both = more(name, terms(mtp_num_layers=1, enable_mtp_training=True, **critic), terms(**critic))
        assert both == more(name, trained, without), name


def test_layers_that_draft_are_weights_of_an_engine() -> None:
    family, config = of("GLM-4.5")
    options = guide("GLM-4.5-355B, BF16 rollouts")
    drafting, looking = (
        options.model_copy(
            update={"vllm": options.vllm | {"speculative_config": {"method": method, "num_speculative_tokens": 3}}}
        )
        for method in ("mtp", "ngram")
    )
    plain = gpu_weights(options, family, config)
    experts = 160 * 3 * 5120 * 1536 * 2 / 32  # of one layer, in bf16, over the engine's GPUs
    assert experts < gpu_weights(drafting, family, config) - plain < 1.3 * experts
    assert token_bytes(drafting, family, config) == pytest.approx(token_bytes(options, family, config) * 93 / 92)
    assert gpu_weights(looking, family, config) == plain


def test_update_needs_room_outside_share() -> None:
    """Out of files vLLM keeps a whole layer's experts until all have come; in pieces, a GPU's part of them."""
    name = "GLM-4.5-355B, BF16 rollouts"
    family, config = model_of(name)
    options = guide(name).model_copy(
        update={"colocate": False, "rollout_num_gpus": 32, "vllm": {"gpu_memory_utilization": 0.92}}
        | {"weight_transfer": "disk"}
    )
    bucket = options.update_weight_buffer_size
    experts = 160 * 3 * 5120 * 1536 * 2
    assert update_bytes(options, family, config) == experts
    in_pieces = options.model_copy(update={"weight_transfer": "auto"})
    assert update_bytes(in_pieces, family, config) == bucket + experts / 32
    said = "\n".join(memory_lines(options, family, config))
    assert "weight update takes 7.0" in said and "74 of 80; lower" in said
    assert "--vllm-gpu-memory-utilization to 0.91 or less" in said
    assert "a weight update takes" not in "\n".join(memory_lines(in_pieces, family, config))


def test_share_leaves_room_for_update() -> None:
    """An engine's share leaves room for a weight update where the user sets none."""
    name = "GLM-4.5-355B, BF16 rollouts"
    family, config = model_of(name)
    apart = guide(name).model_copy(
        update={"colocate": False, "rollout_num_gpus": 32, "vllm": {}, "weight_transfer": "disk"}
    )
    gpu = 80.0 * GIB
    own, mine = utilization(apart), share(apart, family, config, gpu)
    update = update_bytes(apart, family, config)
    assert own * gpu + update > gpu >= mine * gpu + update > gpu - 0.01 * gpu
    assert mine < own
    said = "\n".join(memory_lines(apart, family, config))
    assert f"it is started with --vllm-gpu-memory-utilization {mine:.2f}, not vLLM's own {own:g}" in said
    assert "a weight update takes" not in said
    terms = engine_terms(apart, family, config, gpu)
    assert terms.total == pytest.approx(mine * gpu + update)
    for other in (
        {"vllm": {"gpu_memory_utilization": 0.95}},
        {"vllm": {"kv_cache_memory_bytes": 1 << 30}},
        {"colocate": True},
        {"debug_rollout_only": True},
        {"weight_transfer": "auto"},
    ):
        options = apart.model_copy(update=other)
        assert share(options, family, config, gpu) == utilization(options), other
        assert "it is started with" not in "\n".join(memory_lines(options, family, config)), other
    assert share(apart, family, config, update) == own, "a GPU that holds no update"


def test_plan_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    words = " ".join(GUIDES["Qwen3-4B, 2 + 6"][0]).replace("/scratch/Qwen3-4B ", f"{tmp_path} ").split()
    assert main(["plan", "--", *words]) == 0
    said = capsys.readouterr().out
    assert (
        "trainer rank: " in said
        and "GPU of an engine: " in said
        and "host, for 2 ranks: " in said
        and "warn" not in said
    )
    assert said.strip().endswith("GPU (engine 0)")
    assert main(["plan", "--gpu-memory", "30", "--", *words]) == 2, "it does not fit"
    found = capsys.readouterr()
    assert "trainer rank: " in found.out and "takes 45 of 30 GiB" in found.err and "does not fit: " in found.err
    assert "give --optimizer-cpu-offload" in found.err
    unknown = [word.replace("Qwen3-4B", "mine") for word in GUIDES["Qwen3-4B, 2 + 6"][0]]
    assert main(["plan", "--", *unknown]) == 0
    assert "memory: not estimated: --hf-checkpoint /scratch/mine" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*gpu*.toml")))
def test_plans_of_recipes_are_short(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """40 lines at most, of which the last says whether the run fits."""
    nodes = {"64": "8x8", "16": "2x8", "8": "1x8", "4": "1x4"}
    (file,) = (f"{shape}.txt" for gpus, shape in nodes.items() if f"-{gpus}gpu" in name)
    assert main(["plan", str(SHIPPED / f"{name}.toml"), "--hostfile", str(SHIPPED.parent / "hostfiles" / file)]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= 40
    assert lines[-1].startswith("fits: ") and " of 80 GiB on " in lines[-1]


def test_a_large_plan_is_folded() -> None:
    options = Options(actor_num_nodes=64, rollout_num_gpus=8)
    plan = make_plan(options, [Host(f"n{number}", 8) for number in range(65)], "run")
    whole, folded = plan.table().splitlines(), plan.table(12).splitlines()
    assert len(folded) == 12 and folded[:9] == whole[:9] and folded[-2:] == whole[-2:]
    assert folded[9] == f"... {len(whole) - 11} more lines"


def test_every_stage_of_a_pipeline_is_looked_at() -> None:
    name = "GLM-4.5-355B, BF16 rollouts"
    options, (family, config) = guide(name), model_of(name)
    layout = Layout.from_options(options, 92)
    totals = [rank_on(options, family, config, layout, stage).total for stage in range(4)]
    assert fullest_rank(options, family, config).total == max(totals)


def test_checkpoints_take_host_memory() -> None:
    """A few tensors; states that are kept in fewer bits are made fp32; in the background all that is written."""
    count = Count(1000, 800)
    layout = Layout(1, 1, 1, 1, 1, 4, 2, False, 1)
    own = 1000 / 4 + 800 / 2

    def taken(async_save: bool = False, **megatron: Any) -> float:
        found = host_bytes(Options(megatron=megatron, async_save=async_save), [count], layout, [10, 30])
        return found["save or load"] + found["async save"]

    assert taken() == 4 * 4 * 30 == checkpoint_bytes(Options(), count, layout, 30)
    assert taken(use_precision_aware_optimizer=True) == 480 + 12 * own
    assert taken(optimizer_cpu_offload=True, use_precision_aware_optimizer=True) == 480 + 4 * own
    assert taken(async_save=True) == 480 + 1800 * 2 / 4 + 12 * own


def test_copies_in_memory_are_counted() -> None:
    """Files of two copies, each in two places where there are several hosts, and what the writing process keeps."""
    count = Count(1000, 800)
    layout = Layout(1, 1, 1, 1, 1, 4, 2, False, 1)
    part = 1800 * 2 / 4 + 12 * (1000 / 4 + 800 / 2)

    def taken(**values: Any) -> float:
        return host_bytes(Options(**values), [count], layout, [10, 30])["copies in memory"]

    assert taken() == taken(actor_num_nodes=2) == 0
    assert taken(non_persistent_save_interval=1) == 3 * part
    assert taken(non_persistent_save_interval=5, actor_num_nodes=2) == 5 * part
    in_fp32 = 1800 * 4 / 4 + 12 * (1000 / 4 + 800 / 2)
    assert taken(non_persistent_save_interval=1, bf16=False) == 3 * in_fp32, "a copy in memory, as it was measured"
    old = taken(non_persistent_save_interval=1, keep_old_actor=True)
    assert old == 3 * (part + 2 * 1800 * 2 / 4)


def test_hosts_that_are_too_small() -> None:
    """A warning where nothing is said of a host; else an error, with a change after which it fits."""
    family, config = model_of(name := "GLM-4.5-355B, BF16 rollouts")
    options = guide(name)

    def refusal(options: Options, host: float) -> str:
        try:
            refuse_misfit(options, family, config, 80, host)
        except UsageError as error:
            return str(error)
        return ""

    lines = list(memory_lines(options, family, config))
    assert not any("of a host" in line for line in lines)
    needed = float(next(line for line in lines if "host, for 8 ranks" in line).split(": ")[1].split()[0])
    assert refusal(options, needed + 1) == ""
    assert refusal(options, needed - 1).endswith("give --optimizer-offload-fraction 0.75")
    less = options.megatron | {"optimizer_offload_fraction": 0.75}
    assert refusal(options.model_copy(update={"megatron": less}), needed - 1) == ""
    background = options.model_copy(update={"async_save": True})
    assert refusal(background, needed + 1).endswith("give --no-async-save")
    copied = options.model_copy(update={"non_persistent_save_interval": 1})
    assert refusal(copied, needed + 1).endswith("give --non-persistent-save-interval 0")
    assert refusal(options, 100).endswith("give the trainer more hosts")
    kept = {"vllm": background.vllm | {"enable_eplb": True}}  # engines keep their weights on the host
    large = background.model_copy(update=kept | {"actor_num_gpus_per_node": 16})
    assert any(line.startswith("warn: 16 trainer ranks take") for line in memory_lines(large, family, config))


def test_samples_of_own_functions_fill_the_context() -> None:
    """--rollout-max-response-len bounds each turn of them, as in slime, and the context prompt and response together."""
    given = {"rollout_max_context_len": 32768, "rollout_max_response_len": 4096, "rollout_max_prompt_len": 1024}
    assert longest_sample(Options(hf_checkpoint="m", custom_generate_function_path="a.generate", **given)) == 32768
    assert longest_sample(Options(hf_checkpoint="m", **given)) == 5120


def test_latent_attention_of_a_published_model() -> None:
    """DeepSeek-V3 has 671 billion parameters, and keeps 576 numbers a token and layer on every GPU of an engine."""
    config = MODELS["DeepSeek-R1"][1]
    family = find_family(config, "")
    assert whole_model(family, config).all == pytest.approx(671.0e9, rel=1e-3)
    for wide in (1, 8):
        options = Options(hf_checkpoint="x", rollout_num_gpus=8, rollout_num_gpus_per_engine=wide)
        assert token_bytes(options, family, config) == 61 * 576 * 2


def test_matrices_that_vllm_makes_of_another() -> None:
    """Per token of the latent vector one row for each head and column of unrotated keys and of values."""
    config = MODELS["DeepSeek-R1"][1]
    family = find_family(config, "")
    options = Options(hf_checkpoint="x", rollout_num_gpus=8, rollout_num_gpus_per_engine=8)
    made = 61 * 128 * (128 + 128) * 512 * 2 / 8
    for kind in (config, quantized(config)):
        weights = engine_terms(options, family, kind, 80e9).gpu["weights"]
        assert weights - gpu_weights(options, family, kind) == pytest.approx(made)


def test_drafts_of_a_model_with_a_list_of_layers() -> None:
    """The layer that drafts has experts, whether config.json says so of the others by a list or by a number."""
    config = MODELS["GLM-4.7-Flash"][1]
    listed = config | {"mlp_layer_types": ["dense", *["sparse"] * 46]}
    family = find_family(config, "")
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    options = Options(hf_checkpoint="x", rollout_num_gpus=8, rollout_num_gpus_per_engine=8, vllm=drafting)
    assert token_bytes(options, family, listed) == 48 * 576 * 2
    assert gpu_weights(options, family, listed) == gpu_weights(options, family, config)
