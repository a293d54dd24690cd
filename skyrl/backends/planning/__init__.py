"""Plan of a model on devices that are not here: memory, work, rates (`skyrl plan`).

devices    sizes and speeds of devices: presets, or a file
estimate   an estimate of one layout, as a backend computes it from its own memory plan
flops      floating-point operations of training and decoding
rates      time of a step by a roofline, and the limit

`registry.find_planner` returns a backend's planner. A planner reads config.json only.
"""
