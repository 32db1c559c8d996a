"""What is checked before anything of a run is made: one set of checks for `run`, `launch`, `submit`, `eval`, `plan`,
`doctor` and their dry runs.

    refuse_settings(stages, hosts, packages)   # what can be known of the options, the model and the machines
    look_at(stages)                            # the first rows of prompt files that are here
    absent(stages, sight)                      # what the run begins with and is missing: files, custom functions

Invariants: a command that starts nothing refuses what the run would refuse, in the same words; what the run itself
makes, and what other machines alone can see, is left to them.  Where the model or the packages cannot be seen, nothing
that depends on them is refused.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config import megatron_flags
from hpcrl.config.options import Options
from hpcrl.config.passthrough import as_flag, locate
from hpcrl.config.plugin_points import missing_functions
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.sampling import check_draft_layers, drafts_of_files
from hpcrl.config.rules.sandboxes import check_stages_hosts, may_use_sandboxes
from hpcrl.config.setting_names import gather_table
from hpcrl.errors import DataError, UsageError, failures, raise_together
from hpcrl.launch.model_directory import check_fields, check_model_files, shipped_config
from hpcrl.launch.site import SiteProfile
from hpcrl.models.divisions import uncut_gates, undivided
from hpcrl.models.family import Config, Family, check_spec, find_family
from hpcrl.models.files import holds_weights
from hpcrl.models.files.config_json import CONFIG, read_object, read_quantization, with_text_part
from hpcrl.models.lora.peft import AS_PEFT, check_settings
from hpcrl.models.lora.peft import CONFIG as ADAPTER_CONFIG
from hpcrl.models.lora.settings import lora_settings
from hpcrl.models.model_args import check_model_args
from hpcrl.models.routing import find_routing, replay_flag
from hpcrl.models.shared.mtp import check_heads
from hpcrl.plan import Host, make_plan
from hpcrl.report.trackers.live import trackers_of
from hpcrl.report.trackers.record import check_tracker
from hpcrl.rollout.prompts.first_rows import look_at, prompt_files
from hpcrl.run.rundir import TRACKER
from hpcrl.sandbox.kinds import VARIABLE, chosen
from hpcrl.sandbox.run import refusal_of
from hpcrl.utils.installed import version


@dataclass(frozen=True)
class HostView:
    """What this machine can see of the machines of a run.

    Attributes:
        elsewhere: whether a path need not be here, since the run makes it or since the nodes alone have it.
        code: whether modules are found there as they are here.
        files: whether any file of the run can be here.
    """

    elsewhere: Callable[[str], bool] = lambda _: False
    code: bool = True
    files: bool = True


NOTHING = HostView(code=False, files=False)  #: of a machine that is not one of the run's


def refuse_what_cannot_run(
    stages: Sequence[Options], hosts: Callable[[Options], list[Host]], sight: HostView, packages: bool
) -> None:
    """All checks.

    Args:
        hosts, packages: see `refuse_settings`.

    Raises:
        UsageError: names all that is wrong and what to do; DataError is about the first rows of a prompt file.
    """
    rules = (lambda found: refuse_settings(found, hosts, packages), *((refuse_missing_packages,) if packages else ()))
    raise_together([*failures(rules, stages), *absent(stages, sight)])
    if packages:
        refuse_missing_boxes([o for o in stages if o.sandbox_on == "rollout" or len(hosts(o)) == 1])
    if sight.files:
        check_adapters(stages)
    look_at(stages)


def refuse_settings(stages: Sequence[Options], hosts: Callable[[Options], list[Host]], packages: bool) -> None:
    """Raise UsageError for all that cannot be, whatever files there are.

    Args:
        hosts: the hosts of a stage, with their slots.
        packages: whether the processes run with this interpreter's packages.
    """
    wrong = [error for o in stages for error in failures((lambda o: make_plan(o, hosts(o), "check"),), o)]
    rules = (lambda found: refuse_wrong_settings(found, packages), check_stages_hosts)
    raise_together([*wrong, *failures(rules, stages)])


def check_routing(options: Options) -> None:
    """Raise UsageError if a dense model is to replay a choice of experts; nothing where it is not (yet) to be read
    from here.
    """
    if replay_flag(options) and (found := _readable(options)):
        find_routing(options, found[0])


def refuse_missing_packages(stages: Sequence[Options]) -> None:
    """Raise UsageError if this interpreter lacks what the processes of these stages import first."""
    needed = {"torch", "transformers"}
    needed |= {"megatron"} if any(not options.debug_rollout_only for options in stages) else set()
    needed |= {"vllm"} if any(options.num_engines for options in stages) else set()
    if lacking := sorted(name for name in needed if importlib.util.find_spec(name) is None):
        raise UsageError(
            f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed for {sys.executable}",
            "pip install 'hpcrl[gpu]' on a machine with GPUs, make env in a checkout for CPUs: see docs/install.md",
        )


def refuse_missing_boxes(stages: Sequence[Options]) -> None:
    """Raise UsageError if this machine, which makes the sandboxes of these stages, can make none of the kind that is
    asked for: a box of it is made.  Other machines make one when the stage begins (`hpcrl.sandbox.nodes.main`)."""
    users = (o for o in stages if o.needs_engines and may_use_sandboxes(o))
    kinds = {options.sandbox_kind: chosen(options.sandbox_kind) for options in users}
    for given, name in kinds.items():
        if (given or os.environ.get(VARIABLE)) and (error := refusal_of(name)):
            said = f"--sandbox-kind {name}" if given else f"{VARIABLE}={name}"
            raise UsageError(f"{said}: {error.what}", error.hint)


def made_by_run(recipe: Recipe, run: str, path: str) -> bool:
    """Whether the run itself makes a file that it begins with: in its directory `run`, or by a prepare command that
    names it."""
    return path.startswith(run) or any(path in word for command in recipe.prepare for word in command)


# ---- what a run begins with


def absent(stages: Sequence[Options], sight: HostView) -> list[UsageError]:
    """An error for every file and directory that a stage begins with, and every custom function, that is not here."""
    found = [error for options in stages for error in missing_functions(options)] if sight.code else []
    if sight.files:
        rows = [row for options in stages for row in begins_with(options) if not sight.elsewhere(row[1])]
        found = [*(error for row in rows if (error := _nothing_at(*row))), *found]
        models = dict.fromkeys(
            o.hf_checkpoint for o in stages if o.hf_checkpoint and not sight.elsewhere(o.hf_checkpoint)
        )
        found += [error for path in models if Path(path).exists() for error in failures((check_model_files,), path)]
    return [*{str(error): error for error in found}.values()]


def check_adapters(stages: Sequence[Options]) -> None:
    """Raise DataError for an adapter that is here, and is not what a stage begins with."""
    for options in stages:
        settings = lora_settings(options)
        if settings is not None and options.lora_adapter_path and Path(options.lora_adapter_path).is_dir():
            check_settings(Path(options.lora_adapter_path), settings)


def note_absent(recipe: Recipe, stages: Sequence[Options]) -> None:
    """Say on stderr what a stage begins with and is not here, where another machine may be the one to run it."""
    for error in absent(stages, HostView(lambda path: made_by_run(recipe, "{run}", path))):
        print(f"hpcrl: note: {error.what}: the machines of the run need it", file=sys.stderr)


def drafting_notes(stages: Sequence[Options]) -> list[str]:
    """What is to be said of weights that engines draft with and that no weight update brings."""
    told = (
        (o.vllm.get("speculative_config") or {}, o.mtp_num_layers, o.hf_checkpoint)
        for o in stages
        if not o.debug_rollout_only
    )
    return list(dict.fromkeys(line for one in told for line in drafts_of_files(*one)))


def model_notes(stages: Sequence[Options]) -> list[str]:
    """What is to be said of the model, its lengths and the layers that engines draft with before a run begins."""
    lines = (line for options in stages for line in (*_delta_net_notes(options), *_length_notes(options)))
    return [*drafting_notes(stages), *dict.fromkeys(lines)]


def _length_notes(options: Options) -> Iterator[str]:
    """That responses cannot be as long as they may."""
    most, response = options.rollout_max_context_len, options.rollout_max_response_len
    if most and response >= most and options.num_engines:
        yield (
            f"--rollout-max-response-len {response} is not below --rollout-max-context-len {most}: responses end "
            f"where prompt and response together have {most} tokens"
        )


def _delta_net_notes(options: Options) -> Iterator[str]:
    """That --bf16 rounds what files of a model with gated delta nets may hold in fp32; nothing where config.json is
    not to be read, which others say."""
    if not options.bf16 or options.debug_rollout_only:
        return
    if (found := _readable(options)) and any(found[2].get("linear_attention_freq") or ()):
        yield (
            "--bf16: A_log and dt_bias of the gated delta nets are rounded to bf16, also where the files hold them "
            "in fp32, and trained from there (docs/models.md); the engines get the rounded numbers"
        )


def begins_with(options: Options) -> Iterator[tuple[str, str]]:
    """(flag or words for it, path) of every file and directory that must be there when a stage begins."""
    named = {
        "--hf-checkpoint": options.hf_checkpoint,
        "--ref-load": options.ref_load,
        "--critic-load": options.critic_load,
        "--opd-teacher-load": options.opd_teacher_load,
        "--load": None if _may_be_empty(options) else options.load,
        "--eval-config": options.eval_config,
        "--lora-adapter-path": options.lora_adapter_path,
    }
    yield from ((flag, path) for flag, path in named.items() if path)
    yield from (("the prompt file", path) for path in prompt_files(options))


def _nothing_at(flag: str, path: str) -> UsageError | None:
    """The error for a path where there is not what `flag` wants, or None."""
    if not Path(path).exists():
        return UsageError(f"{flag} {path} does not exist here", _how_to_get(flag, path))
    if flag == "--lora-adapter-path" and not (Path(path) / ADAPTER_CONFIG).is_file():
        return UsageError(f"{flag} {path} holds no {ADAPTER_CONFIG}", AS_PEFT)
    if flag.endswith("load") and not holds_weights(Path(path)):
        hint = "give a directory that a run saved to, or a Hugging Face model"
        return UsageError(f"{flag} {path} holds no {TRACKER} and no config.json", hint)
    return None


def _how_to_get(flag: str, path: str) -> str:
    """What to do about a path that is not here: names of a hub are not fetched by a run."""
    hub = flag == "--hf-checkpoint" and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)
    return f"fetch it first: hf download {path} --local-dir DIR, and name DIR" if hub else "check the path"


def _may_be_empty(options: Options) -> bool:
    """Whether --load may name a directory that is not there yet: there are other weights to begin with, or it is where
    we save."""
    if options.load is None or options.ref_load:
        return True
    return options.save is not None and Path(options.load).resolve() == Path(options.save).resolve()


# ---- what Megatron's settings say of the model and ask of the packages


def refuse_wrong_settings(stages: Sequence[Options], same_packages: bool) -> None:
    """Raise UsageError for all that cannot be.

    Args:
        same_packages: whether this interpreter's are those of the nodes.
    """
    rules: list[Callable[[Options], object]] = [check_routing, check_model, check_layout, check_quantization]
    if same_packages:
        rules += [lambda o: raise_together([*missing_packages(o)]), check_gates]
    raise_together([error for options in stages for error in failures(rules, options)])


def same_packages(site: SiteProfile) -> bool:
    """Whether the nodes run this interpreter, so that its packages are theirs."""
    return site.python in (None, sys.executable) and site.container.kind == "none" and site.trainer.gpus_per_node != 0


def check_model(options: Options) -> None:
    """Raise UsageError if --spec or a flag of Megatron's says otherwise than config.json, where it can be read."""
    if (found := _described(options)) is None:
        return
    config, family, fields = found
    gpt = family.gpt(config)
    check_spec(options.spec, config)
    sizes = {name: config.get(name) for name in ("vocab_size", "max_position_embeddings")}
    check_model_args(gather_table("megatron", options.megatron, "[megatron]"), fields, {**gpt, **family.facts, **sizes})


