"""Reinforcement learning: `run` opens a run, `trainer` is its loop, `update` a step, `rollout_source` where samples
come from.
"""
