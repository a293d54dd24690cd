"""Sampling engines: servers that sample for a backend, which keeps the models.

protocol, http_engine   what an engine does for us, and those that speak vLLM's OpenAI API
config                  their addresses, sizes and time limits
needs, requests         what a request needs of an engine, what it asks, and how its answer is put together
sleeping, waiting       engines that share devices with the trainer; samples that no engine can draw
router, fleet           which engine has what next, as pure state; the thread that carries it out
delivery, continuation  what an engine is asked for of a sample, and what is kept if it is lost
adapter_folder          published versions as folders that engines read, each written once
admission, probes       how an engine that answers is proved to have our base model and adapters
reserved                engines whose base weights are those of a version of a whole model
sync_check              how each version is, before its first sample on an engine
fixed_prompt            what both draw and compare
sampler                 the `SamplerLoop` over all of it, beside the backend's own sampler
launcher                engines that we start ourselves

An adapter's name on an engine is the hash of its files, so a name never stands for other weights, whatever is started
again meanwhile.
"""
