"""Speculative decoding beside weight updates: the policy's tokens and log-probs, whatever a draft has proposed."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config.options import Options
from hpcrl.engine.server_settings import Build, check_drafts
from hpcrl.errors import UsageError
from hpcrl.slime.arguments import translate
from tests.support.engines import CLOSE, LONG, PROMPT, SMALL, Side, generate
from tests.support.forked_engines import Nursery
from tests.support.mtp_models import make_mimo
from tests.support.tiny import make_family

pytestmark = pytest.mark.vllm

#: what slime's scripts of GLM-4.5 and later give
EAGLE = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 --sglang-speculative-eagle-topk 1"
EAGLE += " --sglang-speculative-num-draft-tokens 3"


def with_draft_layer(directory: Path) -> Path:
    """A tiny GLM-4.5 whose checkpoint has a layer for multi-token prediction behind its last one, as the published ones
    have."""
    model = make_family(directory, "glm4_moe")
    config = json.loads((model / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    file = model / "model.safetensors"
    tensors = load_file(file)
    last = f"model.layers.{layers - 1}."
    draft = f"model.layers.{layers}."
    tensors |= {
        draft + name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)
    }
    for name in [
        name for name in tensors if name.startswith(draft) and name.endswith(("o_proj.weight", "down_proj.weight"))
    ]:
        tensors[name] *= 0.0  # it says what the policy said of the token before, which is right where one repeats
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{draft}{name}.weight"] = torch.ones(width)
    tensors[f"{draft}eh_proj.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], 1)
    tensors[f"{draft}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{draft}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return model


def counted(side: Side, name: str) -> float:
    """A counter of vLLM's."""
    address = side.engines.address()
    request = urllib.request.Request(f"http://{address.host}:{address.port}/metrics")
    request.add_header("Authorization", f"Bearer {address.key}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = re.findall(rf"^{re.escape(name)}\S* (\S+)$", answer.read().decode(), re.M)
    return sum(map(float, found))


def test_drafts_change_no_token_and_no_logprob(nursery: Nursery, tmp_path: Path) -> None:
    """Greedy responses: sampling with drafts is wrong in vLLM's CPU build, which `check_drafts` refuses in a run."""
    model = with_draft_layer(tmp_path / "model")
    told = translate(EAGLE.split())
    engines = nursery.engines(
        tmp_path / "run",
        model,
        check_weight_update_equal=True,
        update_weight_buffer_size=SMALL,
        vllm=told.values["vllm"],
    )
    side = Side(engines, model)
    for seed in (41, 42, 43):
        for prompt in (PROMPT, LONG):
            answer = generate(engines.address(), prompt, 48, temperature=0.0)
            assert side.reference.distance(prompt, answer) <= CLOSE
            logits = side.reference.model(torch.tensor([[*prompt, *answer["token_ids"]]])).logits[
                0, len(prompt) - 1 : -1
            ]
            assert answer["token_ids"] == logits.argmax(-1).tolist()
        side.push(side.reference.step(seed))
    assert counted(side, "vllm:spec_decode_num_draft_tokens_total") > 200
    assert counted(side, "vllm:spec_decode_num_accepted_tokens_total") > 10
    side.close()
    assert engines.stop() == [0]


def test_a_model_type_that_transformers_lacks(nursery: Nursery, tmp_path: Path) -> None:
    """MiMo is Qwen2 but for the layer that predicts a further token, which no update brings; its own code is not run."""
    engines = nursery.engines(
        tmp_path / "run",
        make_mimo(tmp_path / "mimo"),
        check_weight_update_equal=True,
        update_weight_buffer_size=SMALL,
    )
    side = Side(engines, make_family(tmp_path / "qwen2", "qwen2"))
    for _ in range(2):
        assert side.distance() <= CLOSE
        side.step()
    side.close()
    assert engines.stop() == [0]


def test_drafts_on_a_cpu_are_refused_in_a_run() -> None:
    options = Options(vllm=translate(EAGLE.split()).values["vllm"])
    with pytest.raises(UsageError, match="--vllm-speculative-config: vLLM's CPU build samples"):
        check_drafts(options, Build("0.32.0", True))
    check_drafts(options, Build("0.32.0", False))
