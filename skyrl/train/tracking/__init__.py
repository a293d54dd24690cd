"""Reports of a run: metrics to trackers, progress to the terminal, rollouts to files, rewards as a plot."""
