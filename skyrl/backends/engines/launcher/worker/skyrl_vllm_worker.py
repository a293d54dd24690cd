"""Extension of vLLM's workers (--worker-extension-cls skyrl_vllm_worker.Worker). It runs in vLLM's environment.

On a CPU, vLLM 0.32 does not repack an output embedding that is tied to the input embedding when weights are reloaded.
The extension repacks it; otherwise logits would be computed with the old weights.
"""

import importlib
from typing import Any


class Worker:
    """Methods for `/collective_rpc`."""

    def skyrl_reload(self: Any, weights_path: str) -> None:
        """Replace the weights with those of a model folder, including tied ones."""
        self.model_runner.reload_weights(weights_path=weights_path)
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if self.device.type == "cpu" and head is not None:
            layers = importlib.import_module("vllm.model_executor.layers.utils")
            layers.dispatch_cpu_unquantized_gemm(head, remove_weight=False)
