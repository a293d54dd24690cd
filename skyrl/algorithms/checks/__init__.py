"""Checks of what losses and samplers are given, before it reaches a backend: sizes, types, ranges, names.

`requests` has passes and samples of the protocol, `provenance` which targets were sampled, `objectives` data of a
trainer's objective, `scores` what scores may be asked for; all use `arrays`. They raise `RequestError` with the field,
its value and the rule.
"""
