"""Every plugin point: which option takes the dotted path of a custom function, who calls it, and with what.

Invariant: this table is the one place that says how a custom function is called; each role loads all of its points when
it starts (`load_points`), so a wrong path or signature ends the run before any engine is waited for.  docs/customise.md
has a row and a tested example for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config.custom_functions import is_foreign, load_class, load_function, missing
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import is_path
from hpcrl.errors import UsageError

Role = Literal["rollout", "grading", "generating", "trainer"]


@dataclass(frozen=True)
class Point:
    """A plug-in point: an option that takes the dotted path of a function or class of the user's.

    Attributes:
        role: whose process calls it.
        parameters: with what, in order.
        keywords: by name besides.
        methods: of a class, with theirs.
        own: the option takes nothing but dotted paths, no names of hpcrl's.
    """

    role: Role
    parameters: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    methods: Mapping[str, tuple[str, ...]] | None = None
    own: bool = False

    def load(self, path: str, flag: str) -> Callable[..., Any]:
        """The function or class at `path`.

        Raises:
            UsageError: if it cannot be used so.
        """
        if self.methods is not None:
            return load_class(path, flag, self.parameters, self.methods)
        return load_function(path, flag, self.parameters, self.keywords)


#: option -> how it is called; where an option may also be a name, a dotted path alone is meant here
POINTS: dict[str, Point] = {
    "dynamic_sampling_filter_path": Point("rollout", ("options", "samples")),
    "buffer_filter_path": Point("rollout", ("options", "rollout_id", "buffer", "count")),
    "custom_rm_path": Point("grading", ("options", "sample"), own=True),
    "rm_type": Point("grading", ("options", "sample")),
    "rollout_function_path": Point("rollout", ("options", "rollout_id", "data_source"), ("evaluation",), own=True),
    "eval_function_path": Point("rollout", ("options", "rollout_id", "data_source"), ("evaluation",), own=True),
    "data_source_path": Point(
        "rollout", ("options",), methods={"take": ("count",), "state": (), "restore": ("state",)}, own=True
    ),
    "custom_generate_function_path": Point("generating", ("args", "sample", "sampling_params"), own=True),
    "rollout_sample_hook_path": Point("rollout", ("options", "sample"), ("rollout_id", "evaluation"), own=True),
    "rollout_sample_filter_path": Point("rollout", ("options", "groups"), own=True),
    "rollout_all_samples_process_path": Point("rollout", ("options", "groups", "data_source"), own=True),
    "custom_rollout_log_function_path": Point(
        "rollout", ("rollout_id", "options", "samples", "metrics", "seconds"), own=True
    ),
    "custom_eval_rollout_log_function_path": Point("rollout", ("rollout_id", "options", "data", "metrics"), own=True),
    "custom_reward_post_process_path": Point("rollout", ("options", "samples"), own=True),
    "custom_convert_samples_to_train_data_path": Point("rollout", ("options", "samples"), own=True),
    "advantage_estimator": Point("trainer", ("batch", "options")),
    "pg_loss_type": Point("trainer", ("tokens", "options")),
    "custom_tis_function_path": Point("trainer", ("tokens", "options")),
    "kl_loss_type": Point("trainer", ("difference", "ratio")),
    "custom_loss_function_path": Point("trainer", ("tokens", "options"), own=True),
    "custom_pg_loss_reducer_function_path": Point("trainer", ("counts", "options"), own=True),
    "custom_model_provider_path": Point(
        "trainer", ("options", "config", "build"), ("pre_process", "post_process", "vp_stage"), own=True
    ),
    "custom_update_weight_post_write_path": Point("trainer", ("options", "version_dir", "rollout_engines"), own=True),
    "custom_megatron_init_path": Point("trainer", ("options",), own=True),
    "custom_megatron_before_log_prob_hook_path": Point("trainer", ("options", "model", "store_prefix"), own=True),
    "custom_megatron_before_train_step_hook_path": Point(
        "trainer", ("options", "rollout_id", "step_id", "model", "optimizer", "scheduler"), own=True
    ),
    "rollout_data_postprocess_path": Point("trainer", ("options", "rollout_id", "rollout_data"), own=True),
}


def option_text(name: str) -> str:
    """An option as an error names it."""
    return "--" + name.replace("_", "-")


def paths_of(options: Options, name: str) -> list[str]:
    """The dotted paths that an option was given: none, one or several."""
    value = getattr(options, name)
    values = value if isinstance(value, list) else [value] if value else []
    return [path.partition(":")[0] for path in values if POINTS[name].own or is_path(path)]


def missing_functions(options: Options) -> list[UsageError]:
    """An error for each custom function that is not in the files of its module, or cannot be called as it would be
    there; none is run for it."""
    if "PYTHONPATH" in options.train_env_vars:  # the roles look elsewhere
        return []
    found = [
        (option_text(name), path, *missing(path, options.code_path, point.parameters, point.keywords))
        for name, point in POINTS.items()
        for path in paths_of(options, name)
        if not is_foreign(path)
    ]
    return [UsageError(f"{flag} {path}: {why}", hint) for flag, path, why, hint in found if why]


def load_own(name: str, path: str) -> Callable[..., Any]:
    """The function at `path`, given to the option `name`.

    Raises:
        UsageError: if it cannot be used there.
    """
    return POINTS[name].load(path, option_text(name))


def load_points(options: Options, role: Role) -> dict[str, list[Callable[..., Any]]]:
    """Option -> its functions, of every point of a role that is in use.

    Raises:
        UsageError: for the first that cannot be used.
    """
    return {
        name: [load_own(name, path) for path in paths_of(options, name)]
        for name, point in POINTS.items()
        if point.role == role and paths_of(options, name)
    }
