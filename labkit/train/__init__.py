"""Training: batches, losses, optimisers, the loop, held-out evaluation."""
