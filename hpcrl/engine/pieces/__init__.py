"""The receiving end of weight updates: pieces become the parts of tensors that this worker holds.

Start with `piece_receiver.py`; `assembly.py` puts parts together, `borrowed_view.py` and `part_tensor.py` are the
tensors that vLLM's loaders are given.
"""
