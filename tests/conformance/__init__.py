"""Conformance kit: every fact that a backend owes to server and trainers."""
