"""Environments by name, one to a file; `answers` compares those of mathematics, `arithmetic_data` writes rows."""
