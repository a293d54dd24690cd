"""Conformance kit: the requirements of the server and the trainers for backends."""
