"""Adapters in every layout compute what the merged weights compute in transformers, and their gradients are those of
A and B there.

The gradient of W + scale B A is transformers' own, from which those of A and B follow: scale B^T G and scale G A^T.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcrl.models.family import find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.lora.matrices import adapted, lora_name
from hpcrl.models.lora.settings import lora_settings
from tests.models import test_family_parity as parity_of_families
from tests.support import families
from tests.support.ranks import run_ranks
from tests.trainer.megatron import test_model_parity as parity

pytestmark = pytest.mark.process

LORA = {"lora_rank": 4, "lora_alpha": 6, "lora_type": "canonical_lora"}
SHARED = {"lora_rank": 3, "lora_alpha": 8, "lora_type": "lora", "use_rslora": True}
#: of attention's three matrices two, of the experts' three one
SOME = {
    "target_modules": ["q_proj", "v_proj", "mlp.*up_proj", "o_proj"],
    "exclude_modules": ["layers.1.self_attn.v_proj"],
}
LAYOUTS = parity_of_families.LAYOUTS


def start(opts: Any, ranks: Any, adapter: Path) -> Any:
    """A policy with the adapter of a file."""
    from hpcrl.trainer.lora.values import fill, init_adapter

    policy = parity.start(opts, ranks)
    init_adapter(policy, opts.seed)
    fill(policy, load_file(adapter), str(adapter))
    return policy


def walk(every: list[Any], adapters: list[Path]) -> list[Any]:
    """(logits, adapter as exported, merged weights as exported, gradients) of each model, in the same groups."""
    ranks, found = None, []
    for opts, adapter in zip(every, adapters, strict=True):
        policy = start(opts, ranks, adapter)
        ranks = policy.ranks
        outside = [parity.exported(policy.with_part(part)) for part in ("model", "adapter", "merged")]
        logits = parity.logits(policy)
        found.append((logits, *outside, gradients(policy)))
    return found


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """Of every parameter of the adapter, by PEFT's names, on rank 0."""
    from hpcrl.trainer.megatron.hf_weights import export

    assert all(
        parameter.requires_grad == ("_adapter." in name)
        for m in policy.modules
        for name, parameter in m.named_parameters()
    )
    for module, found in zip(policy.modules, trained_gradients(policy), strict=True):
        for name, parameter in module.named_parameters():
            if name in found:
                parameter.data = found[name]
    found = {name: tensor.clone() for name, tensor in export(policy.with_part("adapter"))}
    return found if policy.ranks.rank == 0 else {}


def trained_gradients(policy: Any) -> list[dict[str, torch.Tensor]]:
    for module in policy.modules:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.main_grad = torch.zeros(1)
    found = parity._gradients(policy)
    return [{name: value for name, value in of.items() if "_adapter." in name} for of in found]


