"""While a rollout is trained on, the host waits for the device only where tests/support/allowed_waits.py says so.

Every family and kind of loss, layouts, pipeline stages with and without the loss, on a device that knows shapes alone
(hpcrl/planning/rehearsal/device.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.transport.share_format import SampleBatch
from tests.support import allowed_waits, families
from tests.support.allowed_waits import ALLOWED, Wait
from tests.support.ranks import on_fake_device
from tests.support.trained_on_fake import Waits, trained
from tests.trainer.step import test_invariance as whole
from tests.trainer.step import test_routing_replay as replay
from tests.trainer.test_critic import PPO

pytestmark = pytest.mark.process

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ETP1 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


MET: set[Wait] = set()  #: of the allowed ones
RAN: set[str] = set()  #: node ids of tests


def check(waits: Waits) -> None:
    """Fail with the line of every wait that is not allowed, or not so often."""
    MET.update(allowed_waits.check(waits, ALLOWED))


@pytest.fixture(scope="module", autouse=True)
def every_wait_is_met(request: pytest.FixtureRequest) -> Iterator[None]:
    """An entry that nothing meets would let a new wait pass: looked at when all of this module has run."""
    yield
    allowed_waits.check_all_met(request, RAN, MET, ALLOWED)


@pytest.fixture(autouse=True)
def ran(request: pytest.FixtureRequest) -> None:
    RAN.add(request.node.nodeid)


KINDS = sorted(
    {"distill sampled", "distill reverse", "distill forward", "grpo", "gspo", "reinforce++", "kl loss", "gmpo", "sapo"}
    & (whole.EVERY | whole.FURTHER).keys()
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": whole.VOCAB, "num_hidden_layers": 4}
    return {kind: families.make(root / kind, kind, **sizes) for kind in families.SIZES}


def options(model: Path, n: int = 1, **values: Any) -> Options:
    return whole.options(model, n, **{"clip_grad": 1.0, "micro_batch_size": 8, **values})


def alike() -> SampleBatch:
    """The batch with responses of one length."""
    from tests.support.shares import plain_sample

    made = [
        plain_sample(
            9,
            11,
            group_index=i // 4,
            response_index=i % 4,
            reward=float(i % 3),
            tokens=np.arange(20, dtype=np.int32) + i,
        )
        for i in range(whole.SAMPLES)
    ]
    return SampleBatch.from_samples(made)


@pytest.mark.parametrize("kind", families.one_of_each_kind(families.SIZES))
def test_no_layer_of_a_family_waits(models: dict[str, Path], kind: str) -> None:
    """Forward and backward, in a pass of old log-probs and in the step; every second one recomputes its layers."""
    odd = sorted(families.SIZES).index(kind) % 2
    fields = {"megatron": whole.RECOMPUTE["uniform"]} if odd else {"num_steps_per_rollout": 2}
    check(on_fake_device(trained, options(models[kind], **fields)))


@pytest.mark.parametrize("loss", KINDS)
def test_no_loss_waits(models: dict[str, Path], loss: str) -> None:
    fields = (whole.EVERY | whole.FURTHER)[loss]
    if loss in whole.WITH_TEACHER:
        fields = fields | {"opd_teacher_load": str(models["qwen2"])}
    check(on_fake_device(trained, options(models["qwen2"], **fields)))


def test_neither_do_pairs_nor_a_critic(models: dict[str, Path]) -> None:
    dpo = {"loss_type": "dpo_loss", "dpo_beta": 0.1, "ref_load": str(models["qwen2"]), "n_samples_per_prompt": 2}
    check(on_fake_device(trained, options(models["qwen2"], **dpo), 0, whole.pairs()))
    check(on_fake_device(trained, options(models["qwen2"], **PPO)))


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 sp": ("glm4", 2, SP),
    "cp2": ("glm4", 2, {"context_parallel_size": 2}),
    "tp2 sp cp2 dp2": ("qwen3", 8, SP | {"context_parallel_size": 2}),
    "tp2 sp ep2 etp1": ("glm4_moe", 4, SP | ETP1),
    "ep4": ("qwen3_moe", 4, {"expert_model_parallel_size": 4}),
}
PP2 = {"pipeline_model_parallel_size": 2}
STAGES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp2": ("qwen3", 2, PP2),
    "pp2 alone": ("qwen3", 2, PP2 | {"megatron": {"use_distributed_optimizer": False}}),
    "pp2 vpp2 recompute": (
        "glm4",
        2,
        PP2 | {"num_virtual_stages_per_pipeline_rank": 2, "megatron": whole.RECOMPUTE["uniform"]},
    ),
    "tp2 sp pp2 ep2 etp1 experts": ("glm4_moe", 4, SP | ETP1 | PP2 | {"num_steps_per_rollout": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_waits(models: dict[str, Path], layout: str) -> None:
    """The last rank of each."""
    kind, n, fields = LAYOUTS[layout]
    opts = options(models[kind], n, **fields | {"micro_batch_size": 2})
    check(on_fake_device(trained, opts, n - 1, alike()))


@pytest.mark.parametrize("stage", ["first", "last"])
@pytest.mark.parametrize("layout", STAGES)
def test_neither_does_a_pipeline_stage(models: dict[str, Path], layout: str, stage: str) -> None:
    """With the loss and without it; what a stage is told of the loss comes from host to host."""
    kind, n, fields = STAGES[layout]
    opts = options(models[kind], n, **fields | {"micro_batch_size": 2})
    check(on_fake_device(trained, opts, 0 if stage == "first" else n - 1, alike()))


@pytest.mark.parametrize("kind", families.one_of_each_kind(families.EXPERTS))
def test_replay_of_experts_waits_for_nothing(tmp_path: Path, kind: str) -> None:
    """Neither the engine's experts nor those of the old policy's pass, recomputed or not, cost a wait."""
    model = families.make(tmp_path / kind, kind, odd=True, num_hidden_layers=4)
    recompute = whole.RECOMPUTE["uniform"] if kind == families.EXPERTS[0] else {}
    old = options(model, use_routing_replay=True, num_steps_per_rollout=2, megatron=recompute)
    check(on_fake_device(trained, old, 0, replay.data_of(kind)))
    check(on_fake_device(trained, options(model, **replay.R3, megatron=recompute), 0, replay.data_of(kind)))
