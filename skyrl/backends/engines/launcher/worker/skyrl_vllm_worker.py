"""Extension of vLLM's workers (--worker-extension-cls skyrl_vllm_worker.Worker), which runs in vLLM's environment.

vLLM 0.32 packs the output embedding anew on a CPU when weights are reloaded, but not where it is tied to the input's:
logits were then of the old weights.
"""

import importlib
from typing import Any


class Worker:
    """Methods for `/collective_rpc`."""

    def skyrl_reload(self: Any, weights_path: str) -> None:
        """Replace the weights by those of a model folder, tied ones included."""
        self.model_runner.reload_weights(weights_path=weights_path)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if self.device.type == "cpu" and head is not None:
            layers = importlib.import_module("vllm.model_executor.layers.utils")
            layers.dispatch_cpu_unquantized_gemm(head, remove_weight=False)
