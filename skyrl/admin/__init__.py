"""Commands for operators of a server.

backup      copy the state of a running server
doctor      find problems of an installation or a running server, with fixes
status      show the activity of a running server, as text or JSON
keys        list the keys of a key file
usage       show the usage of all tenants of a running server
lists       list and control the models and requests of a running server
operator    HTTP client and operator key of these commands
words       formatting of numbers
"""
