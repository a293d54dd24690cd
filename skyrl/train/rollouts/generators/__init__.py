"""Custom generators: the loop of an agent, in place of environments and turns.

generator    interface of a generator, and its lookup by the name in a configuration
conformance  test of a custom generator, without a model
"""
