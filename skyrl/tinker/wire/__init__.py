"""Decoding of request bodies and encoding of answers, as JSON or protobuf. Large bodies are processed in threads.

parsing                        from a body to a typed request; read this first
schemas, management_schemas    schemas of JSON requests and responses
codec, tensors                 training passes and samples as arrays
too_large, legacy_json         oversized bodies; JSON answers for older clients
json_numbers, strict_json      incremental decoding and encoding of JSON
protobuf                       limits of a protobuf body before it is parsed; encoding of large arrays
pace                           pauses in long work, in which the event loop runs
sharing                        memory and threads, shared between senders
proto                          protobuf messages
"""
