"""Runs as they are on disk, in a terminal: `folder` reads one, `commands` has `skyrl runs`."""
