"""One LoRA adapter: its settings, which matrices it adapts, its files, and how engines serve it."""
