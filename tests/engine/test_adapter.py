"""An engine that gets an adapter alone: it computes what the merged weights compute in transformers, under the version
that it says, and what is left out or added twice is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.errors import HpcrlError
from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.lora.matrices import adapted, lora_name
from hpcrl.models.lora.settings import lora_settings
from hpcrl.weights.sender import Differs
from tests.engine.test_updates_and_ends import metric
from tests.support.engines import LONG, PROMPT, Engines, Pairs, Reference, Trainer, generate
from tests.support.forked_engines import Nursery
from tests.support.tiny import make_family, make_model

pytestmark = pytest.mark.vllm

NEAR = 1e-5  #: of log-probs
LORA: dict[str, Any] = {"lora_rank": 8, "lora_alpha": 12, "check_weight_update_equal": True}


class AdapterSide:
    """An engine, the sender to it, its base in transformers, and the adapter that both should have."""

    def __init__(self, engines: Engines, model: Path) -> None:
        self.engines = engines
        self.options = engines.options
        self.reference = Reference(model)
        self.base = {name: p.detach().clone() for name, p in self.reference.model.named_parameters()}
        config = read_config(model)
        settings = lora_settings(self.options)
        assert settings is not None
        self.scale, self.rank = settings.scale, settings.rank
        self.matrices = adapted(find_family(config, model).tensors(config), settings)
        self.trainer = Trainer(engines)
        self.version = 0

    def adapter(self, seed: int) -> Pairs:
        """Random A and B, which the base of transformers has added in from then on, as they are sent."""
        chance = torch.Generator().manual_seed(seed)
        sent: dict[str, torch.Tensor] = {}
        for weight in (m.base.hf[part] for m in self.matrices for part in m.parts):
            a, b = (lora_name(weight, which) for which in "AB")
            if a in sent or weight not in self.base:
                continue
            rows, columns = self.base[weight].shape
            sent[a] = torch.randn(self.rank, columns, generator=chance) / columns**0.5
            sent[b] = self.scale * torch.randn(rows, self.rank, generator=chance) / 16
            self.reference.model.get_parameter(weight).data.copy_(self.base[weight] + sent[b] @ sent[a])
        return list(sent.items())

    def push(self, pairs: Pairs) -> dict[str, float]:
        self.version += 1
        return self.trainer.push(pairs, self.version)

    def distance(self, prompt: list[int] = PROMPT, **sampling: Any) -> float:
        answer = generate(self.engines.address(), prompt, 24, **sampling)
        assert {span["version"] for span in answer["weight_versions"]} == {str(self.version)}
        return self.reference.distance(prompt, answer)


@pytest.fixture
def side(request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path) -> Iterator[AdapterSide]:
    family, fields = request.param
    model = make_model(tmp_path / "model") if family == "qwen3" else make_family(tmp_path / "model", family)
    engines = nursery.engines(tmp_path / "run", model, **LORA | fields)
    side = AdapterSide(engines, model)
    yield side
    side.trainer.close()
    assert engines.stop() == [0]


QWEN3: tuple[str, dict[str, Any]] = ("qwen3", {})


@pytest.mark.soak
@pytest.mark.parametrize("side", [QWEN3, ("qwen2", {}), ("glm4", {})], indirect=True, ids=lambda case: case[0])
def test_log_probs_are_those_of_merged_weights(side: AdapterSide) -> None:
    pairs = side.adapter(1)
    assert {name.split(".")[-3] for name, _ in pairs} >= {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
    side.push(pairs)
    assert side.distance() < NEAR
    assert side.distance(LONG) < NEAR
    side.push(side.adapter(2))
    assert side.distance(LONG) < NEAR, "a prefix was kept from before the update"


def spoiled(pairs: Pairs, fault: str) -> Pairs:
    """What a careless sender would send in the place of `pairs`."""
    found = dict(pairs)
    if fault == "no up_proj":  # left as it was, which nothing says
        for name in found:
            if ".up_proj." in name:
                found[name] = torch.zeros_like(found[name])
    elif fault == "twice":  # once for each tensor-parallel rank
        for name in found:
            if name.endswith("lora_B.weight"):
                found[name] = 2 * found[name]
    elif fault == "no scale":
        for name in found:
            if name.endswith("lora_B.weight"):
                found[name] = found[name] / 1.5
    return list(found.items())


@pytest.mark.parametrize("side", [QWEN3], indirect=True, ids=["qwen3"])
def test_what_is_not_whole_is_found(side: AdapterSide) -> None:
    pairs = side.adapter(1)
    side.push(pairs)
    for fault in ("no up_proj", "twice", "no scale"):
        side.push(spoiled(pairs, fault))
        assert side.distance() > 100 * NEAR, fault
    side.push(pairs)
    assert side.distance() < NEAR
    name = pairs[-1][0]
    with pytest.raises(HpcrlError, match=f"has not exported 1 tensors.*{name}"):
        side.push(pairs[:-1])
    fused = [(name.replace("gate_proj", "gate_up_proj"), tensor) for name, tensor in pairs]
    with pytest.raises(HpcrlError, match="gate_up_proj"):
        side.push(fused)
    fleet = side.trainer.sender.fleet
    assert fleet is not None
    fleet.call("spoiling", "load_twice")
    with pytest.raises(Differs, match="not what was sent"):
        side.push(side.adapter(3))
    for name in (pairs[0][0], next(name for name, _ in pairs if ".up_proj.lora_B" in name)):
        fleet.call("spoiling", "leave_out", name)
        with pytest.raises(Differs, match=f"not what was sent: {name}"):
            side.push(side.adapter(4 if name == pairs[0][0] else 5))


def test_workers_have_their_parts(nursery: Nursery, tmp_path: Path) -> None:
    """Two workers that divide every matrix; what was computed of prompts under an adapter is forgotten with it."""
    model = make_model(tmp_path / "model")
    fields = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2, "actor_num_gpus_per_node": 1}
    engines = nursery.engines(tmp_path / "run", model, **LORA | fields | {"lora_type": "canonical_lora"})
    side = AdapterSide(engines, model)
    for seed in range(2):
        side.push(side.adapter(seed))
        hits = metric(engines.address(), "prefix_cache_hits_total")
        assert side.distance(LONG) < NEAR and metric(engines.address(), "prefix_cache_hits_total") == hits
        assert side.distance(LONG) < NEAR and metric(engines.address(), "prefix_cache_hits_total") > hits
    side.trainer.close()
    assert engines.stop() == [0]
