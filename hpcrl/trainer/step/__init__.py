"""From a share of a batch to optimizer steps and metrics.  Start with `train_batch.py`."""
