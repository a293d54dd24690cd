"""Fair shares for each sender: of memory for bodies (`body_quota`), and of threads for coding (`decode_pool`)."""
