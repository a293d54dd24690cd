"""Traces of a session's requests and their phases, for Perfetto.

timelines      timestamps of the most recent requests of each session
trace_events   conversion to Chrome's trace event format
"""
