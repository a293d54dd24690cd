"""Sampling on a worker: `sampling_worker` fills and reads a KV cache, `drawing` draws tokens."""
