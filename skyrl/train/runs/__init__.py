"""Inspection of runs on disk from a terminal. `folder` reads a run, and `commands` implements `skyrl runs`."""
