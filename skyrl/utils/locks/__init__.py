"""Locks on files and folders, which end with the process that holds them."""
