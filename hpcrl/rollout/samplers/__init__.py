"""From a prompt to its samples, graded: one response of an engine, a label, or a custom function in its own process.

Open `sampler.py` first: it says what a sampler is.  `custom.py` is the rollout process's side of custom functions,
`function_runner.py` what those do.
"""
