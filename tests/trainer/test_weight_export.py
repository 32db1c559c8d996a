"""The weights of ranks on their way out, as rank 0 directs them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from tests.support.ranks import run_ranks
from tests.support.tiny import make_model

pytestmark = pytest.mark.process


def rank_side(options: Options) -> tuple[list[str], list[str], int]:
    """One rank: names as they are held and as they are exported, and how many it saw of an export that rank 0 gave
    up."""
    from hpcrl.trainer.collectives import make_patient
    from hpcrl.trainer.megatron.hf_weights import export
    from hpcrl.trainer.megatron.model import build
    from hpcrl.trainer.parallel_state import initialize
    from hpcrl.trainer.weight_export import WeightExporter

    policy = build(options, initialize(options))
    exporter = WeightExporter(policy, make_patient(options), "127.0.0.1", None)
    held = list(exporter.describe()[0])
    stream = exporter.stream()
    seen = 0
    if policy.ranks.rank == 0:
        seen = len(list(islice(stream.gathered(), 3)))
        stream.finish_update()
    else:
        stream.follow()
    return held, [name for name, _ in export(policy)], seen


@pytest.mark.parametrize("layout", ["pipeline_model_parallel_size", "tensor_model_parallel_size"])
def test_an_export_that_is_given_up_lets_all_ranks_go(layout: str, tmp_path: Path) -> None:
    """It is collective, so rank 0 goes through it to its end; its order is that of what is held, also where the last
    stage repeats a tied embedding, so that a plan made of the one can be served from the other."""
    model = make_model(tmp_path / "model", tied=True)
    options = Options(hf_checkpoint=str(model), bf16=False, actor_num_gpus_per_node=2, **{layout: 2})
    found = run_ranks(2, rank_side, options, timeout=60)
    assert all(held == exported for held, exported, _ in found)
    assert [seen for *_, seen in found] == [3, 0]


def test_an_export_that_nobody_began_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where members do not come together rank 0 has the export in its hand, and no rank is in it."""
    from hpcrl.trainer.weight_export import WeightStream

    said: list[str] = []
    monkeypatch.setattr(WeightStream, "_say", lambda _, word, what=None: said.append(word))
    stream = WeightStream(None)  # type: ignore[arg-type]
    stream.gathered()
    stream.finish_update()
    stream.finish_update()
    assert said == ["end"]
