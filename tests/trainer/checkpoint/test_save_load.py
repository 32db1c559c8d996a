"""Checkpoints: another layout goes on as the first would have, a crash loses nothing, and what does not fit is
named."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config.options import Options
from hpcrl.errors import DataError, HpcrlError
from hpcrl.models.convert.to_fp8 import convert
from hpcrl.models.files.fp8 import Scheme
from hpcrl.trainer.rollout_calls import ShareExchange
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import gone
from tests.support.tiny import make_family, make_model
from tests.trainer.step.test_invariance import VOCAB, batch, shares, start

pytestmark = pytest.mark.process

STEPS, BEFORE = 20, 10  #: all steps, and those before the checkpoint
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
}
EP2 = (2, {"expert_model_parallel_size": 2})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model whose vocabulary TP 2 must pad, and one with experts, untied."""
    root = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    dense = make_model(root / "dense", tied=True, vocab_size=VOCAB, **small)
    return {
        "dense": dense,
        "moe": make_family(root / "moe", "qwen3_moe", vocab_size=VOCAB, **small | {"moe_intermediate_size": 16}),
    }


def options(model: Path, n: int = 1, **values: Any) -> Options:
    values = {
        "lr": 3e-3,
        "lr_decay_style": "cosine",
        "lr_decay_iters": 30,
        "weight_decay": 0.1,
        "max_logprob_diff": 100.0,
    } | values
    values |= {"loss_type": "sft_loss", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 200, "adam_eps": 1e-4}
    return Options(hf_checkpoint=str(model), bf16=False, actor_num_gpus_per_node=n, **values)


# ---- on the ranks


def losses(policy: Any, opts: Options, steps: int) -> list[float]:
    """Losses of training on the same batch again and again."""
    from hpcrl.trainer.step import train_batch

    mine = ShareExchange(policy.ranks).exchange(shares(opts, batch().select(range(8)))[policy.ranks.dp_rank])
    return [train_batch.train(policy, policy.ranks, opts, mine)["train/loss"] for _ in range(steps)]


def train_and_save(every: list[tuple[Options, Path]]) -> list[list[float]]:
    """Of each model, in one layout: BEFORE steps, a checkpoint, and the other steps."""
    from hpcrl.trainer.checkpoint.save_load import Position, save

    ranks, found = None, []
    for opts, directory in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        first = losses(policy, opts, BEFORE)
        save(policy, ranks, directory, Position(BEFORE, BEFORE, {"prompt": 7}), "run")
        found.append(first + losses(policy, opts, STEPS - BEFORE))
    return found


def go_on(every: list[tuple[Options, Path]], steps: int = STEPS - BEFORE) -> list[Any]:
    """Losses of going on from each checkpoint, in one layout; or the error."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.megatron import model

    ranks, found = None, []
    for opts, directory in every:
        policy = model.build(opts, ranks or parallel_state.initialize(opts))
        ranks = policy.ranks
        try:
            at = save_load.load_checkpoint(policy, ranks, save_load.latest(directory), "run", opts.verify_checkpoint)
        except HpcrlError as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        assert (at.rollout_id, at.version, at.data) == (BEFORE, BEFORE, {"prompt": 7})
        found.append(losses(policy, opts, steps))
    return found


def asked_of_megatron(opts: Options, directory: str) -> list[dict[str, Any]]:
    """What a release that knows several ways to save in the background is asked, and one that knows its own alone."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import save_load

    parallel_state.initialize(opts)
    asked: list[dict[str, Any]] = []

    def newer(state: Any, path: str, strategy: Any, async_strategy: str = "nvrx", **how: Any) -> None:
        asked.append({"async_strategy": async_strategy, **how})

    def older(state: Any, path: str, strategy: Any, **how: Any) -> None:
        asked.append(how)

    for release in (newer, older):
        save_load.dist_checkpointing.save = release
        save_load.plan({}, Path(directory))
    return [{name: value for name, value in how.items() if name != "content_metadata"} for how in asked]


