"""Machinery of configuration classes: parsing, types, `--help`. The fields themselves are defined elsewhere."""
