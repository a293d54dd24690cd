"""The write-ahead log. `log_writer` appends requests to it.

request_log    requests of each model, and their outcomes
replay_log     the part of the log that revives a model
"""
