"""Fair sharing between senders. `body_quota` divides memory for bodies, and `decode_pool` divides threads."""
