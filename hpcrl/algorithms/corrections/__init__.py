"""Corrections for the difference between the engine that sampled and the trainer that learns.

Each file holds `correct(tokens, options) -> Correction`.  The ratio is exp(tokens.trainer - tokens.rollout): the
trainer's probability of a token under the weights that sampled, over the engine's.  Nothing here carries a gradient.
"""
