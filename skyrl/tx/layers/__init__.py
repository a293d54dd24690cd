"""Layers that architectures are made of."""