def made_up(path: Path, opts: Any, directory: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(a file of an adapter, its tensors, the base with it added in) of the model in `path`."""
    config = read_config(path)
    settings = lora_settings(opts)
    assert settings is not None
    files = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    tensors: dict[str, torch.Tensor] = {}
    merged = dict(files)
    for matrix in adapted(find_family(config, path).tensors(config), settings):
        for part in matrix.parts:
            weight = matrix.base.hf[part]
            a, b = (lora_name(weight, which) for which in "AB")
            if a in tensors or weight not in files:
                continue
            rows, columns = files[weight].shape
            same = matrix.copies.get(a)
            tensors[a] = (
                tensors[same].clone()
                if same
                else torch.randn(settings.rank, columns, generator=generator) / columns**0.5
            )
            tensors[b] = torch.randn(rows, settings.rank, generator=generator) / 8
            merged[weight] = files[weight] + settings.scale * tensors[b] @ tensors[a]
    directory.mkdir()
    save_file(tensors, directory / "adapter.safetensors")
    return directory / "adapter.safetensors", tensors, merged


def wanted_of(
    path: Path, merged: dict[str, torch.Tensor], directory: Path
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """transformers' logits of merged weights, and the gradients of these."""
    import shutil

    shutil.copytree(path, directory, dirs_exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in merged.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    model = parity_of_families.reference(directory)
    with torch.no_grad():
        logits = [model(ids[None]).logits[0] for ids in parity.sequences(model.config.vocab_size)]
    return logits, parity_of_families.gradients_of(model, merged)


def sums_of(
    settings: Any, tensors: dict[str, torch.Tensor], gradient: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(the gradients of A and B that follow from those of the weights, how large each is to be taken at least: a sum of
    large numbers that cancel is as exact as they are)."""
    sums: dict[str, torch.Tensor] = {}
    least: dict[str, float] = {}
    for n in tensors:
        if n.endswith(".lora_A.weight"):
            weight = n.replace(".lora_A.weight", ".weight")
            b = n.replace("lora_A", "lora_B")
            sums[n] = settings.scale * tensors[b].T @ gradient[weight]
            sums[b] = settings.scale * gradient[weight] @ tensors[n].T
            size = settings.scale * float(gradient[weight].norm()) / 8
            least |= {n: size * float(tensors[b].norm()), b: size * float(tensors[n].norm())}
    if settings.shared_inputs:
        share_inputs(sums, tensors)
    return sums, least


def errors(found: dict[str, torch.Tensor], sums: dict[str, torch.Tensor], least: dict[str, float]) -> dict[str, float]:
    """How far each is from a sum, relative to that."""
    return {
        n: float((found[n] - value).norm() / value.norm().clamp(min=max(least[n], 1e-6))) for n, value in sums.items()
    }


def neighbours(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Each number's next one, up or down."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nextafter(value, value + torch.randn(value.shape, generator=generator))
        for name, value in weights.items()
    }


def check(
    found: Any, settings: Any, tensors: Any, files: Any, merged: Any, gradient: Any, moved: float, name: str
) -> None:
    """One model of a walk.

    moved: how far transformers' own gradients are moved by a last bit of every weight; a pass rounds several times.
    """
    base, adapter, together, gradients = (dict(one) for one in found)
    assert adapter.keys() == tensors.keys(), name
    assert not [n for n in tensors if not torch.equal(adapter[n], tensors[n])], name
    assert not [n for n in base if not torch.equal(base[n], files[n])], name
    for n, value in together.items():
        torch.testing.assert_close(value, merged[n], rtol=0, atol=1e-6)
    most = max(1e-5, 4 * moved)
    assert most < 1e-3, f"{name}: nothing could be seen"
    for n, error in errors(gradients, *sums_of(settings, tensors, gradient)).items():
        assert error < most, f"{name}: {n}: relative error {error:.1e} of at most {most:.1e}"


def share_inputs(sums: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """The gradient of one A that several matrices have is the sum of theirs."""
    groups: dict[bytes, list[str]] = {}
    for n, value in tensors.items():
        if n.endswith(".lora_A.weight"):
            groups.setdefault(value.numpy().tobytes(), []).append(n)
    for names in groups.values():
        total = torch.stack([sums[n] for n in names]).sum(0)
        sums.update(dict.fromkeys(names, total))


#: a family with biases, one with norms on both sides and a fused matrix, with experts, latent attention, delta nets
FEW = ["qwen2 odd", "glm4 plain", "qwen3_moe odd", "deepseek_v3 plain", "qwen3_next odd"]
ALL = [f"{kind} {size}" for kind in families.SIZES for size in ("plain", "odd")]
ADAPTERS = {"own": LORA, "shared": SHARED, "some": LORA | SOME}
ONE = {"use_distributed_optimizer": False}  # with it, each DP rank has but a part of the gradient


class Bases:
    """Models, made when they are first asked for, and with each adapter what transformers says of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[tuple[str, str], Any] = {}

    def path(self, name: str) -> Path:
        kind, size = name.split()
        directory = self.root / f"{kind}-{size}"
        return directory if directory.exists() else families.make(directory, kind, size == "odd")

    def of(self, name: str, lora: str) -> Any:
        """(file of the adapter, its tensors, merged weights, logits, gradients of these, how far last bits move them)."""
        if (name, lora) not in self.known:
            opts = parity.options(self.path(name), 1, {}, **ADAPTERS[lora])
            made = made_up(self.path(name), opts, self.root / f"{lora} {name}")
            wanted = wanted_of(self.path(name), made[2], self.root / f"{lora} {name} merged")
            self.known[name, lora] = (*made, *wanted, self.moved(name, lora_settings(opts), *made[1:], wanted[1]))
        return self.known[name, lora]

    def moved(self, name: str, settings: Any, tensors: Any, merged: Any, gradient: Any) -> float:
        sums = sums_of(settings, tensors, gradient)
        worst = 0.0
        for seed in (0, 1):
            _, other = wanted_of(self.path(name), neighbours(merged, seed), self.root / f"{name} {seed}")
            worst = max(worst, *errors(sums_of(settings, tensors, other)[0], *sums).values())
        return worst


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


def compare(bases: Bases, names: list[str], layout: str, lora: str) -> None:
    n, fields, dense, sparse = LAYOUTS[layout]
    names = [name for name in names if (sparse if name.split()[0] in families.EXPERTS else dense)]
    every = [parity.options(bases.path(name), n, fields, megatron=ONE, **ADAPTERS[lora]) for name in names]
    results = run_ranks(n, walk, every, [bases.of(name, lora)[0] for name in names], timeout=200)
    for i, name in enumerate(names):
        _, tensors, merged, logits, gradient, moved = bases.of(name, lora)
        parity_of_families.check_logits([[r[i]] for r in results], 0, logits, name)
        files = load_file(bases.path(name) / "model.safetensors")
        check(results[0][i][1:], lora_settings(every[i]), tensors, files, merged, gradient, moved, name)


@pytest.mark.parametrize("layout", ["one rank", "tp2", "tp2 sp", "pp2", "cp2", "tp2 sp ep2 etp2"])
def test_adapters_compute_what_merged_weights_do(bases: Bases, layout: str) -> None:
    compare(bases, FEW, layout, "own")


def test_adapters_with_one_input_for_several(bases: Bases) -> None:
    compare(bases, FEW, "tp2 sp", "shared")


def test_adapters_of_some_matrices(bases: Bases) -> None:
    compare(bases, ["qwen2 odd", "qwen3_moe odd"], "tp2 sp", "some")


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lora", ["own", "shared"])
def test_adapters_of_every_family(bases: Bases, layout: str, lora: str) -> None:
    compare(bases, ALL, layout, lora)
