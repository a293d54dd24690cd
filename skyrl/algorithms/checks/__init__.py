"""Checks of the inputs of losses and samplers, before they reach a backend: sizes, types, ranges, names.

`requests` checks passes and samples of the protocol, `provenance` which targets were sampled, `objectives` the data of
a trainer's objective, `traced` the data of traced losses, and `scores` the requested scores. All of them use `arrays`.
They raise `RequestError` with the field, its value and the rule.
"""
