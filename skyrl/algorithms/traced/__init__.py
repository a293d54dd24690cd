"""Losses that a client has traced: a graph of array operations, checked once and computed inside the training step.

`graph` reads the wire's graph into a specification that can be compared, stored and pickled. `operations` and
`reductions` are the list of what a graph may call; there is nothing else it can reach. `ragged` has the values that
they work on: a graph is written for one datum, but datums lie packed in rows, so a value knows which axis is the
datum's tokens. `objective` is the loss as a backend takes it.
"""
