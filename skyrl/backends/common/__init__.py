"""Policy that backends share: which model, version or page is where, and what goes when. It sees no array of a device.

packing            sequences into tiles
offload            models on the device, in host memory, on disk
versions           published weights: who uses which, and which are in memory
page_table         pages of a KV cache, and prefixes that prompts share
background_writer  files, in threads, each model's in order
waiting            what an operation yields while it waits
"""
