"""Continuous sampling for any backend: `sampler` admits and advances sequences, a `model_runner` computes for it.

waiting_queue, sequences            who waits, who runs
prefill, reads                     prompts read in chunks into pages (`backends.common.page_table` says whose)
state_slots                        whose are the states of models that have such
decode                             which sequences are drawn together, and what becomes of what is drawn
prompt_logprobs                    scores of prompts
random_numbers                     the number that each token is drawn by
"""
