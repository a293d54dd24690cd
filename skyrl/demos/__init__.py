"""Demos that need no download: two adapters at once (`skyrl demo`), and RL on sums (`skyrl demo-rl`)."""
