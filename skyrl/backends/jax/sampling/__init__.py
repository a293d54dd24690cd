"""Continuous sampling on JAX: `sampler` admits and advances sequences, the rest is what it does that with.

waiting_line, sequences            who waits, who runs
page_table, prefill, reads         KV pages, shared prefixes, prompts read in chunks
decode, adapter_stacks, programs   the compiled steps and what they are given
prompt_logprobs                    scores of prompts
"""
