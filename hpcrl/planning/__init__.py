"""What a run will need, before it is submitted.

`memory/` says what a trainer rank, an engine's GPU and a host will take, by the pure functions in `formulas/`, which a
run uses as well. `rehearsal/` has every distinct rank take a step on fake tensors, with `fake_libraries/`.
"""
