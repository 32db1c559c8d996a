"""LoRA adapters on trainer ranks."""
