"""What trainer and engine take together of a GPU that they share (--colocate), turn by turn, and what lies on the host
meanwhile.

Invariant: pure functions of the two estimates; without --no-offload-... a turn holds what `hpcrl.handover` lets be
there.
"""

from __future__ import annotations

from hpcrl.config.options import Options
from hpcrl.memory.engine import EngineTerms
from hpcrl.memory.training import GIB, Terms

#: what a sleeping vLLM keeps on a GPU: not computed, an allowance for its CUDA context, NCCL and graphs
ASLEEP = 2 * GIB
TRAINS = "the trainer trains"
SAMPLES = "the engines sample"
UPDATES = "weights are updated"
STATE = ("weights", "gradients", "optimizer")


def turns(options: Options, trainer: Terms, engine: EngineTerms) -> dict[str, float]:
    """Bytes on one GPU while ..., by turn."""
    state = sum(trainer.gpu[name] for name in STATE)
    stays = trainer.gpu["libraries"] + (0.0 if options.offloads_train else state)
    exports = trainer.gpu["libraries"] + trainer.gpu["weight update"]
    exports += trainer.gpu["weights"] if options.offloads_train else state
    asleep = ASLEEP if options.sleep_level else engine.total
    loads = ASLEEP + engine.gpu["weights"] + engine.gpu["weight update"] if options.sleep_level else engine.total
    return {TRAINS: trainer.total + asleep, SAMPLES: engine.total + stays, UPDATES: exports + loads}


def put_away(options: Options, trainer: Terms, engine: EngineTerms) -> float:
    """Bytes of host memory for one GPU's trainer and engine while they are not on it."""
    away = trainer.gpu["weights"] + trainer.gpu["optimizer"] if options.offloads_train else 0.0
    return away + (engine.gpu["weights"] if options.sleep_level == 1 else 0.0)