def test_background_save_needs_no_package(tmp_path: Path, models: dict[str, Path]) -> None:
    """Megatron-core's default from 0.17 on is that of nvidia-resiliency-ext."""
    newer, older = run_ranks(1, asked_of_megatron, options(models["dense"]), str(tmp_path))[0]
    assert newer == {"async_strategy": "mcore", "async_sharded_save": True} and older == {"async_sharded_save": True}


# ---- another layout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, tuple[Path, list[float]]]:
    """(checkpoints, losses) of a run of each model in several layouts."""
    root, found = tmp_path_factory.mktemp("saved"), {}
    for (n, layout), names in (
        (LAYOUTS["one rank"], {"one rank": "dense", "moe": "moe"}),
        (LAYOUTS["tp2"], {"tp2": "dense"}),
        (EP2, {"moe ep2": "moe"}),
    ):
        every = [(options(models[model], n, **layout), root / name.replace(" ", "-")) for name, model in names.items()]
        for name, (_, directory), went in zip(names, every, run_ranks(n, train_and_save, every)[0], strict=True):
            found[name] = (directory, went)
            assert went[-1] < went[0] - 0.01, "twenty steps teach it something"
    return found


@pytest.mark.parametrize("layout", ["one rank", "tp2", "pp2", "dp2", "cp2"])
def test_another_layout_goes_on_as_the_first_would(models: dict[str, Path], saved: dict[str, Any], layout: str) -> None:
    n, values = LAYOUTS[layout]
    names = ["one rank", "tp2"] if layout in ("one rank", "pp2") else ["one rank"]
    every = [(options(models["dense"], n, **values), saved[name][0]) for name in names]
    for name, found in zip(names, run_ranks(n, go_on, every)[0], strict=True):
        assert found == pytest.approx(saved[name][1][BEFORE:], rel=1e-5), name


def test_expert_parallelism_comes_and_goes(models: dict[str, Path], saved: dict[str, Any]) -> None:
    """Experts have an optimizer of their own only where they are spread over ranks."""
    for n, values in (LAYOUTS["one rank"], EP2):
        every = [(options(models["moe"], n, **values), saved[name][0]) for name in ("moe", "moe ep2")]
        for name, found in zip(("moe", "moe ep2"), run_ranks(n, go_on, every)[0], strict=True):
            assert found == pytest.approx(saved[name][1][BEFORE:], rel=1e-5), (name, values)


def test_dense_stage_and_expert_stage(tmp_path: Path) -> None:
    """Its rank has an optimizer for experts as the others have, but nothing in it; and it is rank 0 that writes the
    common part."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "moe_intermediate_size": 16}
    model = make_family(tmp_path / "model", "glm4_moe", vocab_size=VOCAB, **sizes, first_k_dense_replace=1)
    layout = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    saved = tmp_path / "saved"
    went = run_ranks(4, train_and_save, [(options(model, 4, **layout), saved)])[0][0]
    assert went[-1] < went[0] - 0.01
    for n, values in ((4, layout), (1, {})):
        assert run_ranks(n, go_on, [(options(model, n, **values), saved)])[0][0] == pytest.approx(
            went[BEFORE:], rel=1e-5
        ), n


def test_parameters_count_their_own_steps(models: dict[str, Path], saved: dict[str, Any]) -> None:
    """Megatron gives all of them one tensor, which Adam would count up once for each: its bias correction would be
    wrong."""
    assert run_ranks(1, steps_after_loading, options(models["dense"]), saved["one rank"][0])[0] == {float(BEFORE + 2)}


def steps_after_loading(opts: Options, directory: Path) -> set[float]:
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import optimizer_shards, save_load
    from hpcrl.trainer.megatron import model

    policy = model.build(opts, parallel_state.initialize(opts))
    save_load.load_checkpoint(policy, policy.ranks, save_load.latest(directory), "run")
    losses(policy, opts, 2)
    return {
        float(state["step"])
        for adam in optimizer_shards._torch_adams(policy.optimizer)
        for state in adam.state.values()
    }


# ---- other readers


def test_megatron_core_alone_reads_it(models: dict[str, Path], saved: dict[str, Any]) -> None:
    """A plain GPTModel of Megatron's own spec, loaded by dist_checkpointing: the weights that we would export."""
    path = saved["one rank"][0] / f"iter_{BEFORE:07d}"
    found, args = run_ranks(1, read_with_megatron_alone, options(models["dense"]), path)[0]
    ours = run_ranks(1, exported, options(models["dense"]), saved["one rank"][0])[0]
    assert torch.equal(found["embedding.word_embeddings.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(found["decoder.layers.1.mlp.linear_fc2.weight"], ours["model.layers.1.mlp.down_proj.weight"])
    assert args == {"iteration": BEFORE, "num_layers": 2, "tensor_model_parallel_size": 1, "no_save_optim": False}


def read_with_megatron_alone(opts: Options, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from hpcrl.trainer import parallel_state

    parallel_state.initialize(opts)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    rope = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}
    model = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=64, **rope)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path))
    model.load_state_dict(state["model"], strict=False)
    names = ("num_layers", "tensor_model_parallel_size", "no_save_optim")
    args = {name: getattr(state["args"], name) for name in names}
    return dict(model.state_dict()), {"iteration": state["iteration"], **args}


