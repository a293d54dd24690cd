"""Queries of sessions, models, checkpoints and settings.

lookup                       one by its id
listings, session_search     many, newest first
checkpoint_rows              named checkpoints, read and written
last_seen, sample_counts     what clients did last, written now and then
settings                     what the server keeps for itself
"""
