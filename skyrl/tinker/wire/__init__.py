"""Bodies of requests and answers: bytes to typed requests and back, as JSON or protobuf, in threads where they are
large.

`parsing` is where a body comes in, `schemas` and `management_schemas` are the types, `decode_pool` and `body_room`
share threads and memory between senders.
"""
