"""The worker extension plus two calls."""

from hpcrl.engine import reload, repairs
from hpcrl.engine.receiver import WorkerExtension


class Extension(WorkerExtension):
    def break_repairs(self) -> None:
        """From now on a tied head stays as it is, as in stock vLLM."""
        reload.pack_heads = lambda model: None

    def mend_repairs(self) -> None:
        """Undo that."""
        reload.pack_heads = repairs.pack_heads
