"""Estimators, losses, importance corrections and KL estimators: pure functions of tensors, chosen by options.

What the trainer calls, in this order:

1. `hpcrl.config.rules.algorithm_needs.needs(options)` says which models and passes a run needs; no torch.
2. `advantages.compute_advantages(batch, options)` once a rollout, over a `RolloutBatch`: the table of all samples of
   the rollout, equal on every rank, and the token columns of the rank's own samples, whole responses.
3. `loss.token_weights(counts, options)` once an optimizer step or micro-batch: what each token counts in the loss.
4. `loss.compute_loss(tokens, options)` for each micro-batch, over a `TokenBatch`: a sum with its gradient, and a
   `Report` by name; `loss.compute_value_loss(...)` for a critic.

Invariant: nothing here knows of ranks, packing or layout.  What is on other ranks comes through two injected
functions: `RolloutBatch.total` (sums over data-parallel ranks) and `TokenBatch.sum_over_sample` (sums over the tokens
of each sample, wherever context parallelism put them).

To add an estimator, a loss or a correction, add a file to estimators/, losses/ or corrections/ (its name is the
option's value), or give the dotted path of a function with the same signature.
"""
