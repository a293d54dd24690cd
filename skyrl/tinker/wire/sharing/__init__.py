"""Fair sharing between senders: memory for bodies (`body_quota`), threads for decoding and encoding (`decode_pool`)."""
