"""Which sizes of a model a layout can cut, from config.json's fields and the options alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.models.divisions import undivided

SIZES: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "ffn_hidden_size": 90,
    "num_layers": 6,
}
EXPERTS: dict[str, Any] = {
    **SIZES,
    "num_moe_experts": 12,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 22,
    "moe_shared_expert_intermediate_size": 44,
}
EP4 = "--expert-model-parallel-size 4 --sequence-parallel"
TP = "--tensor-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
PP = "--pipeline-model-parallel-size"
STAGES = "--num-virtual-stages-per-pipeline-rank"
ALL_SPARSE = {"moe_layer_freq": [1, 1], "moe_shared_expert_intermediate_size": 0}
#: a command line, other sizes of the model with experts -> a part of each error
OF_EXPERTS: list[tuple[str, dict[str, Any], list[str]]] = [
    (f"{EP4} {ETP} 4", {}, [f"^{ETP} 4: the 22 columns of an expert of config.json cannot be divided by 4"]),
    (f"{EP4} {TP} 4", ALL_SPARSE, [rf"^{ETP} \(by default that of TP\) 4: the 22 columns of an expert"]),
    (f"{EP4} {ETP} 1 {TP} 4", {}, [f"^{TP} 4: the 90 MLP columns"]),
    (f"{EP4} {ETP} 1 {TP} 8", {"ffn_hidden_size": 96}, [f"^{TP} 8: the 44 columns of its shared experts"]),
    ("--expert-model-parallel-size 5", {}, ["^--expert-model-parallel-size 5: the 12 experts"]),
    (f"{EP4} {ETP} 1 {TP} 4", {"moe_layer_freq": [1, 1]}, []),
    (f"{TP} 2 {ETP} 1 --sequence-parallel", {}, ["would not add up the gradients"]),
    (f"{TP} 2", {}, ["only with sequence parallelism"]),
    (f"{TP} 3 --sequence-parallel --expert-model-parallel-size 2", {}, ["8 attention", "22 col", "44 col"]),
]
#: a command line of a dense model of 6 layers -> a part of the error, "" if it can be cut
OF_STAGES = {
    f"{PP} 3": "",
    f"{PP} 4": f"{PP} 4: the 6 layers of config.json cannot be divided so",
    f"{PP} 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split": "",
    f"{PP} 3 --account-for-embedding-in-pipeline-split": "the 7 layers",
    f"{PP} 2 --num-layers-per-virtual-pipeline-stage 3": "",
    f"{PP} 2 --num-layers-per-virtual-pipeline-stage 2": "-stage 2: the 3 layers of a rank",
    f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 2": "uneven first or last",
    f"{PP} 2 {STAGES} 3": "",
    f"{PP} 2 {STAGES} 2": f"{STAGES} 2: the 3 layers of a rank",
    f"{PP} 2 {STAGES} 2 --decoder-last-pipeline-num-layers 2": "",
    f"{PP} 2 {STAGES} 2 --decoder-first-pipeline-num-layers 3": "the 3 layers of a rank",
    f"{PP} 3 {STAGES} 2 --decoder-first-pipeline-num-layers 2": "",
    f"{PP} 2 --decoder-first-pipeline-num-layers 6": "first-pipeline-num-layers 6: the 6 layers",
    f"{PP} 2 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4": "",
    f"{PP} 2 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3": "cannot be divided so",
    "--decoder-first-pipeline-num-layers 2": "cannot be divided so",
    "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4": "cannot be divided so",
    f"{PP} 2 --pipeline-model-parallel-layout Et|tt|t|ttL": "",
}


def read(line: str) -> Options:
    return Options(**parse_flags([*line.split(), "--debug-train-only"])[0])


@pytest.mark.parametrize(("line", "sizes", "wanted"), OF_EXPERTS)
def test_expert_sizes(line: str, sizes: dict[str, Any], wanted: list[str]) -> None:
    """Every size that does not divide is named with both values."""
    found = [str(error) for error in undivided(read(line), EXPERTS | sizes, None)]
    assert len(found) == len(wanted)
    for text, part in zip(sorted(found), sorted(wanted), strict=True):
        assert re.search(part, text), text


@pytest.mark.parametrize("line", OF_STAGES)
def test_stages(line: str) -> None:
    found = [str(error) for error in undivided(read(line), SIZES, None)]
    assert (OF_STAGES[line] in found[0]) if found else OF_STAGES[line] == ""
    assert len(found) <= 1
