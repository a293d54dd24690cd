"""Commands of who operates a server, which look at it from outside.

backup      a copy of the state of a server that runs
doctor      what is wrong with an installation or a running server, and what to do about it
status      what a running server is doing; its screen is `screen`
lists       its models and requests
operator    how these ask the server, and with which key
words       numbers as people read them
"""
