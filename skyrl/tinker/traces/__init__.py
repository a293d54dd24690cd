"""Traces: what the requests of a session waited for, to be looked at in Perfetto.

timelines      moments of each request, of the newest of each session
trace_events   the same in Chrome's trace event format
"""
