"""LoRA adapters next to Megatron's linear layers: built, cut over ranks, started, switched off, merged and saved.

Invariant: without --lora-rank a model has nothing of this.
"""
