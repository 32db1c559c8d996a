"""Which ranks are rehearsed, with which micro-batches, and what is said of their memory: pure functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import DataDependentOutputException

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.models.family import find_family
from hpcrl.planning.fake_libraries.transformer_engine import FusedAdam
from hpcrl.planning.formulas.engine_memory import EngineTerms
from hpcrl.planning.rehearsal.batch import SHORTEST, micro_batches, rehearsed, share_of
from hpcrl.planning.rehearsal.engine_section import cache_line, of_cache
from hpcrl.planning.rehearsal.library_errors import explained, flags_of, refused
from hpcrl.planning.rehearsal.problems import findings, lines, unshown
from hpcrl.planning.rehearsal.ranks import boundaries, distinct, like, named, stages
from hpcrl.planning.rehearsal.reports import EngineReport, RankReport
from hpcrl.planning.rehearsal.site_gpu import memory_of_card, memory_of_engines
from tests.support.published_models import MODELS

LARGE: dict[str, Any] = {"actor_num_nodes": 8, "actor_num_gpus_per_node": 8, "tensor_model_parallel_size": 8}
LARGE |= {"pipeline_model_parallel_size": 4, "context_parallel_size": 2, "expert_model_parallel_size": 16}
LARGE |= {"expert_tensor_parallel_size": 1, "sequence_parallel": True, "use_dynamic_batch_size": True}
LARGE |= {
    "max_tokens_per_gpu": 16384,
    "rollout_max_response_len": 8192,
    "megatron": {"num_layers_in_last_pipeline_stage": 23},
}


def options(**fields: Any) -> Options:
    return Options(hf_checkpoint="x", bf16=True, **(LARGE | fields))


def glm() -> tuple[Any, Any]:
    config = MODELS["GLM-4.5"][1]
    return find_family(config, "GLM-4.5"), config


def test_first_and_last_rank_of_distinct_stages() -> None:
    """Stages between the ends that hold the same are rehearsed once."""
    opts = options()
    chosen = distinct(opts, *glm())
    assert chosen == [0, 15, 16, 31, 48, 63]
    assert [stages(opts)[rank] for rank in chosen] == [0, 0, 1, 1, 3, 3]


def test_boundaries_of_equal_stages() -> None:
    """Each two stages in a row have one, of the first ranks and of the last; equal stages are told by one of them."""
    opts = options()
    same = like(opts, *glm())
    assert same == [0, 1, 1, 3]
    found = boundaries(opts, same)
    assert [(b.stages, b.sender, b.to, b.receiver, b.source) for b in found[::2]] == [
        ((0, 1), 0, 16, 16, 0),
        ((1, 2), 16, 32, 16, 0),
        ((2, 3), 16, 32, 48, 32),
    ]
    assert found[1].sender == 15 and found[1].receiver == 31


def test_memory_of_a_sites_gpus(tmp_path: Path) -> None:
    """Its gpu_type says it, the smallest card of that type; a profile without one, or in vain, is an error."""
    site = tmp_path / "s.toml"
    for kind, gib in (("h100", 80.0), ("nvidia_a100", 40.0), ("h200", 141.0)):
        site.write_text(f'[trainer]\ngpu_type = "{kind}"\n')
        assert memory_of_card(None, None, str(site)) == gib
    for given in ((80.0, None), (None, "b200")):
        with pytest.raises(UsageError, match="has no effect"):
            memory_of_card(*given, str(site))
    for text in ("", "[trainer]\ngpus_per_node = 4\n", '[trainer]\ngpu_type = "voodoo2"\n'):
        site.write_text(text)
        with pytest.raises(UsageError, match="gpu_type"):
            memory_of_card(None, None, str(site))
    assert memory_of_card(24.0, None, None) == 24.0 and memory_of_card(None, "l40s", None) == 48.0


def test_memory_of_a_sites_engines(tmp_path: Path) -> None:
    """Their own gpu_type says it, or the trainers' where they have no nodes of their own; nodes without one are an
    error, unless no engine is there."""
    site = tmp_path / "s.toml"
    trainers = '[trainer]\ngpu_type = "h200"\n'
    apart, shared = [options(rollout_num_gpus=8)], [options(colocate=True)]
    site.write_text(trainers)
    assert memory_of_engines(apart, 141.0, str(site)) == 141.0 and memory_of_engines(apart, 24.0, None) == 24.0
    site.write_text(f'{trainers}[engine]\npartition = "small"\ngpu_type = "l40s"\n')
    assert memory_of_engines(apart, 141.0, str(site)) == 48.0
    assert memory_of_engines(shared, 141.0, str(site)) == 141.0, "on the trainers' GPUs"
    site.write_text(f'{trainers}[engine]\npartition = "small"\n')
    with pytest.raises(UsageError, match="engine"):
        memory_of_engines(apart, 141.0, str(site))
    assert memory_of_engines(shared, 141.0, str(site)) == 141.0


def test_a_cache_holds_the_longest_request() -> None:
    """vLLM refuses to start where it does not; each data-parallel part of an engine has its own.  What would fit but for
    the allowance of 3 GiB is a warning."""
    opts = options(vllm={"data_parallel_size": 2}, rollout_num_gpus=16, rollout_num_gpus_per_engine=16)
    terms = EngineTerms({"KV cache": 2**30}, 20_000, 2)
    assert opts.engine_data_parallel_size == 2
    assert not of_cache(opts, terms, EngineReport(longest=10_000))
    assert "warn" not in cache_line(opts, terms, EngineReport(longest=10_000))
    for longest in (10_001, 40_000):
        assert not of_cache(opts, terms, EngineReport(longest=longest))
        assert "warn" in cache_line(opts, terms, EngineReport(longest=longest))
    (found,) = of_cache(opts, terms, EngineReport(longest=40_001))
    assert "40,001" in found.what and "--rollout-max-context-len" in found.hint
    assert "warn" not in cache_line(opts, terms, EngineReport(longest=40_001))
    assert not of_cache(opts, terms, EngineReport(longest=40_001, absent="no vLLM"))
    none = EngineTerms({"KV cache": -4 * 2**30}, 0, 0)
    assert of_cache(opts, none, EngineReport(longest=1)) and "4.0 GiB" in cache_line(
        opts, none, EngineReport(longest=1)
    )


def test_named_ranks() -> None:
    assert named("all", options()) == list(range(64))
    assert named("5,0", options()) == [0, 5]
    for wrong in ("64", "first"):
        with pytest.raises(UsageError, match="--ranks"):
            named(wrong, options())


def test_the_longest_and_the_shortest_rows() -> None:
    """As many of the longest micro-batches as are under way at once in the pipeline, and the shortest."""
    found = micro_batches(options())
    assert len(found) == 5
    assert found[0] == [8192] * 4 and found[-1] == [SHORTEST]
    assert micro_batches(options(max_tokens_per_gpu=5000))[0] == [8192, 1808]
    assert micro_batches(options(max_tokens_per_gpu=1000))[0] == [8192], "a longer sample runs alone"
    assert micro_batches(options(use_dynamic_batch_size=False, micro_batch_size=3))[0] == [8192] * 3


def test_every_rank_gets_a_share_of_the_batch() -> None:
    """Samples of all ranks make up the table once, in groups of one size."""
    opts = options(actor_num_nodes=16, rollout_max_response_len=64, max_tokens_per_gpu=64)
    lengths = micro_batches(opts)
    small = rehearsed(opts, lengths)
    shares = [share_of(small, glm()[1], lengths, rank) for rank in range(small.data_parallel_size)]
    assert sorted(row for share in shares for row in share.own.tolist()) == list(range(small.samples_per_rollout))
    assert {tuple(share.batch.rows["length"].tolist()) for share in shares} == {
        tuple(n for micro in lengths for n in micro)
    }
    assert all(share.step_tokens == [int(sum(s.batch.loss_mask.sum() for s in shares))] for share in shares)


def report(rank: int, size: float, **fields: Any) -> RankReport:
    return RankReport(rank, peaks={"start": 1, "forward and backward": int(size * 2**30)}, **fields)


def test_memory_that_runs_out_names_rank_and_phase() -> None:
    family, config = glm()
    reports = [report(0, 40), report(15, 79)]
    (found,) = findings(options(), family, config, reports, 80.0)
    assert "rank 15" in found.what and "forward and backward" in found.what
    assert not findings(options(), family, config, reports, 141.0)
    reports[1].peaks = {"resume": 100 << 30}
    assert not findings(options(), family, config, reports, 80.0)
    assert any("resumes" in line for line in lines(options(), reports, 80.0))


def test_a_refusal_is_said_once() -> None:
    """Of ranks that meet the same refusal, and before anything else."""
    family, config = glm()
    reports = [report(rank, 200, error="Megatron refuses it", hint="--x 1") for rank in (0, 15)]
    (found,) = findings(options(), family, config, reports, 80.0)
    assert found.what.startswith("rank 0, 15") and found.hint == "--x 1"


def test_flags_of_an_assertion() -> None:
    """A flag is named as it is given, if the message or the statement names its setting."""
    opts = options(megatron={"moe_router_topk": 3}, vllm={"block_size": 7})
    assert flags_of("config.moe_router_topk < num_experts", opts) == ["--moe-router-topk 3"]
    assert flags_of("block_size", opts) == ["--vllm-block-size 7"]
    assert flags_of("tensor_model_parallel_size", opts) == ["--tensor-model-parallel-size 8"]
    try:
        raise AssertionError("moe_router_topk is odd")
    except AssertionError as error:
        what, hint = explained(error, opts)
    assert "is odd" in what and "--moe-router-topk 3" in hint


def test_a_limit_of_the_rehearsal_is_none_of_the_run() -> None:
    """What the fake device cannot say, and what this machine has not enough of."""
    for error in (MemoryError("1 GiB"), DataDependentOutputException("aten.item")):
        what, hint = explained(error, options())
        assert "refuses" not in what and type(error).__name__ in what and hint


def test_what_a_rehearsal_cannot_show() -> None:
    """What a stand-in has not, or what asks for the GPU itself, is a warning, and the other ranks are judged; what
    Megatron's classes refuse stays an error, and so does a machine that has not enough memory."""
    given = options(megatron={"fp8": "hybrid"})
    lacking = AttributeError("type object 'Format' has no attribute 'HYBRID'", name="HYBRID", obj=FusedAdam)
    for error, opts in (
        (lacking, options()),
        (AssertionError("Torch not compiled with CUDA enabled"), options()),
        (ImportError("cannot import", name="transformer_engine.pytorch.new"), options()),
        (TypeError("GroupedLinear.__init__() got an unexpected keyword argument 'x'"), options()),
        (ValueError("no recipe"), given),
    ):
        found = refused(3, error, opts)
        assert found.unshown, error
        assert not findings(opts, *glm(), [found, report(0, 40)], 80.0)
        assert findings(opts, *glm(), [found, report(0, 90)], 80.0)
        (line,) = unshown([found])
        assert line.startswith("warn: rank 3")
    assert "--fp8-format hybrid" in refused(3, ValueError("no recipe"), given).hint
    wrong = UsageError("a class refuses it")
    wrong.__cause__ = ValueError("no")
    for error in (wrong, ValueError("no"), TypeError("f() got an unexpected"), MemoryError("1 GiB")):
        assert not refused(3, error, options()).unshown, error
    assert not refused(3, wrong, given).unshown
    wrong.__cause__ = AssertionError("Torch not compiled with CUDA enabled")
    assert refused(3, wrong, options()).unshown
