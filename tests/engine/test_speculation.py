"""Speculative decoding and weight updates: the policy's tokens and log-probs, whatever a draft has proposed; and the
layer that drafts, which an update brings."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config.slime.arguments import translate
from hpcrl.errors import HpcrlError
from hpcrl.models.files.config_json import read_config
from hpcrl.models.routing import Routing, find_routing
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.weights.comparison import digest
from tests.engine.test_sampling_route import TOKENS, Job, endless, run
from tests.support.engines import CLOSE, LONG, PROMPT, SMALL, Side, generate
from tests.support.forked_engines import Nursery
from tests.support.mtp_models import MAKERS, make_glm, make_mimo
from tests.support.tiny import make_family

pytestmark = pytest.mark.vllm

#: what slime's scripts of GLM-4.5 and later give
EAGLE = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 --sglang-speculative-eagle-topk 1"
EAGLE += " --sglang-speculative-num-draft-tokens 3"
DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{which}_tokens_total" for which in ("draft", "accepted"))


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


def experts_of_lengths(routing: Routing) -> Job:
    """[(experts of prompt and response, those where all of it is a prompt)] of responses of several lengths."""

    async def job(generator: EngineClient, _: EnginePool) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for length in range(4, 16):
            how = endless(length, temperature=0.0, routing=routing)
            drafted = await generator.complete(TOKENS, how, None, 0)
            whole = np.concatenate([TOKENS, drafted.tokens])[:-1]
            read = await generator.complete(whole, endless(1, temperature=0.0, routing=routing), None, 0)
            assert drafted.experts is not None and read.experts is not None
            found.append((drafted.experts, read.experts))
        return found

    return job


def test_drafts_change_no_token_and_no_logprob(nursery: Nursery, tmp_path: Path) -> None:
    """Greedy responses, of an engine whose drafting layer stays that of its files; and their experts, to the last token
    that was read, are those of a pass that drafts nothing."""
    model = with_draft_layer(tmp_path / "model")
    told = translate(EAGLE.split())
    engines = nursery.engines(
        tmp_path / "run",
        model,
        check_weight_update_equal=True,
        update_weight_buffer_size=SMALL,
        use_rollout_routing_replay=True,
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
    assert counted(side, DRAFTED) > 200
    assert counted(side, ACCEPTED) > 10
    for drafted, read in run(engines, experts_of_lengths(find_routing(engines.options, read_config(model)))):
        np.testing.assert_array_equal(drafted, read)
    side.close()
    assert engines.stop() == [0]


def test_a_model_type_that_transformers_lacks(nursery: Nursery, tmp_path: Path) -> None:
    """MiMo is Qwen2 but for the layer that predicts a further token, of which an engine that does not draft gets
    nothing; its own code is not run."""
    engines = nursery.engines(
        tmp_path / "run",
        make_mimo(tmp_path / "mimo"),
        mtp_num_layers=1,
        check_weight_update_equal=True,
        update_weight_buffer_size=SMALL,
    )
    side = Side(engines, make_family(tmp_path / "qwen2", "qwen2"))
    for _ in range(2):
        assert side.distance() <= CLOSE
        side.step()
    side.close()
    assert engines.stop() == [0]


MADE = {
    "qwen2": (make_mimo, "shm"),
    "glm4_moe": (make_glm, "disk"),
    "deepseek_v3": (partial(make_glm, family="deepseek_v3"), "gloo"),
    "glm4_moe_lite": (MAKERS["glm4_moe_lite"], "shm"),
}


@dataclass
class Drafting:
    """An engine that drafts with a layer which updates bring, and the layer's tensors as its files have them."""

    side: Side
    heads: dict[str, torch.Tensor]

    def push(self, heads: dict[str, torch.Tensor]) -> None:
        self.side.push([*self.side.reference.pairs(), *heads.items()])

    def share(self, prompts: int) -> tuple[list[dict[str, Any]], float]:
        """Sampled responses at temperature 1, and what share of the drafts was accepted."""
        address = self.side.engines.address()
        before = [counted(self.side, name) for name in (ACCEPTED, DRAFTED)]
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda seed: generate(address, PROMPT, 48, seed=seed), range(prompts)))
        accepted, drafted = (
            counted(self.side, name) - old for name, old in zip((ACCEPTED, DRAFTED), before, strict=True)
        )
        return found, accepted / drafted


