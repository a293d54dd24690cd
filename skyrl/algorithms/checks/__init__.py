"""Checks of the inputs of losses and samplers, before they reach a backend: sizes, types, ranges, names.

`requests` checks training passes and sample requests, `provenance` which targets were sampled, `objectives` the data of
a trainer's objective, `traced` the data of traced losses, and `scores` the requested scores. `arrays` has the helpers.
All checks raise `RequestError` with the field, its value and the rule.
"""
