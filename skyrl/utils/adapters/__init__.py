"""Adapter files of any trainer: reading, normalization, description, conversion and merging. Uses only NumPy.

stored        an adapter in a folder or a tar
naming        names of tensors, and their pairs of matrices
layouts       separate and fused modules: query, key and value; gate and up
experts       separate and fused experts of a layer
plain         normal form for backends: one rank and one scale for all modules
fitting       normal form, checked against a base model
describing    description of an adapter
merging       merging into a base model, tensor by tensor
on_server     upload to and download from a server
commands      `skyrl adapter`
"""
