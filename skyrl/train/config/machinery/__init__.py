"""Configuration classes without fields of any trainer: parsing, types, `--help`."""
