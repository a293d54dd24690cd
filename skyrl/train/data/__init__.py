"""Prompts from files and data sets, in an order that a resumed run repeats."""
