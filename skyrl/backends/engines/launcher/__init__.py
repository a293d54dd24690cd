"""Engines that we launch on this machine.

options     command, number and devices of engines
vllm        command of a vLLM server that matches the backend
launcher    starts, adopts, replaces and stops engines
hangs       replacement of engines that stopped answering
launched    entry point of the engine process: writes its record, then executes the engine
"""
