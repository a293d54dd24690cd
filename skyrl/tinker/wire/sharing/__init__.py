"""Sharing between senders: memory for bodies (`body_quota`), threads that work on them (`decode_pool`)."""
