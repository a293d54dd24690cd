"""Reports of a run: metrics to trackers, progress to the terminal, rollouts to files, plots of metrics."""
