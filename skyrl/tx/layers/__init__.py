"""Layers of decoders, shared by all architectures."""
