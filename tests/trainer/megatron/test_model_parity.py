"""Megatron computes what transformers computes: logits, gradients and weights, in every layout.

The reference runs in the test process; Megatron's ranks are forked (tests/support/ranks.py).
"""

from __future__ import annotations

import itertools
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.config.options import Options
from tests.support.ranks import RankError, run_ranks
from tests.support.tiny import make_model

pytestmark = pytest.mark.process

LENGTHS = (17, 40, 3, 64, 1, 5)
PAD = 8  # rows of each sequence are a multiple: enough for CP 2 and for sequence parallelism over TP 2
#: odd sizes: vocabulary not divisible by TP, heads no power of two, head size not hidden / heads, layers not even
ODD = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
}
ONE_GROUP = {"num_attention_heads": 4, "num_key_value_heads": 1}  # fewer key-value heads than TP ranks

PACE = 20_000  #: bytes

LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2 sp cp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}),
}
MODELS = {
    "tied": (True, {}),
    "untied": (False, {}),
    "odd tied": (True, ODD),
    "odd untied": (False, ODD),
    "one group": (True, ONE_GROUP),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name.replace(" ", "-"), tied, **fields) for name, (tied, fields) in MODELS.items()}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Any]:
    """The same models in transformers, fp32."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    return {name: load(path, dtype=torch.float32, attn_implementation="eager").eval() for name, path in models.items()}


def options(directory: Path, n: int, layout: dict[str, Any], **more: Any) -> Options:
    return Options(hf_checkpoint=str(directory), bf16=False, actor_num_gpus_per_node=n, **layout, **more)


def sequences(vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    # without token 0, the padding token: transformers keeps its row of the embedding at zero, and without a gradient
    return [torch.randint(1, vocab, (n,), generator=generator) for n in LENGTHS]


# ---- the reference


def weights_of_loss(vocab: int) -> list[torch.Tensor]:
    """What each logit counts in a made-up loss: sum of logits times these."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(n, vocab, generator=generator) for n in LENGTHS]


# ---- on the ranks


def pack(parts: list[torch.Tensor], cp_size: int, cp_rank: int) -> tuple[torch.Tensor, Any]:
    """Rows of all sequences [1, t / cp, ...], each padded with zeros to PAD, and their boundaries."""
    from hpcrl.trainer.megatron.packed_attention import boundaries
    from hpcrl.trainer.megatron.thd import cp_indices

    padded = [torch.cat([p, p.new_zeros(-len(p) % PAD, *p.shape[1:])]) for p in parts]
    cu = torch.tensor([0] + [len(p) for p in padded]).cumsum(0).int()
    longest = max(len(p) for p in padded)
    rows = torch.cat(padded)[cp_indices(cu.tolist(), cp_size, cp_rank)][None]
    return rows, boundaries(cu, tuple(cu.tolist()), longest)


def start(opts: Options, ranks: Any = None) -> Any:
    """A loaded policy; in groups of this process that exist already, if `ranks` are given."""
    from hpcrl.trainer import parallel_state
    from hpcrl.trainer.megatron import hf_weights, model

    policy = model.build(opts, ranks or parallel_state.initialize(opts))
    hf_weights.load_hf(policy, opts.hf_checkpoint)
    return policy


def on_each(work: str, every: list[Options]) -> list[Any]:
    """This module's function `work` of a policy, for each of several models in the same groups."""
    ranks, results = None, []
    for opts in every:
        policy = start(opts, ranks)
        ranks = policy.ranks
        results.append(globals()[work](policy))
    return results


def schedule(policy: Any, ids: torch.Tensor, packed: Any, loss: Any, forward_only: bool) -> list[Any]:
    """Megatron's schedule over one micro-batch; what `loss` returned."""
    return schedule_all(policy, [(ids, packed, loss)], forward_only)


