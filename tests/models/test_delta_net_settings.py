"""What is refused, and what is counted, of models with gated delta nets before anything of them is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DataError, UsageError
from hpcrl.launch import preflight
from hpcrl.launch.preflight import check_gates, model_notes
from hpcrl.models.divisions import uncut_gates, undivided
from hpcrl.models.family import LayerKind, find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.planning.formulas.activations import backward_bytes, layer_bytes
from hpcrl.planning.formulas.engine_memory import engine_terms, sequence_bytes, token_bytes
from hpcrl.planning.formulas.parameters import Layout
from hpcrl.planning.formulas.training_memory import GIB
from tests.support.published_models import MODELS

NEXT = MODELS["Qwen3-Next-80B-A3B"][1]
DENSE = MODELS["Qwen3.5-27B"][1]


def fields(config: dict[str, Any]) -> dict[str, Any]:
    return find_family(config, "").transformer(config)


def options(tp: int = 1, **more: Any) -> Options:
    return Options(actor_num_gpus_per_node=8, tensor_model_parallel_size=tp, hf_checkpoint="model", **more)


def saved(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_rounded_decays_are_told(tmp_path: Path) -> None:
    """Once, of a model with gated delta nets under --bf16, before the run begins."""
    here = options().model_copy(update={"hf_checkpoint": saved(tmp_path, DENSE), "bf16": True})
    (line,) = model_notes([here, here])
    assert line.startswith("--bf16: A_log and dt_bias")
    assert not model_notes([here.model_copy(update={"bf16": False})])
    assert not model_notes([here.model_copy(update={"debug_rollout_only": True})])
    assert not model_notes([here.model_copy(update={"hf_checkpoint": "/nowhere"})])
    saved(tmp_path, MODELS["Qwen3-4B"][1])
    assert not model_notes([here])


def test_ranks_that_would_share_a_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key-value heads over four ranks: Megatron-core 0.16 cuts the queries of a head and not their gates."""
    (error,) = uncut_gates(options(4), fields(NEXT), "0.16.1")
    assert "--tensor-model-parallel-size 4" in str(error) and "the 2 key-value heads" in str(error)
    assert "0.19" in error.hint and "Python 3.12" in error.hint
    for opts, config, megatron in (
        (options(2), NEXT, "0.16.1"),
        (options(4), NEXT, "0.19.0"),
        (options(4), NEXT, None),
        (options(8), MODELS["GLM-4-9B-0414"][1], "0.16.1"),
    ):
        assert not list(uncut_gates(opts, fields(config), megatron))
    here = options(4).model_copy(update={"hf_checkpoint": saved(tmp_path, NEXT)})
    monkeypatch.setattr(preflight, "version", lambda name: "0.16.1")
    with pytest.raises(UsageError, match="key-value heads"):
        check_gates(here)
    monkeypatch.setattr(preflight, "version", lambda name: "0.19.0")
    check_gates(here)


def test_key_heads_of_trainer_and_engines() -> None:
    odd = {**fields(NEXT), "linear_num_key_heads": 6}
    found = [
        str(error) for error in undivided(options(4, rollout_num_gpus=8, rollout_num_gpus_per_engine=8), odd, None)
    ]
    told = [text for text in found if "linear attention" in text]
    assert len(told) == 2 and told[0].startswith("--tensor-model-parallel-size 4")
    assert told[1].startswith("--rollout-num-gpus-per-engine 8") and "divided by 8" in told[1]


@pytest.mark.parametrize("name", ["linear_num_key_heads", "full_attention_interval"])
def test_sizes_that_are_no_numbers(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=name):
        read_config(saved(tmp_path, {**NEXT, name: "16"}))


def test_context_parallel_computes_whole_sequences() -> None:
    """A token of a rank's own stands for as many tokens of its sequence as there are ranks."""
    linear, told = LayerKind(linear=True), fields(DENSE)
    one = Layout.from_options(options(), told["num_layers"])
    four = replace(one, cp=4)
    assert backward_bytes(told, four, linear, 2) == 4 * backward_bytes(told, one, linear, 2)
    more = layer_bytes(told, four, linear, 2, frozenset(), 2) - layer_bytes(told, one, linear, 2, frozenset(), 2)
    columns = 2 * 16 * 128 + 2 * told["linear_num_value_heads"] * 129
    assert more == 3 * 2 * columns
    plain = LayerKind()
    assert layer_bytes(told, four, plain, 2, frozenset(), 2) == layer_bytes(told, one, plain, 2, frozenset(), 2)


def test_each_sequence_takes_its_state() -> None:
    """Out of the same cache as keys and values: of Qwen3-Next 36 states of 32 heads, 128 by 128."""
    family = find_family(NEXT, "")
    opts = options(bf16=True, rollout_num_gpus=8, rollout_num_gpus_per_engine=2, rollout_max_response_len=64)
    state = 36 * (32 * 128 * 128 * 2 + 3 * 8192 * 2) / 2
    assert sequence_bytes(opts, family, NEXT) == state
    wide = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) / 2
    assert sequence_bytes(opts, family, {**NEXT, "mamba_ssm_dtype": "float32"}) == wide
    terms = engine_terms(opts, family, NEXT, 140 * GIB)
    each = 64 * token_bytes(opts, family, NEXT) + state
    assert terms.at_once == terms.gpu["KV cache"] // each > 100
    assert terms.cached_tokens == pytest.approx(64 * terms.at_once, abs=64 + state / token_bytes(opts, family, NEXT))
    qwen3 = MODELS["Qwen3-4B"][1]
    assert sequence_bytes(opts, find_family(qwen3, ""), qwen3) == 0