def exported(opts: Options, directory: Path) -> dict[str, torch.Tensor]:
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.megatron import hf_weights, model

    policy = model.build(opts, parallel_state.initialize(opts))
    save_load.load_weights(policy, policy.ranks, save_load.latest(directory))
    return {name: tensor.clone() for name, tensor in hf_weights.export(policy)}


# ---- where a run begins


def begin_each(every: list[Options], checkpoints: list[Path]) -> list[Any]:
    """(position, what was said, the first weights) of beginning with each of the options; or the error."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint.resume import restore
    from hpcrl.trainer.megatron import model

    ranks, found = None, []
    for opts, directory in zip(every, checkpoints, strict=True):
        policy = model.build(opts, ranks or parallel_state.initialize(opts))
        ranks = policy.ranks
        try:
            at, said, _ = restore(policy, ranks, opts, directory, "mine")
        except HpcrlError as error:
            found.append(str(error))
            continue
        found.append((at.rollout_id, said, float(next(policy.modules[0].parameters()).sum())))
    return found


def save_two(opts: Options, directory: Path) -> list[float]:
    """Checkpoints 1 and 2 with all weights 1 and 2; the sums of the first parameter."""
    from hpcrl.trainer.checkpoint.save_load import Position, save

    policy, sums = start(opts), []
    for number in (1, 2):
        for parameter in policy.modules[0].parameters():
            parameter.data.fill_(number)
        policy.optimizer.reload_model_params()
        save(policy, policy.ranks, directory, Position(number, number), "other")
        sums.append(float(next(policy.modules[0].parameters()).sum()))
    return sums


@pytest.mark.core
def test_where_a_run_begins(tmp_path: Path, models: dict[str, Path]) -> None:
    model = models["dense"]
    other = tmp_path / "other"
    empty = tmp_path / "empty"
    hf = tmp_path / "hf"
    empty.mkdir()
    one, two = run_ranks(1, save_two, options(model), other)[0]
    shutil.copytree(model, hf)
    save_file(
        {n: torch.full_like(t, 3) for n, t in load_file(hf / "model.safetensors").items()}, hf / "model.safetensors"
    )
    three = 1.5 * two
    megatron_lms = shutil.copytree(other, tmp_path / "megatron-lm")  # no hpcrl.json, and a release beside the steps
    for path in megatron_lms.glob("*/hpcrl.json"):
        path.unlink()
    released = shutil.copytree(megatron_lms, tmp_path / "released")
    (released / "iter_0000001").rename(released / "release")
    (released / "latest_checkpointed_iteration.txt").write_text("release\n")
    quantised = tmp_path / "fp8"
    convert(model, quantised, Scheme("block", (32, 32)))
    fp8 = {"hf_checkpoint": quantised}
    run = tmp_path / "run"
    (run / "last").mkdir(parents=True)
    (run / "last" / "options.json").write_text(Options(save=str(other)).model_dump_json())
    (run / "first").mkdir()
    (run / "first" / "options.json").write_text("{}")  # a stage that has saved nothing
    cases: list[tuple[dict[str, Any], Path, tuple[int, float] | str]] = [
        ({"load": run}, empty, (0, two)),
        ({"load": run / "last", "ckpt_step": 1}, empty, (0, one)),
        (fp8, empty, f"{quantised} holds quantised weights (model.layers.0."),
        (fp8, empty, "with --ref-load or --load; --hf-checkpoint may stay"),
        (fp8 | {"ref_load": hf}, empty, (0, three)),
        (fp8 | {"load": other}, empty, (0, two)),
        ({"load": other}, empty, (0, two)),
        ({"load": other, "ckpt_step": 1}, empty, (0, one)),
        ({"load": other / "iter_0000001"}, empty, (0, one)),
        ({"load": megatron_lms}, empty, (0, two)),
        ({"load": released}, empty, (0, one)),
        ({"load": hf}, empty, (0, three)),
        ({"ref_load": hf}, empty, (0, three)),
        ({"ref_load": other}, empty, (0, two)),
        ({"load": empty, "ref_load": other}, empty, (0, two)),
        ({"load": tmp_path / "nowhere", "ref_load": other, "ckpt_step": None}, empty, (0, two)),
        ({"load": other, "ref_load": hf}, empty, (0, two)),
        ({"load": other}, other, (2, two)),  # --load and --save name one directory: go on, whoever saved it
        ({"load": other, "ckpt_step": 1}, other, (1, one)),
        ({}, other, "was saved by another run"),
        ({"load": other, "ckpt_step": 9}, empty, f"--load {other} has no step 9; steps there: 1, 2"),
        (
            {"load": empty},
            tmp_path / "x",
            f"--load {empty} holds no latest_checkpointed_iteration.txt and no config.json",
        ),
        ({"ref_load": empty}, empty, f"--ref-load {empty} holds no"),
    ]
    every = []
    for values, _, _ in cases:
        given = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        every.append(options(given.pop("hf_checkpoint", model), **given))
    answers = run_ranks(1, begin_each, every, [directory for _, directory, _ in cases])[0]
    for (values, _, wanted), found in zip(cases, answers, strict=True):
        if isinstance(wanted, str):
            assert wanted in found, (values, found)
        else:
            assert (found[0], found[2]) == pytest.approx(wanted), (values, found)


# ---- what does not fit


def test_checkpoint_of_another_model(tmp_path: Path, models: dict[str, Path], saved: dict[str, Any]) -> None:
    """A checkpoint of another model is named on every rank."""
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": VOCAB}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"num_hidden_layers": 4}, r"is \[2, .*\], the model's is \[4, "),
        (
            {"intermediate_size": 64},
            r"decoder.layers.mlp.linear_fc1.weight is \[2, 96, 32\], the model's is \[2, 128, 32\]",
        ),
        ({"vocab_size": 150}, r"embedding.word_embeddings.weight is \[131, 32\], the model's is \[150, 32\]"),
        ({"tied": False}, "has no output_layer.weight"),
    ]
    layout = {"pipeline_model_parallel_size": 2}
    every = [
        (options(make_model(tmp_path / str(i), **{"tied": True, **small, **change}), 2, **layout), saved["one rank"][0])
        for i, (change, _) in enumerate(changes)
    ]
    every.append((options(models["dense"], 2, **layout), saved["moe"][0]))
    answers = run_ranks(2, go_on, every)
    assert answers[0] == answers[1]
    for found, (_, words) in zip(answers[0], [*changes, (None, "has no|holds|is ")], strict=True):
        assert found.startswith("DataError"), found
        with pytest.raises(DataError, match=words):
            raise DataError(found)


def test_a_damaged_checkpoint_is_named_on_every_rank(
    tmp_path: Path, models: dict[str, Path], saved: dict[str, Any]
) -> None:
    damaged = {
        name: shutil.copytree(saved["tp2"][0], tmp_path / name)
        for name in ("cut", "gone", "bits", "record", "metadata")
    }
    step = f"iter_{BEFORE:07d}"
    cut, gone, bits = (sorted((damaged[n] / step).glob("*.distcp"))[1] for n in ("cut", "gone", "bits"))
    cut.write_bytes(cut.read_bytes()[:1000])
    gone.unlink()
    data = bytearray(bits.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    bits.write_bytes(data)
    (damaged["record"] / step / "hpcrl.json").write_text("{")
    (damaged["metadata"] / step / ".metadata").write_bytes(b"xx")
    n, layout = LAYOUTS["dp2"]
    opts = options(models["dense"], n, verify_checkpoint=True, **layout)
    answers = run_ranks(n, go_on, [(opts, path) for path in damaged.values()])
    assert answers[0] == answers[1]
    for found, words in zip(
        answers[0],
        (
            f"{cut} is truncated: 1000 bytes",
            f"{gone} is missing",
            f"{bits} is damaged",
            "hpcrl.json cannot be read",
            ".metadata cannot be read",
        ),
        strict=True,
    ):
        assert words in found, found


def restored(opts: Options, directory: Path) -> str:
    """Why a run does not resume from what is in `directory`."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.checkpoint import resume
    from hpcrl.trainer.megatron import model

    policy = model.build(opts, parallel_state.initialize(opts))
    with pytest.raises(HpcrlError) as found:
        resume.restore(policy, policy.ranks, opts, directory, "run")
    return str(found.value)


