"""`skyrl doctor`: read-only checks of an installation, of a server's state and of a running server.

finding         result of a check
machine         Python, packages, devices, limits, the clock
model           files of the base model
state           folders, database and port
server          a running server, over HTTP
command         selection of checks, and output

A check is a function that takes its subject and returns a `Finding`. The check is named after the function. To add one,
write the function and add it to `CHECKS` of its file.
"""
