"""What a GPU of a rehearsal has: by --gpu-memory, by the name of the GPU, or by the profile of a site.

Invariants: a profile that says nothing of its GPUs is an error, never a guess; of several cards that have the type of
its name, the one with least memory counts; engines have the trainers' GPUs only where they are on nodes of that kind.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.site_file import load_site
from hpcrl.planning.formulas.gpu_specs import CARDS, DEFAULT, named


def memory_of_card(memory: float | None, gpu: str | None, site: str | None) -> float:
    """GiB of a GPU, from --gpu-memory, --gpu and --site of `hpcrl rehearse`, or some of them.

    Raises:
        UsageError: for a site whose GPUs are not known, or that has no effect.
    """
    if site is None:
        return named(gpu or DEFAULT).memory if memory is None else memory
    if memory is not None or gpu is not None:
        other = "--gpu" if gpu is not None else "--gpu-memory"
        raise UsageError(f"--site {site} has no effect with {other}", "give one of them")
    return _of_component(site, "trainer")


def memory_of_engines(stages: Iterable[Options], trainers: float, site: str | None) -> float:
    """GiB of a GPU of the engines, where the trainers' have so many.

    Raises:
        UsageError: for a site whose engines have nodes of their own, if it does not name their GPU.
    """
    apart = any(options.num_engines and not options.colocate for options in stages)
    if site is None or not apart:
        return trainers
    engine = load_site(site).engine
    return trainers if engine == type(engine)() else _of_component(site, "engine")


def _of_component(site: str, component: str) -> float:
    found = getattr(getattr(load_site(site), component), "gpu_type", None)
    if not found:
        raise UsageError(
            f"--site {site} has no effect: its [{component}] names no gpu_type",
            "give --gpu, or write gpu_type into it",
        )
    return least(found, site)


def least(gpu_type: str, site: str) -> float:
    """GiB of the smallest card of a type, as Slurm has it ("h100", "nvidia_a100", "gh200").

    Raises:
        UsageError: if no card has it.
    """
    kind = gpu_type.lower().replace("_", "-").removeprefix("nvidia-")
    fitting = [card.memory for name, card in CARDS.items() if name == kind or name.startswith(f"{kind}-")]
    if not fitting:
        raise UsageError(
            f"--site {site}: no GPU of gpu_type {gpu_type} is known",
            f"known: {', '.join(sorted(CARDS))}; give --gpu-memory in place of --site",
        )
    return min(fitting)
