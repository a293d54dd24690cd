"""The Tinker server: an API process and the engine process that it supervises.

api, local_server           doors: `python -m skyrl.tinker.api`, and a server as a child process
api_process, serve, server  start and stop of the API process
http                        FastAPI: routes, errors, connections
requests                    a request's life in the API process
operations                  what each request means
context                     what these share
checkpoints                 files on disk, and how long they stay
database                    all SQL
processes                   launcher, engine supervisor, the channel between API and engine
wire                        bytes to typed requests and back
identity                    ids and callers
config, errors, results     options; what goes wrong; what is answered
engine                      the engine process; it shares with the others only the channel and the options
"""
