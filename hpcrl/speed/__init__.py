"""How fast a run is, by what it computes and what a GPU is rated for: `flops.py` counts operations, `cards.py` has the
rates, and a run logs what it reached (docs/memory.md).
"""
