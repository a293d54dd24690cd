"""Adapters as files, whoever trained them: read, put into one form, described, converted and merged. NumPy alone.

stored        an adapter in a folder or a tar
naming        names of tensors, and the pairs of matrices that they make up
layouts       modules that a model has apart, or fused: query, key and value, gate and up
experts       experts of a layer, each by itself or fused
plain         one rank and one scale for all modules, which is what backends load
fitting       the same, checked against the base model that it is loaded for
describing    what there is to say about an adapter
merging       a base model with an adapter's product added, tensor by tensor
on_server     adapters sent to a server, and fetched from it
commands      `skyrl adapter`
"""
