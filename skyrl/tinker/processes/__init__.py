"""The server's processes, and what they say to each other.

`launcher` starts the API process, `engine_supervisor` the engine process; `messages` are the frames on `channel`
between these two. `heartbeat` and `crash_record` find out which request makes an engine hang or die.
"""
