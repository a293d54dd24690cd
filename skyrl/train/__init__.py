"""The trainers: SFT and RL from a typed configuration. `commands` has `skyrl train rl` and `skyrl train sft`.

config        the documented fields, their parser and their rules
strategy      which fields take effect, and what a backend is told
data          prompts, files, the order of an epoch
rollouts      episodes in environments, as trajectories
rl, sft       the two trainers
tracking      metrics, progress, dumps, plots
model_client  a model on a backend, for a trainer;  checkpoints, lr_schedules
"""
