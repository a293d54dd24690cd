"""Locks on files, folders and buckets. A lock ends with the process that holds it."""
