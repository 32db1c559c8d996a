"""The options as text: `hpcrl run --help`, docs/options.md, and the lists of what passes through.

Invariant: made from the declarations alone, so it cannot differ from them.
"""

from __future__ import annotations

import textwrap
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.passthrough import OWNED, Table, dashed, settings, spellings
from hpcrl.config.setting_names import kind_of_field, sections
from hpcrl.errors import UsageError

_INTRO = """\
# Options

Made by `hpcrl options --write docs/options.md` from the declarations in `hpcrl/config/sections/`; do not
edit it directly.

Each option is a flag (`--num-rollout 20`) and a key of a recipe with underscores (`num_rollout = 20`). `--x` turns a
switch on, `--no-x` off. A list takes its words after the flag (`--rollout-stop a b`), an object is JSON; in TOML they
are a list and a table. A flag takes precedence over a stage's table, and that over the top of the recipe. A plain flag
counts in every stage; `--STAGE.option`, such as `--grpo.lr 2e-5`, counts in that stage. Unknown names are errors with a
suggestion, all reported together; options without an effect are errors too. The column `source` names the project from
which an option takes its name and meaning.
"""

_FOREIGN = """\
## Megatron-core and vLLM

`hpcrl options --megatron` and `hpcrl options --vllm` list the settings of the installed packages.

- **Megatron-core**: every field of `TransformerConfig`, `ModelParallelConfig`, `OptimizerConfig` and
  `DistributedDataParallelConfig`, by Megatron's own flag (`--recompute-granularity full`, `--no-rope-fusion`), by a key
  of the same name, or in the recipe's table `[megatron]`.
- **vLLM**: every engine and server argument behind a prefix (`--vllm-max-num-seqs 64`,
  `--vllm-no-enable-prefix-caching`), or in the recipe's table `[vllm]` without it (`max_num_seqs = 64`).

If the package is not installed (login node), the process that uses a setting checks it.

hpcrl decides these itself, and refuses them with the reason:
"""


def default(field: Any) -> str:
    """A field's default as a user would write it; "" for none."""
    value = field.get_default(call_default_factory=True)
    if value is None or value == [] or value == {}:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown() -> str:
    """The text of docs/options.md."""
    parts = [_INTRO]
    for title, names in sections():
        rows = ["| Flag | Value | Default | Source | Meaning |", "|---|---|---|---|---|"]
        for name in names:
            field = Options.model_fields[name]
            kind = kind_of_field(field)
            value = "switch" if kind.base == "bool" else f"{kind.metavar} {kind.bounds}".strip()
            cells = (f"`--{dashed(name)}`", value, default(field), _source(field), field.description)
            rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, _FOREIGN, _refused()])


def _refused() -> str:
    lines = []
    for table, title in (("megatron", "Megatron-core"), ("vllm", "vLLM")):
        reasons: dict[str, list[str]] = {}
        for name, why in OWNED[table].items():
            reasons.setdefault(why, []).append(f"`{name}`")
        lines += [f"- {title}, {', '.join(names)}: {why}." for why, names in reasons.items()]
    return "\n".join(lines) + "\n"


def _source(field: Any) -> str:
    return field.json_schema_extra["source"]


_FIRST = """
run_dir seed num_rollout loop deterministic_mode actor_num_nodes actor_num_gpus_per_node rollout_num_gpus
rollout_num_gpus_per_engine colocate hf_checkpoint load ref_load save save_interval bf16 prompt_data input_key
label_key apply_chat_template rollout_batch_size n_samples_per_prompt rollout_max_response_len rollout_temperature
custom_generate_function_path rm_type custom_rm_path eval_interval eval_prompt_data n_samples_per_eval_prompt
loss_type advantage_estimator eps_clip eps_clip_high use_kl_loss kl_loss_coef global_batch_size use_dynamic_batch_size
max_tokens_per_gpu tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size lr lr_warmup_iters weight_decay
"""
#: what a first run sets or asks about, shown by `hpcrl run --help`; all others are in --help-all
FIRST = frozenset(_FIRST.split())


def run_help(every: bool = True, width: int = 110) -> str:
    """The options of `hpcrl run`, by section, with default and source.

    Args:
        every: all of them; otherwise those of FIRST, and how the others are shown.
    """
    lines, left = [], 0
    for title, declared in sections():
        names = [name for name in declared if every or name in FIRST]
        left += len(declared) - len(names)
        if not names:
            continue
        lines.append(f"\n{title}:")
        for name in names:
            field = Options.model_fields[name]
            facts = [f"default {default(field)}"] if default(field) else []
            facts += [_source(field)] if _source(field) != "hpcrl" else []
            aside = f" [{'; '.join(facts)}]" if facts else ""
            lines += _entry(
                f"--{dashed(name)} {kind_of_field(field).metavar}".rstrip(), field.description + aside, width
            )
    if left:
        lines.append(f"\n{left} more, by topic: hpcrl run --help-all, or docs/options.md")
    return "\n".join(lines)


def _entry(head: str, text: str, width: int) -> list[str]:
    """One flag and its help, hung at column 34."""
    body = textwrap.wrap(text, width - 34)
    if len(head) < 31:
        return [f"  {head:<31} {body[0]}", *(" " * 34 + line for line in body[1:])]
    return [f"  {head}", *(" " * 34 + line for line in body)]


def foreign_help(table: Table, width: int = 110) -> str:
    """Every setting of the installed package that passes through, with its flags and its own help.

    Raises:
        UsageError: if the package is not installed here.
    """
    found = settings(table)
    if found is None:
        raise UsageError(f"{table} is not installed here", "see docs/install.md")
    flags: dict[str, list[str]] = {}
    for flag, target in spellings(table).items():
        if target.kind.base != "none":
            flags.setdefault(target.field, []).append(f"--{flag}")
    lines, owner = [], ""
    for name, names in flags.items():
        setting = found[name]
        if name in OWNED[table]:
            continue
        if setting.owner != owner:
            owner = setting.owner
            lines.append(f"\n{owner}:")
        aside = f" [default {setting.default}]" if setting.default not in ("", "None", "False") else ""
        value = "" if setting.kind.base == "bool" and not setting.kind.many else setting.kind.metavar
        brief = setting.help.split(". ")[0].rstrip(".")
        lines += _entry(f"{', '.join(names)} {value}".rstrip(), f"{brief}{aside}".strip() or "-", width)
    return "\n".join(lines)
