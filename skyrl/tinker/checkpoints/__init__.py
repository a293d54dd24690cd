"""Checkpoint folders on disk: disk budget, retention, downloads and uploads, trash, adoption."""
