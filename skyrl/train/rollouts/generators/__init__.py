"""Generators of one's own: the loop of an agent in the place of environments and turns.

generator    what one is, and how a configuration names it
conformance  a test of a class of one's own, without a model
"""
