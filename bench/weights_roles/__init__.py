"""What takes part in bench/weights.py: trainer ranks and engine workers as processes, and hosts as network
namespaces."""
