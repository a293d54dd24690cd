"""A small model and a tokenizer made on the spot, for demonstrations and tests."""
