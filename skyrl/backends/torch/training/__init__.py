"""Training on a worker: `passes` has passes over tiles and optimizer steps, `scores` scores of tokens."""
