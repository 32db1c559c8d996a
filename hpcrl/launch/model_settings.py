"""What Megatron's settings say of the model and ask of the packages, looked at before any node is.

Invariant: refused here is only what a trainer would refuse as well; where the model or the packages cannot be seen,
nothing is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import megatron_flags
from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag, locate
from hpcrl.config.rules.speculation_rules import check_draft_layers
from hpcrl.config.setting_names import gather_table
from hpcrl.errors import DataError, UsageError, failures, raise_together
from hpcrl.launch.site import Site
from hpcrl.model_files.config_json import CONFIG, read_object
from hpcrl.models.divisions import undivided
from hpcrl.models.family import Config, Family, check_spec, find_family
from hpcrl.models.model_args import check_model_args
from hpcrl.weights.quantization_config import read_quantization


def refuse_wrong_settings(stages: Sequence[Options], same_packages: bool) -> None:
    """UsageError for all that cannot be.  same_packages: whether this interpreter's are those of the nodes."""
    wrong = [
        error for options in stages for error in failures((check_model, check_layout, check_quantization), options)
    ]
    if same_packages:
        wrong += [problem for options in stages for problem in missing_packages(options)]
    raise_together([*{str(error): error for error in wrong}.values()])


def same_packages(site: Site) -> bool:
    """Whether the nodes run this interpreter, so that its packages are theirs."""
    return site.python in (None, sys.executable) and site.container.kind == "none" and site.trainer.gpus_per_node != 0


def check_model(options: Options) -> None:
    """UsageError if --spec or a flag of Megatron's says otherwise than config.json, where it can be read."""
    if (found := _described(options)) is None:
        return
    config, family, fields = found
    gpt = family.gpt(config)
    check_spec(options.spec, config)
    sizes = {name: config.get(name) for name in ("vocab_size", "max_position_embeddings")}
    check_model_args(gather_table("megatron", options.megatron, "[megatron]"), fields, {**gpt, **family.facts, **sizes})


def check_layout(options: Options) -> None:
    """UsageError for all that the layout would cut and config.json does not let it, and for layers to draft with that
    the checkpoint lacks.

    Nothing where config.json cannot be read.
    """
    try:
        found = _described(options)
    except UsageError:
        return  # `check_model` says so
    if found:
        config, _, fields = found
        wrong = list(undivided(options, fields, config.get("max_position_embeddings")))
        raise_together([*wrong, *failures((lambda o: check_draft_layers(o, config),), options)])


def check_quantization(options: Options) -> None:
    """UsageError if the engines' weights are quantised in a way that no update can bring them to, where config.json can
    be read."""
    directory = Path(options.hf_checkpoint or "")
    try:
        config = read_object(directory, CONFIG) or {}
        if options.needs_engines:
            read_quantization(config.get("quantization_config"), f"--hf-checkpoint {directory / CONFIG}")
    except DataError as error:
        raise UsageError(error.what, error.hint) from None


def _described(options: Options) -> tuple[Config, Family, dict[str, Any]] | None:
    """config.json, its family and TransformerConfig's fields; None where it cannot be read: it may be on the nodes
    alone."""
    directory = options.hf_checkpoint or ""
    try:
        config = read_object(Path(directory), CONFIG)
        if config is None:
            return None
        family = find_family(config, directory)
        return config, family, family.transformer(config)
    except DataError as error:
        raise UsageError(error.what, error.hint) from None


def missing_packages(options: Options, installed: Callable[[str], bool] | None = None) -> Iterator[UsageError]:
    """Settings whose package is not installed here; none where Megatron-core itself is not: this is no place to train
    then."""
    there = installed or (lambda name: importlib.util.find_spec(name) is not None)
    if not locate("megatron"):
        return
    for name, value, part in megatron_flags.settings_with_parts(options.megatron):
        packages = megatron_flags.PARTS[part]
        if not any(there(package) for package in packages):
            yield UsageError(
                f"{as_flag(name, value)} needs {part}, and {' or '.join(packages)} is not installed",
                "install it, or leave the flag out",
            )
