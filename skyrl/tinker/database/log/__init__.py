"""The write-ahead log: `log_writer` puts requests into it.

request_log    what was asked of each model, and what came of it
replay_log     what a model is revived from
"""