def test_a_failed_load_names_the_one_before(tmp_path: Path, models: dict[str, Path], saved: dict[str, Any]) -> None:
    """Tensors that are damaged within their sizes are found when they are loaded."""
    steps = shutil.copytree(saved["tp2"][0], tmp_path / "steps")
    newest = steps / f"iter_{BEFORE:07d}"
    shutil.copytree(newest, steps / f"iter_{BEFORE - 1:07d}")
    for shard in newest.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    n, layout = LAYOUTS["dp2"]
    found = run_ranks(n, restored, options(models["dense"], n, **layout), steps)
    assert found[0] == found[1] and f"hpcrl resume RUN --ckpt-step {BEFORE - 1}" in found[0], found


# ---- what could not be saved


def test_space_is_asked_for_only_where_it_lacks(tmp_path: Path) -> None:
    """Whatever the cause: a name in a pickle, a writer that was killed, a deadline."""
    from hpcrl.trainer.checkpoint.save_load import name_checkpoint_in_error

    def said(what: str, hint: str = "") -> str:
        with pytest.raises(HpcrlError) as caught, name_checkpoint_in_error(tmp_path / "iter_0000002"):
            raise HpcrlError(what, hint)
        return str(caught.value)

    for what in ("holds torch.x.Y", "the process that wrote it was killed by SIGKILL", "unexpected pos 64 vs 0"):
        assert said(what).endswith(f"{what}; the previous checkpoint is untouched: use --resume")
    assert said("late", "is it stuck?").endswith(
        "late; is it stuck?; the previous checkpoint is untouched: use --resume"
    )
    assert re.search(
        r"quota exceeded \(\d.* MB are free there\); .*: free space and use", said("OSError: Disk quota exceeded")
    )
    assert "free space and use" in said("[Errno 28] No space left on device")
    (before := tmp_path / "iter_0000001").mkdir()
    with (before / "__0_0.distcp").open("wb") as file:  # a hole, which takes no space
        file.truncate(2 * shutil.disk_usage(tmp_path).free)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert "free space and use" in said("PytorchStreamWriter failed writing file data/0: file write failed")


