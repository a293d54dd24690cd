"""Continuous batching for any backend: `sampler` admits and advances sequences, a `model_runner` computes for it.

waiting_queue, sequences            waiting requests, running sequences
prefill, prefill_queue              chunked prefill into cache pages (`backends.common.page_table` manages pages)
state_slots                         slots for recurrent states, for models that have them
decode                              batches for decode calls, and handling of their results
prompt_logprobs                     scores of prompt tokens
random_numbers                      the random number for each token
"""
