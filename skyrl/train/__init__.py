"""The trainers: SFT and RL from a typed configuration. `commands` has `skyrl train rl` and `skyrl train sft`.

config        the documented fields, their parser and the rules that check them
strategy      values of `trainer.strategy`: each has its effective fields and backend options
policies      models that a trainer updates and samples from: the client side of the backend interface
data          prompts, files, the order of an epoch
prepare       rows for RL from published data sets: `skyrl data prepare`
rollouts      episodes in environments, as trajectories
rl, sft       the two trainers
tracking      metrics, progress, dumps, plots
runs          finished and running runs on disk: `skyrl runs`
entrypoints   old names of `skyrl train rl`;  main_sft: old name of `skyrl train sft`
run_loop      loop of both trainers: evaluations, metrics and checkpoints;  checkpoints, lr_schedules
"""
