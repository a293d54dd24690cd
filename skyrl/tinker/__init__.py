"""The Tinker server: an API process and the engine process that it supervises.

api, local_server           entry points: `python -m skyrl.tinker.api`, and a server as a child process
api_process, serve, server  start and stop of the API process
http                        FastAPI: routes, errors, connections
requests                    lifecycle of queued requests in the API process
operations                  validation and execution of each kind of request
context                     state shared by routes and operations
checkpoints                 files on disk and their retention
database                    all SQL
processes                   launcher, engine supervisor, the channel between API and engine
wire                        decoding of requests, encoding of answers
identity                    ids and callers
metrics, traces, status     Prometheus metrics, request traces, status for operators
config, errors, results     options; errors; outcomes of requests
engine                      the engine process; it shares only the channel and the options with the other packages
"""
