"""Rollouts: episodes in which a model acts in environments. They run in parallel and yield trajectories and training
rows. Start reading with `rollouts`.
"""
