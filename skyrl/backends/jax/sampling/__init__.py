"""Continuous sampling on JAX: `sampler` admits and advances sequences, the rest is what it does that with.

waiting_line, sequences            who waits, who runs
prefill, reads                     prompts read in chunks into pages (`backends.common.page_table` says whose)
decode, adapter_stacks, programs   the compiled steps and what they are given
prompt_logprobs                    scores of prompts
"""
