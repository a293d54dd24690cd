"""Policy that backends share: which model, version or page is where, and what goes when. It sees no array of a device.

models             operations on models, and their files
sampling           continuous sampling, for which a backend computes
packing            sequences into tiles
pass_output        what comes back of these
adamw              hyper-parameters of a step
memory_plan        what a device's memory is for
offload            models on the device, in host memory, on disk
versions           published weights: who uses which, and which are in memory
page_table         pages of a KV cache, and prefixes that prompts share
background_writer  files, in threads, each model's in order
waiting            what an operation yields while it waits
"""
