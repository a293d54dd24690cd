"""Custom generators. A generator is an agent's own loop, used in place of environments and turns.

generator    interface of generators, and their lookup by the name in a configuration
conformance  test of a custom generator, without a model
"""