def heads_of(model: Path, plain: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's layer for further tokens, without the copies of the model's own."""
    known = load_file(plain / "model.safetensors")
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    found = load_file(model / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if name not in known and not name.endswith(copies)}


@pytest.fixture(scope="module", params=MADE)
def drafting(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    make, transfer = MADE[request.param]
    root = tmp_path_factory.mktemp(request.param)
    model, plain = make(root / "model"), make_family(root / "plain", request.param)
    engines = nursery.engines(
        root / "run",
        model,
        check_weight_update_equal=True,
        update_weight_buffer_size=SMALL,
        weight_transfer=transfer,
        mtp_num_layers=1,
        vllm={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    )
    side = Side(engines, plain)
    with torch.no_grad():
        side.reference.model.lm_head.weight.mul_(6.0)  # of the likeliest token a fifth, so that a temperature shows
    yield Drafting(side, heads_of(model, plain))
    side.close()
    assert engines.stop() == [0]


def test_updates_bring_the_drafting_layer(drafting: Drafting) -> None:
    """Bit for bit, next to the model's; one of its tensors left out is refused by name."""
    side, fleet = drafting.side, drafting.side.sender.fleet
    assert fleet is not None
    [[manifest]] = fleet.call("asking", "hpcrl_manifest")
    assert manifest["tensors"].keys() == dict(side.reference.pairs()).keys() | drafting.heads.keys()
    noise = torch.Generator().manual_seed(3)
    moved = {n: t + 0.1 * torch.randn(t.shape, generator=noise) for n, t in drafting.heads.items()}
    drafting.push(moved)
    assert side.distance() <= CLOSE
    old = {name: digest(tensor) for name, tensor in drafting.heads.items()}
    new = {name: digest(tensor) for name, tensor in (*side.reference.pairs(), *moved.items())}
    for expected, wrong in ((new, set()), (new | old, set(old))):
        [[told]] = fleet.call("comparing", "hpcrl_check", json.dumps({manifest["worker"]: expected}))
        assert (set(told["different"]), told["unknown"]) == (wrong, [])
    left = sorted(moved)[-1]
    with pytest.raises(HpcrlError, match=f"has not exported 1 tensors of the engines,.*{left}"):
        drafting.push({name: tensor for name, tensor in moved.items() if name != left})


@pytest.mark.parametrize("drafting", ["qwen2"], indirect=True)
def test_sampled_tokens_are_the_policys(drafting: Drafting) -> None:
    """At temperature 1, drafts accepted and not: where each token lies in the policy's own distribution, likeliest
    first, is spread evenly over 20 bins: chi-square at most 60 (one time in 300,000 it is more by chance), which a
    temperature of 1.1 exceeds.  Log-probs are the policy's, and drafts come from the layer that was sent last."""
    side = drafting.side
    drafting.push(copying(drafting.heads))
    found, share = drafting.share(100)
    assert max(side.reference.distance(PROMPT, one) for one in found[:10]) <= CLOSE
    tokens = torch.tensor([one["token_ids"] for one in found])
    with torch.no_grad():
        whole = torch.cat([torch.tensor(PROMPT).repeat(len(tokens), 1), tokens], 1)
        logits = side.reference.model(whole).logits[:, len(PROMPT) - 1 : -1].double()
    assert chi_square(logits, tokens) < 60 < chi_square(logits / 1.1, tokens)
    drafting.push(drafting.heads)
    assert share > 0.03 and share > 3 * drafting.share(30)[1]


def copying(heads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """MiMo's layer so that it says of the next token what the policy said of the last one."""
    found = {name: torch.ones_like(tensor) if "norm" in name else tensor for name, tensor in heads.items()}
    for name, tensor in found.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = torch.zeros_like(tensor)
        elif name.endswith("input_proj.weight"):
            found[name] = torch.eye(*tensor.shape)  # of its columns those of the hidden states come first
    return found


def chi_square(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Of the tokens' places in their distributions, [n, length, vocabulary], over 20 bins."""
    chances = logits.softmax(-1)
    own = chances.gather(2, tokens[:, :, None])
    even = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    places = (chances * (chances > own)).sum(-1) + own[..., 0] * even
    counts = torch.histc(places, 20, 0, 1)
    each = tokens.numel() / 20
    return float(((counts - each) ** 2 / each).sum())
