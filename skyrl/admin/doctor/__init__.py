"""`skyrl doctor`: checks of an installation, of a server's state and of a server that runs. Nothing is changed by it.

finding         what a check says
machine         Python, packages, devices, limits, the clock
model           the files of the base model
state           folder and database, the port
server          a server that runs, asked over HTTP
command         which checks are made, and how they are told

A check is a function of its subject that returns a `Finding`; its name is the function's. To add one, write it and
name it in the `CHECKS` of its file.
"""
