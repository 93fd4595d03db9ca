"""What a training loop of one's own needs."""
