"""Engines that are started from here, on this machine.

options     what to start, how often, and where
vllm        the command of a vLLM server that fits the backend
launcher    starts, takes over, replaces and ends them
hangs       replaces those that have stopped answering
launched    what each begins as: it leaves a record of itself, and becomes the engine
"""
