"""Rollouts: episodes of a model in environments, run in parallel, as trajectories and training rows. Start reading with
`rollouts`.
"""
