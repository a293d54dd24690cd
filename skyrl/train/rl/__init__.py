"""Reinforcement learning: `run` sets up a run, `trainer` has its step, `update` trains on a batch, and `rollout_source`
provides trajectories.
"""
