"""Weights with and without a layer that predicts further tokens: where it is needed, the flags are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from tests.support.mtp_models import make_mimo
from tests.support.ranks import run_ranks
from tests.trainer.step.test_invariance import VOCAB, options, start

pytestmark = pytest.mark.process

KINDS: dict[str, dict[str, Any]] = {
    "without": {},
    "held": {"mtp_num_layers": 1},
    "trained": {"mtp_num_layers": 1, "enable_mtp_training": True},
}


#: (how a checkpoint was saved, how it is resumed from)
CHANGES = [("without", "held"), ("held", "without"), ("held", "trained")]


def changes(every: dict[str, Options], root: Path) -> list[str]:
    """The error of each of CHANGES."""
    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.checkpoint.save_load import Position

    found, policies, ranks = [], {}, None
    for kind, opts in every.items():
        policy = policies[kind] = start(opts, ranks)
        ranks = policy.ranks
        save_load.save(policy, ranks, root / kind, Position(1, 1, None), "run")
    for saved, kind in CHANGES:
        try:
            save_load.load_checkpoint(policies[kind], ranks, save_load.latest(root / saved), "run")
            found.append("")
        except HpcrlError as error:
            found.append(str(error))
    return found


def filled(opts: Options, files: Path, other: Options, root: Path) -> list[bool]:
    """Of sets of weights without the layer, in both formats: whether they were taken, and the layer stayed."""
    import torch

    from hpcrl.trainer.checkpoint import save_load
    from hpcrl.trainer.checkpoint.resume import WeightSource, fill_modules
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.megatron.host_memory import weights

    policy = start(other)
    ranks = policy.ranks
    save_load.save(policy, ranks, root, Position(1, 1, None), "run")
    found = []
    for source in (WeightSource("hf", files), WeightSource("weights", save_load.latest(root))):
        policy = start(opts, ranks)
        before = {name: value.clone() for name, value in weights(policy).items()}
        for value in weights(policy).values():
            value.add_(1.0)
        fill_modules(policy, ranks, source)
        for name, value in weights(policy).items():
            found.append(torch.equal(value, before[name] + 1.0 if ".mtp." in name else before[name]))
    return found


def test_changed_layers_name_the_flags(tmp_path: Path) -> None:
    model = make_mimo(tmp_path / "model", vocab_size=VOCAB)
    every = {kind: options(model, 1, **more) for kind, more in KINDS.items()}
    found = run_ranks(1, changes, every, tmp_path)[0]
    for change, text in zip(CHANGES, found, strict=True):
        assert "--mtp-num-layers" in text and "--enable-mtp-training" in text, (change, text)


def test_references_need_no_further_layer(tmp_path: Path) -> None:
    """A reference or teacher without the layer is taken by a policy with it; as the policy's own weights it is not."""
    model = make_mimo(tmp_path / "model", vocab_size=VOCAB)
    bare = make_mimo(tmp_path / "bare", vocab_size=VOCAB)
    tensors = load_file(bare / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "mtp_layers" not in name}
    save_file(kept, bare / "model.safetensors", {"format": "pt"})
    trained = options(model, 1, **KINDS["trained"])
    found = run_ranks(1, filled, trained, bare, options(model, 1), tmp_path / "saved")[0]
    assert len(found) > 40 and all(found)
    with pytest.raises(Exception, match="leave out --mtp-num-layers"):
        run_ranks(1, start_on_rank, options(bare, 1, **KINDS["held"]))


def start_on_rank(opts: Options) -> None:
    start(opts)
