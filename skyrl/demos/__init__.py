"""Demonstrations that need no download: two adapters at once (`skyrl demo`), and RL that learns to add (`skyrl
demo-rl`).
"""
