"""Sharing between senders: memory for bodies (`body_room`), threads that work on them (`decode_pool`)."""
