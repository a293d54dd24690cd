"""Commands for operators of a server.

backup      copy the state of a running server
doctor      find problems of an installation or a running server, with fixes
status      show the activity of a running server, on the screen of `screen`
lists       list and control its models and requests
operator    HTTP client and key of these commands
words       formatting of numbers
"""
