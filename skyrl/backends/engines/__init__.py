"""Sampling engines: servers that sample for a backend. The backend owns the models.

protocol, http_engine   interface of an engine, and its implementation over vLLM's OpenAI API
config                  addresses, sizes and time limits
needs, requests         engine features that a request needs; calls to engines for a request, and its result
sleeping, waiting       engines that share devices with the trainer; samples that no engine can draw
router, fleet           decisions (pure state) on the engine for each sample and adapter; the thread that executes them
continuation            resuming a sample on another engine after its engine is lost
adapter_folder          published versions as folders that engines read, each written once
admission               verification that an engine serves our base model and our adapters
reserved                engines whose base weights are replaced by versions of fully trained models
sync_check              verification of each version on each engine before its first sample
sampler                 the `SamplerLoop` that combines all of this with the backend's own sampler
launcher                engines that we start ourselves

An adapter's name on an engine is the hash of its files. A name therefore never stands for other weights, even after
restarts.
"""
