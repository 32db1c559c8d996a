"""What bench/rollout.py starts beside itself."""
