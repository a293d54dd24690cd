"""Training on torch, as a worker computes it: `passes` over tiles and optimizer steps, and `scores` of tokens."""
