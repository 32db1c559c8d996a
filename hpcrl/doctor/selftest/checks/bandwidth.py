"""How fast the ranks add up, as a share of what the links between them carry."""

from __future__ import annotations

from hpcrl.doctor.selftest.registry import Check, CheckContext, Outcome, Skip
from hpcrl.run.process import run_command

SLOW = 0.25  #: of the link: below this the fast network or NVLink is not in use
ROUNDS = 5


def nvlink(text: str) -> float | None:
    """Bytes a second one way over all links of the first GPU in `nvidia-smi nvlink --status`; None where it shows
    none."""
    total, gpus = 0.0, 0
    for line in text.splitlines():
        gpus += line.startswith("GPU ")
        words = line.split()
        if gpus == 1 and words[:1] == ["Link"] and words[-1:] == ["GB/s"]:
            total += float(words[-2]) * 1e9
    return total or None


def work(place: CheckContext) -> Outcome:
    """An all-reduce, timed as `hpcrl doctor --nodes` does."""
    from hpcrl.trainer.start.network_speed import DEFAULT_BYTES, measure

    if place.world == 1:
        raise Skip("one rank: there is nothing to send")
    kind = "nccl" if place.device.type == "cuda" else "gloo"
    found = measure(DEFAULT_BYTES[kind], ROUNDS, place.device)
    speed = found["bus_bandwidth"]
    link, name = place.link, "the network"
    if place.hosts == 1:
        answer = run_command(["nvidia-smi", "nvlink", "--status"], 20.0)
        link = nvlink(answer.out) if answer.code == 0 else None
        name = "NVLink"
    numbers = {
        "bus_bytes_per_second": speed,
        "bytes": found["bytes"],
        "backend": found["backend"],
        "hosts": place.hosts,
    }
    shown = f"{speed / 1e9:.3g} GB/s bus bandwidth over {place.world} ranks of {place.hosts} hosts ({found['backend']})"
    if link is None:
        return Outcome("passed", f"{shown}; the link's own rate is not known", numbers)
    numbers |= {"link_bytes_per_second": link, "share_of_link": speed / link}
    shown += f", {speed / link:.0%} of {name}'s {link / 1e9:.3g} GB/s"
    if speed < SLOW * link and kind == "nccl":
        return Outcome(
            "failed", f"{shown}: less than {SLOW:.0%}; see NCCL_DEBUG=INFO and the site's interface and env", numbers
        )
    return Outcome("passed", shown, numbers)


CHECK = Check("an all-reduce uses the links between the ranks", 30, "ranks", work, ("torch",))