# ---- in the background, and which old ones go


def background(opts: Options, directory: Path, kill: str) -> dict[str, Any]:
    """Begin to save checkpoint 2 over checkpoint 1, and change the weights at once; what is there, and when."""
    from hpcrl.trainer.checkpoint import save_load, writers
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.checkpoint.saver import Saver

    policy = start(opts)
    saver = Saver(policy, policy.ranks, directory, "run", opts)
    saver.save(Position(1, 1), wait=True)
    if kill == "writer" and policy.ranks.rank == 1:
        writers.write_files = lambda *_: time.sleep(60)
    if kill == "answer" and policy.ranks.rank == 1:
        writers.write_files = lambda *_: threading.Timer(1, os.kill, (os.getpid(), 9)).start() or "x" * (1 << 20)
    losses(policy, opts, 2)
    weight = next(policy.modules[0].parameters())
    before = weight.detach().clone()
    if policy.ranks.rank == 0:
        (directory / f".{save_load.TRACKER}.9").write_text("of one that was killed")
    saver.save(Position(2, 2))
    tracker = directory / save_load.TRACKER
    first = tracker.read_text()
    with torch.no_grad():
        weight.zero_()
    if kill == "answer" and policy.ranks.rank == 1:
        saver.pending.writer.process.join(30)
    if kill == "writer" and policy.ranks.rank == 1:
        os.kill(saver.pending.writer.process.pid, signal.SIGKILL)
    if kill == "trainer":
        (directory / f"writer-{policy.ranks.rank}").write_text(str(saver.pending.writer.process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        deadline = time.monotonic() + 20
        while saver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    except HpcrlError as error:
        return {"error": str(error), "tracker": tracker.read_text()}
    named = tracker.read_text()
    save_load.load_checkpoint(policy, policy.ranks, save_load.latest(directory), "run")
    restored = torch.equal(weight, before)
    for number in range(3, 6):  # each save waits for the one before it
        saver.save(Position(number, number))
    saver.save(Position(6, 6), wait=True)
    torch.distributed.barrier()  # rank 0 removes old ones
    return {"first": first, "named": named, "restored": restored, "left": sorted(p.name for p in directory.iterdir())}


def test_background_save_is_a_snapshot(tmp_path: Path, models: dict[str, Path]) -> None:
    """A background save holds the state at its beginning."""
    opts = options(models["dense"], 2, async_save=True, save_keep_last=2, save_retain_interval=3)
    for found in run_ranks(2, background, opts, tmp_path / "c", "", timeout=60):
        assert found["first"] == "1", "not named before it is complete"
        assert (found["named"], found["restored"]) == ("2", True)
        steps = [name for name in found["left"] if name != "latest_checkpointed_iteration.txt"]
        assert steps == [f"iter_{n:07d}" for n in (3, 5, 6)], "the last two, and every third"


def behind_a_cache(opts: Options, directory: Path) -> list[int]:
    """Save 1, 2 in the background, and 2 again at the end, where the host of rank 1 remembers that there was no
    tracker; what loads."""
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.checkpoint.saver import Saver

    policy = start(opts)
    if policy.ranks.rank == 1:
        save_load.latest = lambda _: None
    saver = Saver(policy, policy.ranks, directory, "run", opts)
    found = []
    for number in (1, 2):
        for wait in (False, True):
            path = saver.save(Position(number, number), wait=wait)
        found.append(save_load.load_checkpoint(policy, policy.ranks, path, "run").rollout_id)
    return found


def test_ranks_with_stale_trackers_save_alike(tmp_path: Path, models: dict[str, Path]) -> None:
    """Ranks whose hosts cache another tracker file save alike."""
    opts = options(models["dense"], 2, async_save=True)
    assert run_ranks(2, behind_a_cache, opts, tmp_path / "c", timeout=60) == [[1, 2], [1, 2]]


def alike(answers: list[dict[str, Any]]) -> bool:
    """Whether all ranks say the same but for the room on the disk, on which others may write."""
    return len({re.sub(r"[\d.]+ MB are free", "", json.dumps(answer)) for answer in answers}) == 1


def test_killed_writer_keeps_the_previous(tmp_path: Path, models: dict[str, Path]) -> None:
    """A writer that is killed leaves the previous checkpoint."""
    opts = options(models["dense"], 2, async_save=True)
    answers = run_ranks(2, background, opts, tmp_path / "c", "writer", timeout=60)
    assert alike(answers)
    assert re.search("iter_0000002 was not saved.*killed by SIGKILL", answers[0]["error"])
    assert answers[0]["tracker"] == "1" and not (tmp_path / "c" / "iter_0000002").exists()


def test_writer_killed_while_it_answers(tmp_path: Path, models: dict[str, Path]) -> None:
    """Half an answer is none: all ranks are told of the end of the process, and none is left alone."""
    opts = options(models["dense"], 2, async_save=True)
    answers = run_ranks(2, background, opts, tmp_path / "c", "answer", timeout=60)
    assert alike(answers)
    assert re.search("iter_0000002 was not saved.*killed by SIGKILL", answers[0]["error"])


def write_what_rank_0_cannot(opts: Options, beside: Path, name: str) -> tuple[str, str]:
    """Write into a directory where a file that rank 0 writes alone is a directory; (what was raised, its text)."""
    from hpcrl.trainer.checkpoint import save_load

    policy = start(opts)
    losses(policy, opts, 1)
    if policy.ranks.rank == 0:
        (beside / name).mkdir(parents=True)
    torch.distributed.barrier()
    try:
        save_load.write(save_load.everything(policy, policy.ranks, save_load.Position(1, 1)), beside)
    except (HpcrlError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
def test_rank_0_write_error_ends_all(tmp_path: Path, models: dict[str, Path], name: str) -> None:
    """They wait for it inside Megatron, and would until they are taken for hung."""
    if name == "common.pt" and not version("megatron-core").startswith("0.16."):
        pytest.skip("Megatron-core 0.19 writes none")
    first, second = run_ranks(
        2, write_what_rank_0_cannot, options(models["dense"], 2), tmp_path / "c", name, timeout=60
    )
    assert first[0] == "HpcrlError" and "Is a directory" in first[1]
    assert second[0] == "RuntimeError", "an echo: nobody takes it for the cause"


def test_trainer_killed_while_saving(tmp_path: Path, models: dict[str, Path]) -> None:
    """A trainer that is killed while it saves leaves the previous checkpoint."""
    with pytest.raises(RankError, match="rank . died"):
        run_ranks(1, background, options(models["dense"], async_save=True), tmp_path / "c", "trainer")
    writer = int((tmp_path / "c" / "writer-0").read_text())
    assert gone([writer]), "the writer dies with the trainer"
    assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert sorted(p.name for p in (tmp_path / "c").glob("iter_*")) == ["iter_0000001"]


def test_old_checkpoints_of_other_runs_stay(tmp_path: Path) -> None:
    from hpcrl.trainer.checkpoint.saver import prune

    for number in range(1, 8):
        path = tmp_path / f"iter_{number:07d}"
        path.mkdir()
        run = "other" if number == 2 else "mine"
        record = {"run_id": run, "rollout_id": number, "version": 0, "data": None, "files": {}}
        (path / "hpcrl.json").write_text(json.dumps(record))
    (tmp_path / "iter_0000003" / "hpcrl.json").unlink()  # Megatron-LM's
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert prune(tmp_path, "mine", None, None) == []
    assert [int(p.name[5:]) for p in prune(tmp_path, "mine", 2, 4)] == [1, 5]
    assert [int(p.name[5:]) for p in prune(tmp_path, "mine", None, 4)] == [6]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert prune(tmp_path, "mine", 1, None) == [], "never the one that the tracker names"
    assert sorted(int(p.name[5:]) for p in tmp_path.glob("iter_*")) == [2, 3, 4, 7]
