"""An engine that takes turns with the trainer on the same GPUs (--colocate): its route, and what a CPU gives back."""
