"""Conversion of prepared batches (columns with one entry per sequence) to operations, checked request by request.

A request that cannot be served becomes a `Rejected` operation, so only this request fails.
"""

import secrets
from collections.abc import Sequence

import numpy as np

from skyrl.algorithms.checks.requests import check_pass, check_sample
from skyrl.backends.operations import ForwardBackward, Operation, Rejected, Sample
from skyrl.errors import RequestError
from skyrl.types import BackendInfo, Datum, PreparedModelPassBatch, PreparedSampleBatch
from skyrl.utils.files.tar_folder import without_suffix


def version_of(model_id: str, checkpoint_id: str) -> str:
    """Version id of a checkpoint that was saved by the synchronous methods."""
    return f"{model_id}/{checkpoint_id}"


def checkpoint_id_of(path: str) -> str:
    """Id of the sampler checkpoint at this path: the path's last part, without the suffix of a tar file."""
    return without_suffix(path.rstrip("/").rsplit("/", 1)[-1])


def passes_of(batch: PreparedModelPassBatch, forward_only: bool, info: BackendInfo) -> list[Operation]:
    """Create one operation per request of the batch."""
    operations: list[Operation] = []
    for request_id, model_id, start, end in batch.request_batch_slices:
        rows = range(start, end)
        losses = [(batch.all_loss_fns[row], dict(batch.all_loss_fn_configs[row] or {})) for row in rows]
        try:
            _check_same("loss function and config", request_id, losses)
            loss_fn, config = losses[0]
            data = check_pass(
                [_datum(batch, row) for row in rows],
                loss_fn,
                config,
                vocab_size=info.vocab_size,
                max_context_length=info.max_context_length,
            )
        except RequestError as error:
            operations.append(
                Rejected(
                    request_id=request_id,
                    model_id=model_id,
                    error=str(error),
                    gradients="kept" if forward_only else "incomplete",
                )
            )
            continue
        operations.append(
            ForwardBackward(
                request_id=request_id,
                model_id=model_id,
                data=data,
                loss_fn=loss_fn,
                loss_fn_config=config,
                forward_only=forward_only,
            )
        )
    return operations


def samples_of(batch: PreparedSampleBatch, info: BackendInfo) -> list[Operation]:
    """Create one operation per request of the batch. Row i of a request becomes sample i with the first row's seed."""
    operations: list[Operation] = []
    for request_id, model_id, start, end, needs_prompt_logprobs in batch.request_batch_slices:
        rows = range(start, end)
        try:
            _check_same("prompt", request_id, [list(batch.all_prompts[row]) for row in rows])
            _check_same("checkpoint", request_id, [batch.all_checkpoint_ids[row] for row in rows])
            params, prompt = batch.all_sampling_params[start], _array("prompt", batch.all_prompts[start], np.int64)
            without_seed = {"seed": None}
            _check_same(
                "sampling parameters",
                request_id,
                [batch.all_sampling_params[row].model_copy(update=without_seed) for row in rows],
            )
            max_tokens = check_sample(
                prompt, params, len(rows), vocab_size=info.vocab_size, max_context_length=info.max_context_length
            )
        except RequestError as error:
            operations.append(Rejected(request_id=request_id, model_id=model_id, error=str(error)))
            continue
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        operations.append(
            Sample(
                request_id=request_id,
                version=version_of(model_id, batch.all_checkpoint_ids[start]) if model_id else None,
                prompt=prompt.astype(np.int32),
                params=params.model_copy(update={"max_tokens": max_tokens, "seed": seed}),
                num_samples=len(rows),
                prompt_logprobs=needs_prompt_logprobs,
            )
        )
    return operations


def _check_same(what: str, request_id: str, values: list) -> None:
    if not values:
        raise RequestError(f"request {request_id} has no rows; give it at least one")
    if any(value != values[0] for value in values):
        raise RequestError(f"rows of request {request_id} differ in {what}; give each kind a request of its own")


def _datum(batch: PreparedModelPassBatch, row: int) -> Datum:
    """Datum of one row of the batch. An empty column means that the loss has no such input."""
    floats = {
        "weights": batch.all_token_weights[row],
        "logprobs": batch.all_sampling_logprobs[row],
        "advantages": batch.all_advantages[row],
    }
    if batch.all_loss_fn_inputs:
        floats |= batch.all_loss_fn_inputs[row]
    inputs = {"target_tokens": _array("target_tokens", batch.all_targets[row], np.int64)}
    inputs |= {name: _array(name, values, np.float32) for name, values in floats.items() if len(values)}
    return Datum(_array("model_input", batch.all_input_ids[row], np.int64), inputs)


def _array(field: str, values: Sequence, dtype: type[np.generic]) -> np.ndarray:
    try:
        return np.asarray(values, dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"{field} is no array of {dtype.__name__} ({error}); send numbers in its range") from None
