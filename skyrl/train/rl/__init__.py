"""Reinforcement learning. `run` sets up a run, `trainer` implements a step, `update` trains on a batch, and
`rollout_source` provides trajectories.
"""
