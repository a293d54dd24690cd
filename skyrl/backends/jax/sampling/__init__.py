"""Sampling on JAX: `runner` computes what `backends.common.sampling` asks for.

adapter_stacks     adapters of rows that share a call
programs           the compiled steps
"""
