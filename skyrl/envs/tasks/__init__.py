"""Environments by name, one to a file, and the services that some of them use (`retrieval`, `sqlite`, `http`)."""
