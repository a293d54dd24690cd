"""The server's processes, and the messages between them.

`launcher` starts the API process, and `engine_supervisor` the engine process. `messages` defines the frames that these
two exchange over `channel`. `heartbeat` detects an engine that hangs, and `crash_record` identifies the request that
makes an engine crash or hang.
"""
