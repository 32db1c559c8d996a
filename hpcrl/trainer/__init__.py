"""One rank of the trainer: fetch a batch, train on it, publish the weights, save, evaluate.

Start with `main.py`, which is the training loop; `step/` is what happens to one batch, `megatron/` the model,
`checkpoint/` saving and resuming, `start/` how ranks are started.
"""