def check_layout(options: Options) -> None:
    """Raise UsageError for all that the layout would cut and config.json does not let it, and for layers to draft with
    that the checkpoint lacks.

    Nothing where config.json cannot be read.
    """
    if found := _readable(options):
        config, family, fields = found
        rules = lambda o: check_draft_layers(o, config), lambda o: check_heads(o, family, config)
        wrong = undivided(options, fields, config.get("max_position_embeddings"))
        raise_together([*wrong, *failures(rules, options)])


def check_gates(options: Options) -> None:
    """Raise UsageError for a layout that this interpreter's Megatron-core cannot train attention with output gates
    in."""
    if found := _readable(options):
        raise_together(list(uncut_gates(options, found[2], version("megatron-core"))))


def check_quantization(options: Options) -> None:
    """Raise UsageError if the engines' weights are quantised in a way that no update can bring them to, where
    config.json can be read.
    """
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
    directory = shipped_config(options.hf_checkpoint) or options.hf_checkpoint or ""
    try:
        config = read_object(Path(directory), CONFIG)
        if config is None:
            return None
        config = with_text_part(config)
        family = find_family(config, directory)
        fields = family.transformer(config)
        check_fields(config, family, fields)
        return config, family, fields
    except DataError as error:
        raise UsageError(error.what, error.hint) from None


def _readable(options: Options) -> tuple[Config, Family, dict[str, Any]] | None:
    """As `_described`; None too for a config.json that is refused, which `check_model` says."""
    with contextlib.suppress(UsageError):
        return _described(options)
    return None


def missing_packages(options: Options, installed: Callable[[str], bool] | None = None) -> Iterator[UsageError]:
    """Settings whose package is not installed here; none where Megatron-core itself is not: this is not a place to
    train then."""
    there = installed or (lambda name: importlib.util.find_spec(name) is not None)
    yield from (error for tracker in trackers_of(options) for error in failures((check_tracker,), tracker))
    if not locate("megatron"):
        return
    for name, value, part in megatron_flags.settings_with_parts(options.megatron):
        packages = megatron_flags.PARTS[part]
        if not any(there(package) for package in packages):
            yield UsageError(
                f"{as_flag(name, value)} needs {part}, and {' or '.join(packages)} is not installed",
                "install it, or leave the flag out",
            )
