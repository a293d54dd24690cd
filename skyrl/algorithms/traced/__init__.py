"""Losses traced by clients. A loss is a graph of array operations, checked once and evaluated in the training step.

`graph` parses the graph of a request into a text that can be compared, stored and pickled. `operations` and
`reductions` define the operations that a graph may call. A graph has no access to anything else. `ragged` defines
values: a graph is written for one datum, but datums are packed in rows, so a value knows which axis is the datum's
tokens. `objective` makes the graph a loss for backends.
"""
