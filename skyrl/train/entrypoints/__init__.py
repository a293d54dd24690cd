"""Modules by which SkyRL's scripts start: each is a `skyrl train` command under its old name."""
