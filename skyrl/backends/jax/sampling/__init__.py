"""Sampling on JAX: `runner` implements the `ModelRunner` of `backends.common.sampling`.

adapter_stacks     adapters of rows that share a call
programs           compiled programs
"""
