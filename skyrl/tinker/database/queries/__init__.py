"""Queries of sessions, models, checkpoints and settings.

lookup                       single rows by id
listings, search             lists, newest first
checkpoint_rows              named checkpoints, read and written
last_seen, sample_counts     activity of clients, written periodically
settings                     the server's own settings
"""
