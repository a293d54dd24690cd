"""Outputs of a run: metrics for trackers, progress on the terminal, dumps of rollouts, plots of metrics."""
