"""What only trainer ranks on CPUs use."""
