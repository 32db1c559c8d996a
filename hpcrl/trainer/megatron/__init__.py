"""All that is particular to Megatron-core: configuration, model, attention, Hugging Face weights, the CPU.

Start with `model.py`, which builds the model and its optimizer.
"""
