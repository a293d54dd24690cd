"""Sampling on torch, as a worker computes it: `sampling_worker` fills and reads a KV cache, `drawing` draws tokens."""
