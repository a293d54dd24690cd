"""The trainers: SFT and RL from a typed configuration. `commands` has `skyrl train rl` and `skyrl train sft`.

config        the documented fields, their parser and their rules
strategy      by the names of `trainer.strategy`: which fields take effect, and what a backend is told
policies      models that are trained and sampled: the client side of the backend contract
data          prompts, files, the order of an epoch
prepare       rows for RL from published data sets: `skyrl data prepare`
rollouts      episodes in environments, as trajectories
rl, sft       the two trainers
tracking      metrics, progress, dumps, plots
runs          runs on disk, in a terminal: `skyrl runs`
entrypoints   old names of `skyrl train rl`;  main_sft, of `skyrl train sft`
run_loop      evaluations, metrics and checkpoints around the steps of both;  checkpoints, lr_schedules
"""
