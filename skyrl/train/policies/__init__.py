"""Models that a trainer drives: the client side of the backend contract.

policy            what trainers ask of a model (`Learner`, `Policy`) and of the place where it is (`Models`)
on_backend        models on a backend of this process
sampling_options  options of a sample beyond the API's, of what a configuration says
"""

from skyrl.train.policies.on_backend import BackendModels
from skyrl.train.policies.policy import Learner, Models, Policy

__all__ = ["BackendModels", "Learner", "Models", "Policy"]
