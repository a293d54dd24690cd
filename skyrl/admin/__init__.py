"""Commands for operators of a server, and for those who plan one.

backup      copy the state of a running server
doctor      find problems of an installation or a running server, with fixes
plan        plan memory and speed of a model on devices that need not be here
status      show the activity of a running server, as text or JSON
keys        list the keys of a key file
usage       show the usage of all tenants of a running server
lists       list and control the models and requests of a running server
operator    HTTP client and operator key of these commands
words       formatting of numbers
"""
