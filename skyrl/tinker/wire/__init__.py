"""Bodies of requests and answers: bytes to typed requests and back, as JSON or protobuf, in threads where they are
large.

parsing                        where a body comes in
schemas, management_schemas    what it may say
codec, tensors                 training passes and samples, as arrays
too_large, legacy_json         bodies that are not read to the end; answers for older clients
json_numbers, strict_json      JSON in pieces, in and out
protobuf_scan                  a look at a protobuf body before it is parsed
protobuf_writer                large arrays in protobuf
pace                           pauses of long work
sharing                        memory and threads, shared between senders
proto                          protobuf's messages
"""
