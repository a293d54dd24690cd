"""Rollouts: episodes of a model in environments, in parallel, as trajectories and rows to train on. `rollouts` is the
door.
"""
