"""What runs keep of the code that they have compiled."""
