"""The only SQL: tables, migrations, the log of requests, and every query.

`database` reads and writes in threads, `tables` has the rows; `request_log` and `replay_log` are the write-ahead log.
"""
