"""Checkpoint folders on disk: how much they take, how long they stay, how they leave (archives, trash, adoption)."""
