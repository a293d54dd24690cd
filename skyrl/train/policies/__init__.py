"""Models that a trainer uses: the client side of the backend interface.

policy            interfaces of a model (`Learner`, `Policy`) and of a run's models (`Models`)
on_backend        models on a backend that runs in this process
sampling_options  sampling options that the API lacks, read from a configuration
"""

from skyrl.train.policies.on_backend import BackendModels
from skyrl.train.policies.policy import Endpoint, Learner, Models, Policy

__all__ = ["BackendModels", "Endpoint", "Learner", "Models", "Policy"]
