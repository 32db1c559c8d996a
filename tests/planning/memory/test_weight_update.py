"""What a weight update is said to move: the reference run of 355B, and sums that any layout must keep."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.models.family import find_family
from hpcrl.plan import Host, make_plan
from hpcrl.planning.formulas.nccl_memory import gpu_transfer
from hpcrl.planning.formulas.parameters import whole_model
from hpcrl.planning.memory.weight_update import (
    PIECE,
    WORDS,
    Update,
    WholeUpdate,
    in_pieces,
    predict,
    update_lines,
)
from hpcrl.weights.pieces.messages import receive_plans
from hpcrl.weights.pieces.wire import UpdateGroup, WorkerJoinCommand, read_join_command, write_join_command
from hpcrl.weights.update_backend import backend
from tests.support.published_models import MODELS
from tests.support.small_recipes import IN_FP8

EXAMPLES = Path(__file__).parents[3] / "examples"
#: a disaggregated 355B: 32 trainer cards and one engine of 32
LARGE = {"actor_num_nodes": 4, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 32}
LARGE |= {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8}
LARGE |= {"expert_tensor_parallel_size": 1, "sequence_parallel": True}


#: the same in small, where no number of the 355B is asked for
SMALL = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8}
SMALL |= {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}
SMALL |= {"expert_tensor_parallel_size": 1, "sequence_parallel": True}


def made(name: str, hosts: int, fp8: bool = False, **options: Any) -> tuple[Any, ...]:
    """(options, family, config, plan)"""
    config = MODELS[name][1] | ({"quantization_config": {"quant_method": "fp8"}} if fp8 else {})
    resolved = Options(hf_checkpoint="x", **{"bf16": True, **options})
    plan = make_plan(resolved, [Host(f"n{i}", 8) for i in range(hosts)], "run")
    return resolved, find_family(config, name), config, plan


@cache
def large() -> Update:
    return update("GLM-4.5", 8, **LARGE)


def update(name: str, hosts: int, fp8: bool = False, **options: Any) -> Update:
    """The plan of pieces, whether or not the run would take that way."""
    return in_pieces(*made(name, hosts, fp8, **options), "hpcrl_ipc" if options.get("colocate") else "hpcrl_gloo")


def bytes_of(name: str) -> float:
    return 2.0 * whole_model(find_family(MODELS[name][1], name), MODELS[name][1]).all


def test_355b_in_less_than_five_seconds_each_byte_once() -> None:
    found = large()
    plan, whole = found.plan, bytes_of("GLM-4.5")
    assert plan.sent().sum() == pytest.approx(whole, rel=1e-3), "each host of the engine needs another quarter"
    assert found.seconds < 5
    assert plan.sent().max() < 1.1 * plan.sent().sum() / 32, "stages and experts are even enough here"
    assert max(plan.largest()) <= 256 * 2**20
    text = "\n".join(update_lines(found))
    assert "a trainer card sends 22.84 GB at most" in text
    assert "card of an engine" in text and "22.06 GB at most" in text
    assert f"{found.seconds:.2f}" in text and "busiest card's link of 400 Gb/s" in text


def test_messages_of_an_update_take_time() -> None:
    """Of 355B on 64 shared GPUs more than its bytes: 18,744 pieces and 2,429 words each way for a worker."""
    options, found = of_recipe("glm-4.5-355b-64gpu")
    assert found.work == pytest.approx(18_744 * PIECE + 2_400 * WORDS, rel=0.03) and found.work > 4 * found.seconds
    assert f"{found.work:.1f} s for a worker" in "\n".join(update_lines(found))
    small = options.model_copy(update={"update_weight_buffer_size": options.update_weight_buffer_size // 4})
    plan = make_plan(small, [Host(f"n{i}", 8) for i in range(8)], "run")
    config = MODELS["GLM-4.5"][1] | {"quantization_config": {"quant_method": "fp8"}}
    more = in_pieces(small, find_family(config, ""), config, plan, "hpcrl_ipc")
    assert more.work > found.work and more.seconds == pytest.approx(found.seconds, rel=0.1), "more rounds"


def test_what_an_engine_is_told_of_355b_is_small() -> None:
    """An engine's part of the plan, for 32 workers on four hosts, is text of less than 5 MB, and what it says is read
    back as it was."""
    plan = large().plan
    shapes = dict(zip(plan.layouts.names, plan.layouts.shapes, strict=True))
    plans = tuple(receive_plans(plan, dict.fromkeys(shapes, "bfloat16"), shapes))
    command = WorkerJoinCommand(UpdateGroup("n0", 1, 64, 32, 60.0), plans, {})
    text = write_join_command(command)
    assert len(text) < 5e6
    assert read_join_command(text) == command


def test_fp8_is_half() -> None:
    assert update("GLM-4.5", 8, fp8=True, **LARGE).plan.sent().sum() < 0.52 * bytes_of("GLM-4.5")


@pytest.mark.parametrize("name", ["MiMo-7B-RL", "GLM-4.5-Air", "GLM-4.7-Flash"])
def test_layers_that_draft_are_of_the_update(name: str) -> None:
    """In pieces and whole, from the last stage: a layer as the model's, three norms and the matrix that joins,
    which every worker needs whole; nothing where engines draft with something else."""
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 4}
    layout |= {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4, "mtp_num_layers": 1}
    plans, sizes = [], []
    for method in ("ngram", "mtp"):
        drafts = {"speculative_config": {"method": method, "num_speculative_tokens": 1}}
        plans.append(update(name, 1, vllm=drafts, **layout).plan)
        whole = predict(*made(name, 1, vllm=drafts, weight_transfer="disk", **layout))
        assert isinstance(whole, WholeUpdate)
        sizes.append(whole.bytes)
    config = MODELS[name][1]
    family, hidden = find_family(config, name), config["hidden_size"]
    more = dict.fromkeys(plans[1].layouts.names[len(plans[0].layouts.names) :])
    inner = {n for _, rule in family.tensors(config, 1) if "transformer_layer" in rule.megatron for n in rule.hf}
    assert len(more) == len(inner) + 4 and more.keys() > inner
    longer = config | {"num_hidden_layers": config["num_hidden_layers"] + 1}
    layer = whole_model(family, longer).all - whole_model(family, config).all
    assert sizes[1] - sizes[0] == pytest.approx(2 * (layer + 2 * hidden**2 + 3 * hidden), rel=1e-3)
    assert (plans[1].sent()[:2] == plans[0].sent()[:2]).all(), "the first stage has nothing of it"
    received = plans[1].received() - plans[0].received()
    assert (received >= 2 * 2 * hidden**2).all()


def test_spread_experts_and_repeated_attention() -> None:
    """Experts are spread over workers and attention is repeated."""
    spread = {"enable_expert_parallel": True, "data_parallel_size": 32, "tensor_parallel_size": 1}
    plan = update("GLM-4.5", 8, **LARGE, vllm=spread).plan
    once = bytes_of("GLM-4.5")
    dense = plan.received() - plan.received().min()
    assert plan.sent().sum() > 1.1 * once, "every host needs all of attention, and gets it once"
    assert plan.sent().sum() < 1.2 * once
    assert dense.max() < 0.01 * once


@pytest.mark.parametrize("name", ["Qwen3-4B", "Llama-3.2-3B", "GLM-4-9B-0414", "Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_colocated_ranks_keep_their_weights(name: str) -> None:
    """Colocated ranks and workers keep what they can."""
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    shared = {"colocate": True, "actor_num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 8}
    plan = update(name, 1, **layout, **shared).plan
    assert not plan.crossing().any()
    whole = bytes_of(name)
    assert plan.sent().sum() == pytest.approx(whole, rel=1e-3), "four engines of one host need it once"
    held = np.zeros(8)
    for number, shape, item in zip(plan.layouts.held, plan.layouts.shapes, plan.layouts.items, strict=True):
        for part in plan.layouts.patterns[number]:
            for rank in part.who:
                held[rank] += item * (part.rows[1] - part.rows[0]) * (part.columns[1] - part.columns[0])
        assert shape[0] == max(part.rows[1] for part in plan.layouts.patterns[number])
    assert held.sum() < 2.2 * whole + 8 * 2 * MODELS[name][1]["vocab_size"] * MODELS[name][1]["hidden_size"]


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    (tmp_path / "r.toml").write_text(
        f'hf_checkpoint = "{tmp_path}"\nprompt_data = "x.jsonl"\nactor_num_gpus_per_node = 4\nrollout_num_gpus = '
        "4\nbf16 = true\n"
        'tensor_model_parallel_size = 2\nrm_type = "math"\nnum_rollout = 1\nlabel_key = "l"\nn_samples_per_prompt = 8\n'
    )
    words = ["plan", str(tmp_path / "r.toml"), "--hostfile", str(tmp_path / "hosts"), "--link-rate"]
    assert main(["plan", str(tmp_path / "r.toml"), "--hostfile", str(tmp_path / "hosts")]) == 0
    assert "(--weight-transfer vllm)" in capsys.readouterr().out
    words[-1:-1] = ["--weight-transfer", "nccl"]
    assert main([*words, "100"]) == 0
    slow = capsys.readouterr().out
    assert "weights of one update" in slow
    assert "a trainer card sends" in slow
    assert main([*words, "400"]) == 0
    fast = capsys.readouterr().out
    seconds = [float(text.split(" s through")[0].split()[-1]) for text in (slow, fast)]
    assert seconds[0] == pytest.approx(4 * seconds[1], abs=0.02)


@pytest.mark.parametrize(
    ("options", "transfer"),
    [
        ({"weight_transfer": "nccl"}, "nccl"),
        ({}, "vllm"),
        ({"weight_transfer": "gloo"}, "gloo"),
        ({"weight_transfer": "disk"}, "disk"),
        ({"bf16": False}, "gloo"),
        ({"vllm": {"data_parallel_size": 4}, "weight_transfer": "gloo"}, "gloo"),
    ],
)
def test_what_is_printed_is_the_way_that_the_run_takes(options: dict[str, Any], transfer: str) -> None:
    case = made("Qwen3-30B-A3B", 2, **SMALL, **options)
    resolved = case[0]
    plan = case[-1]
    cpu = not options.get("bf16", True)
    found = predict(*case)
    text = "\n".join(update_lines(found))
    assert f"(--weight-transfer {transfer})" in text
    assert backend(resolved, plan, cpu) == f"hpcrl_{transfer}"
    if transfer not in ("disk", "vllm"):
        assert isinstance(found, Update) and "in pieces" in text
        return
    assert isinstance(found, WholeUpdate)
    assert found.bytes == pytest.approx(bytes_of("Qwen3-30B-A3B"), rel=1e-3)


#: recipe -> (model, hosts, way)
RECIPES = {
    "glm-4.5-355b-64gpu": ("GLM-4.5", 8, "ipc"),
    "glm-4.5-355b-64gpu-bf16": ("GLM-4.5", 8, "ipc"),
    "glm-4.5-355b-lora-16gpu": ("GLM-4.5", 2, "ipc"),
    "glm-z1-9b-8gpu": ("GLM-4-9B-0414", 1, "vllm"),
    "glm-z1-9b-8gpu-colocated": ("GLM-4-9B-0414", 1, "vllm"),
    "qwen3-30b-a3b-lora-4gpu": ("Qwen3-30B-A3B", 1, "vllm"),
    "qwen3-4b-8gpu": ("Qwen3-4B", 1, "vllm"),
    "qwen3-4b-8gpu-async": ("Qwen3-4B", 1, "vllm"),
    "qwen3-4b-8gpu-colocated": ("Qwen3-4B", 1, "vllm"),
}


def test_every_gpu_recipe_is_in_the_table() -> None:
    assert set(RECIPES) == {path.stem for path in EXAMPLES.glob("*gpu*.toml")}


@cache
def of_recipe(name: str) -> tuple[Options, Update | WholeUpdate]:
    """Options of a shipped recipe, and the weight update of its run."""
    model, hosts, _ = RECIPES[name]
    config = MODELS[model][1]
    if name in IN_FP8:
        config = config | {"quantization_config": {"quant_method": "fp8"}}
    (options,) = resolve_stages(load_recipe(EXAMPLES / f"{name}.toml"), {}, {})
    plan = make_plan(options, [Host(f"n{i}", 8) for i in range(hosts)], "run")
    return options, predict(options, find_family(config, model), config, plan)


@pytest.mark.parametrize("name", RECIPES)
def test_the_way_of_each_recipe(name: str) -> None:
    """Way, members and bytes of each shipped recipe: pieces, every byte once over a link, and quick enough by count."""
    options, found = of_recipe(name)
    _, hosts, transfer = RECIPES[name]
    assert found.transfer == transfer == gpu_transfer(options), "the estimate of memory knows of it"
    if isinstance(found, WholeUpdate):
        assert found.seconds < 2 and found.instead is not None
        assert found.instead.transfer == ("ipc" if options.colocate else "nccl")
        assert f"in {len(found.instead.plan.sender)} pieces" in "\n".join(update_lines(found))
        return
    made = found.plan
    assert made.ranks == options.world_size
    assert sum(len(place.workers) for place in made.destinations) == options.engine_gpus
    assert found.seconds < (5 if hosts > 1 else 1)
    if transfer == "ipc":
        assert made.crossing().sum() == made.landing().sum(), "what a host lacks comes once, and is read there"
        assert bool(made.crossing().any()) is (hosts > 1)
        assert max(made.largest()) <= options.update_weight_buffer_size // 2


def test_the_guides_figures() -> None:
    """The block of docs/sizing.md."""
    page = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text()
    assert "".join(f"    {line}\n" for line in update_lines(of_recipe("glm-4.5-355b-64gpu-bf16")[1])) in page


def test_fp8_matrices_are_those_that_are_sent_so() -> None:
    """Of latent attention all five matrices are bytes; norms and the router are not."""
    plan = update("GLM-4.7-Flash", 2, fp8=True, **SMALL).plan
    sizes = dict(zip(plan.layouts.names, plan.layouts.items, strict=True))
    layer = "model.layers.3."
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        assert sizes[f"{layer}self_attn.{name}.weight"] == 1, name
    assert sizes[f"{layer}self_attn.kv_a_layernorm.weight"] == sizes[f"{layer}mlp.gate.weight"] == 2