def schedule_all(policy: Any, batches: list[tuple[torch.Tensor, Any, Any]], forward_only: bool) -> list[Any]:
    """Megatron's schedule over micro-batches of the same size, each (ids, boundaries, loss); what the losses
    returned."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        ids, packed, loss = next(iterator)
        return model(ids, torch.zeros_like(ids), None, packed_seq_params=packed), loss

    run = {
        "forward_only": forward_only,
        "collect_non_loss_data": forward_only,
        "seq_length": batches[0][0].shape[1],
        "micro_batch_size": 1,
    }
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in policy.chunks],
        model=list(policy.chunks),
        num_microbatches=len(batches),
        **run,
    )


def orders(policy: Any) -> list[list[int]]:
    """In which order each micro-batch has the sequences: one micro-batch, two where virtual stages need as many."""
    plain = list(range(len(LENGTHS)))
    return [plain] if len(policy.chunks) == 1 else [plain, plain[::-1]]


def logits(policy: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(row numbers, logits) of this CP rank, on the first TP rank of the last stage."""
    from megatron.core import tensor_parallel

    from hpcrl.trainer.megatron.thd import cp_indices

    ranks = policy.ranks
    every = sequences(policy.vocab_size)
    batches = [pack([every[i] for i in order], ranks.cp_size, ranks.cp_rank) for order in orders(policy)]
    with torch.no_grad():
        out = schedule_all(policy, [(*batch, lambda out, non_loss_data: out) for batch in batches], True)
    if not ranks.last_stage:
        return None
    wholes = [tensor_parallel.gather_from_tensor_model_parallel_region(one)[0] for one in out]
    for whole in wholes:
        assert whole.shape[-1] == -(-policy.vocab_size // ranks.tp_size) * ranks.tp_size
    if len(wholes) > 1:
        ends = batches[1][1].cu_seqlens_q.tolist()
        parts = [wholes[1][start:end] for start, end in itertools.pairwise(ends)]
        torch.testing.assert_close(torch.cat(parts[::-1]), wholes[0], rtol=0, atol=2e-5)
    rows = cp_indices(batches[0][1].cu_seqlens_q.tolist(), ranks.cp_size, ranks.cp_rank)
    return (rows, wholes[0][:, : policy.vocab_size]) if ranks.tp_rank == 0 else None


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """Gradients of the made-up loss under their Hugging Face names, on rank 0; two passes must give the same bits."""
    from hpcrl.trainer.megatron.hf_weights import export

    first, second = _gradients(policy), _gradients(policy)
    for module, once, again in zip(policy.modules, first, second, strict=True):
        assert all(torch.equal(once[name], again[name]) for name in once)
        for name, parameter in module.named_parameters():
            parameter.data = once[name]
    found = {name: tensor.clone() for name, tensor in export(policy)}
    return found if policy.ranks.rank == 0 else {}


def _gradients(policy: Any) -> list[dict[str, torch.Tensor]]:
    """Of each chunk, by Megatron's names."""
    ranks = policy.ranks
    columns = -(-policy.vocab_size // ranks.tp_size)
    every, weights = sequences(policy.vocab_size), weights_of_loss(policy.vocab_size)

    def batch(order: list[int], share: float) -> tuple[torch.Tensor, Any, Any]:
        ids, packed = pack([every[i] for i in order], ranks.cp_size, ranks.cp_rank)
        wanted, _ = pack([weights[i] for i in order], ranks.cp_size, ranks.cp_rank)
        wanted = torch.nn.functional.pad(wanted, (0, columns * ranks.tp_size - policy.vocab_size))
        wanted = share * wanted[..., ranks.tp_rank * columns : (ranks.tp_rank + 1) * columns]
        return ids, packed, lambda out: ((out * wanted).sum(), torch.tensor(1, dtype=torch.int), {})

    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    shares = [1.0] if len(policy.chunks) == 1 else [0.75, 0.25]  # every DP rank has the whole batch here
    batches = [batch(order, share / ranks.dp_size) for order, share in zip(orders(policy), shares, strict=True)]
    schedule_all(policy, batches, False)
    counts = ranks.dp_size * ranks.cp_size * len(batches)  # Megatron divided by the sum of all counts
    return [{name: p.main_grad * counts for name, p in module.named_parameters()} for module in policy.modules]


def exported(policy: Any) -> list[tuple[str, torch.Tensor]]:
    from hpcrl.trainer.megatron.hf_weights import export

    found = [(name, tensor.clone()) for name, tensor in export(policy)]
    if policy.ranks.rank:
        assert all(tensor.device.type == "meta" for _, tensor in found)
        return []
    return found


def exported_to_a_slow_reader(opts: Options) -> int:
    """Two ranks that hold the same, groups that give up after 4 s, and a reader that takes 7 s for a tensor."""
    import time

    from torch.distributed import distributed_c10d

    from hpcrl.trainer.collectives import make_patient
    from hpcrl.trainer.megatron import hf_weights

    policy = start(opts)
    distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    patient = make_patient(opts)
    hf_weights.PACE = PACE
    number = 0
    for number, _ in enumerate(hf_weights.export(policy, patient), 1):
        if number == 3 and policy.ranks.rank == 0:
            time.sleep(7)
    return number


def ahead_at_each_send(opts: Options, counter: Path) -> list[int]:
    """By how many bytes this rank was ahead of rank 0 when it began each of its sends of an export."""
    from hpcrl.trainer.megatron import hf_weights

    policy = start(opts)
    found, passed = [], 0
    send = hf_weights._exchange

    def noted(*args: Any) -> None:
        found.append(passed - counter.stat().st_size)
        send(*args)

    if policy.ranks.rank:
        hf_weights._exchange = noted
    hf_weights.PACE = PACE
    for _, tensor in hf_weights.export(policy):
        passed += tensor.nbytes
        if policy.ranks.rank == 0:
            with counter.open("ab") as file:
                file.write(bytes(tensor.nbytes))
    return found


def refused_on_rank(every: list[Options], known: bool = False) -> list[str]:
    """The error of each of several options; known: the groups are made once, with the first."""
    from hpcrl.errors import HpcrlError
    from hpcrl.trainer import parallel_state

    ranks = parallel_state.initialize(every[0].model_copy(update={"megatron": {}})) if known else None
    messages = []
    for opts in every:
        try:
            start(opts, ranks)
            messages.append("")
        except HpcrlError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


# ---- tests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(models: dict[str, Path], references: dict[str, Any], layout: str) -> None:
    n, fields = LAYOUTS[layout]
    results = run_ranks(n, on_each, "logits", [options(path, n, fields) for path in models.values()])
    for i, model in enumerate(models):
        rows, values = (torch.cat(x) for x in zip(*(r[i] for r in results if r[i] is not None), strict=True))
        found = torch.zeros(int(rows.max()) + 1, values.shape[-1]).index_copy(0, rows, values)
        place = 0
        for ids in sequences(references[model].config.vocab_size):
            with torch.no_grad():
                wanted = references[model](ids[None]).logits[0]
            assert float(wanted.abs().max()) > 1  # not all alike
            error = float((found[place : place + len(ids)] - wanted).abs().max())
            assert error <= 1e-4, f"{model}: {error:.1e}"
            place += -(-len(ids) // PAD) * PAD


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("layout", [*LAYOUTS, "recompute", "deterministic"])
def test_gradients_are_those_of_transformers(models: dict[str, Path], references: dict[str, Any], layout: str) -> None:
    n, fields = LAYOUTS.get(layout, (1, {}))
    whole = {"use_distributed_optimizer": False}  # with it, each DP and CP rank has but a part of the gradient
    more = {
        "megatron": whole | (RECOMPUTE if layout == "recompute" else {}),
        "deterministic_mode": layout == "deterministic",
    }
    names = ["odd tied", "odd untied"]
    results = run_ranks(n, on_each, "gradients", [options(models[name], n, fields, **more) for name in names])[0]
    for model, found in zip(names, results, strict=True):
        hf = references[model]
        hf.zero_grad()
        for ids, weight in zip(sequences(hf.config.vocab_size), weights_of_loss(hf.config.vocab_size), strict=True):
            (hf(ids[None]).logits[0] * weight).sum().backward()
        wanted = {name: parameter.grad for name, parameter in hf.named_parameters()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{model}: {name}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", ["one rank", "tp2", "pp2", "cp2", "dp2", "tp2 pp2"])
def test_export_returns_every_tensor(models: dict[str, Path], layout: str) -> None:
    """Export gives back every tensor once, bit for bit."""
    n, fields = LAYOUTS[layout]
    results = run_ranks(n, on_each, "exported", [options(path, n, fields) for path in models.values()])[0]
    for (model, path), found in zip(models.items(), results, strict=True):
        wanted = load_file(path / "model.safetensors")
        assert sorted(name for name, _ in found) == sorted(wanted), model
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found), model


def test_bfloat16_export_is_the_rounded_weights(models: dict[str, Path]) -> None:
    opts = options(models["odd untied"], 2, LAYOUTS["tp2"][1]).model_copy(update={"bf16": True})
    found = run_ranks(2, on_each, "exported", [opts])[0][0]
    wanted = load_file(models["odd untied"] / "model.safetensors")
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in found)


def test_sharded_files_and_untied_head(models: dict[str, Path], tmp_path: Path) -> None:
    """Sharded files, and an untied head in a tied model, load."""
    tensors = load_file(models["tied"] / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:10], "model-2.safetensors": names[10:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "model.rotary_emb.inv_freq": torch.ones(4)}
    save_file(extra, tmp_path / "model-3.safetensors")
    where = {name: file for file, held in [*parts.items(), ("model-3.safetensors", list(extra))] for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_bytes((models["tied"] / "config.json").read_bytes())
    found = dict(run_ranks(1, on_each, "exported", [options(tmp_path, 1, {})])[0][0])
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in found)


NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({NORM: None}, f"the model lacks {NORM}"),
        ({"model.extra": torch.ones(2)}, "model holds in excess model.extra"),
        ({NORM: torch.ones(63)}, rf"{NORM} is \[63\], config.json asks for \[64\]"),
        ({EMBEDDING: torch.ones(127, 64)}, rf"{EMBEDDING} is \[127, 64\], config.json asks for \[128, 64\]"),
        ({NORM: torch.ones(64, dtype=torch.int32)}, f"{NORM} holds int32"),
    ],
    ids=["missing", "extra", "shape", "vocabulary", "integers"],
)
def test_misfit_files_on_every_rank(
    models: dict[str, Path], tmp_path: Path, change: dict[str, torch.Tensor | None], text: str
) -> None:
    """Files that do not fit are one clear error on every rank."""
    tensors = load_file(models["tied"] / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((models["tied"] / "config.json").read_bytes())
    for (message,) in run_ranks(2, refused_on_rank, [options(tmp_path, 2, LAYOUTS["pp2"][1])]):
        assert message.startswith(f"DataError: {tmp_path}")
        assert re.search(text, message), message


def test_a_truncated_file_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    data = (models["tied"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "config.json").write_bytes((models["tied"] / "config.json").read_bytes())
    message = run_ranks(1, refused_on_rank, [options(tmp_path, 1, {})])[0][0]
    assert "model.safetensors cannot be read" in message
    assert "damaged or not complete" in message


@pytest.mark.parametrize(
    ("n", "fields", "text"),
    [
        (
            3,
            {"tensor_model_parallel_size": 3},
            "the 4 attention heads of config.json cannot be divided by 3",
        ),
        (
            3,
            {"pipeline_model_parallel_size": 3},
            "the 2 layers of config.json cannot be divided so",
        ),
        (2, {"actor_num_nodes": 2}, "asks for 4 trainer ranks, torchrun started 2"),
    ],
    ids=["heads", "layers", "world"],
)
def test_layouts_that_do_not_divide_are_refused(
    models: dict[str, Path], n: int, fields: dict[str, Any], text: str
) -> None:
    for (message,) in run_ranks(n, refused_on_rank, [options(models["tied"], n, fields)]):
        assert message.startswith("UsageError")
        assert text in message


REFUSED = [
    (
        {"megatron": {"hidden_dropot": 0.1}},
        "[megatron]: hidden_dropot is an unknown option; did you mean hidden_dropout?",
    ),
    ({"megatron": {"hidden_size": 65}}, "--hidden-size 65: the model's config.json says 64"),
    ({"megatron": {"rotary_base": 1}}, "--rotary-base 1: the model's config.json says 10000"),
    ({"megatron": {"lr": 1.0}}, "[megatron]: lr is an option of hpcrl's own; write lr outside the table"),
    ({"megatron": {"params_dtype": "bf16"}}, "[megatron]: params_dtype cannot be set: use --bf16 or --no-bf16"),
    ({"megatron": {"apply_rope_fusion": True}}, "--apply-rope-fusion cannot be done without CUDA"),
    ({"megatron": {"attention_dropout": 0.1}}, "--attention-dropout 0.1 cannot be: hpcrl needs 0.0"),
    (
        {"megatron": {"recompute_num_layers": "many"}},
        '[megatron] recompute_num_layers = "many": expected a whole number',
    ),
    (
        {"megatron": {"recompute_granularity": "all"}},
        '[megatron] recompute_granularity = "all": expected one of full, selective',
    ),
    ({"megatron": {"recompute_granularity": "full"}}, "--recompute-granularity full without --recompute-method"),
    (
        {"megatron": {"recompute_granularity": "selective", "recompute_modules": ["nonsense"]}},
        "Megatron refuses these settings of its TransformerConfig: Invalid choices",
    ),
    ({"hf_checkpoint": None}, "--hf-checkpoint is not given"),
]
TAKEN = {"hidden_size": 64, "attention_backend": "auto", "bucket_size": 1000, "use_distributed_optimizer": False}


def test_misfit_settings(models: dict[str, Path]) -> None:
    """Settings that do not fit are refused, and others taken."""
    every = [
        options(models["tied"], 1, {}).model_copy(update=fields) for fields, _ in [*REFUSED, ({"megatron": TAKEN}, "")]
    ]
    messages = run_ranks(1, refused_on_rank, every, True)[0]
    for message, (_, text) in zip(messages[:-1], REFUSED, strict=True):
        assert message.startswith("UsageError")
        assert text in message
    assert messages[-1] == ""


# ---- the ranks themselves


def fails_on_rank_one() -> None:
    import os
    import time

    if os.environ["RANK"] == "1":
        raise ValueError("this very text")
    time.sleep(60)


def sleeps() -> None:
    import time

    time.sleep(60)


def test_failing_rank_is_named() -> None:
    """A rank that raises is named with its traceback."""
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: this very text"):
        run_ranks(2, fails_on_rank_one)


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not end within 1 s"):
        run_ranks(2, sleeps, timeout=1.0)


def test_a_stage_sends_once_rank_0_can_take(models: dict[str, Path], tmp_path: Path) -> None:
    """A send that waits counts against the groups' timeout."""
    (counter := tmp_path / "taken").touch()
    ahead = run_ranks(2, ahead_at_each_send, options(models["untied"], 2, LAYOUTS["pp2"][1]), counter)[1]
    largest = 128 * 64 * 4
    assert len(ahead) > 5
    assert max(ahead) <= PACE + largest < counter.stat().st_size // 4


def test_ranks_wait_patiently_for_an_exports_reader(models: dict[str, Path]) -> None:
    """However long an engine takes for what rank 0 has, as long as that is allowed."""
    counts = run_ranks(2, exported_to_a_slow_reader, options(models["untied"], 2, LAYOUTS["dp2"][1]))
    assert counts[0] == counts[1] > 5
