"""Checks of training passes and samples, done once, before a request is queued.

Code below this boundary relies on equal lengths, token ids in the vocabulary, finite numbers and valid options. An
invalid request thus fails alone, with a message that names the datum, the field, its value and a fix. All checks work
on whole arrays, never on single tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl.algorithms.checks.arrays import check_token_ids, numbers, refuse_where, token_ids
from skyrl.algorithms.losses import EMPTY, INPUT_FIELDS, LARGEST, LOSSES, Loss, refuse_unserved
from skyrl.errors import RequestError
from skyrl.types import Datum, SamplingParams

MAX_TOPK_PROMPT_LOGPROBS = 64
"""Maximum number of alternatives per prompt token in a sample request."""

MAX_NUM_SAMPLES = 4096
"""Maximum number of samples per request."""

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 256, 1024
"""Maximum number and length of a request's stop strings. Each generated token is searched for each of them."""

FIELD_NAMES = {field: name for name, field in INPUT_FIELDS.items()}


def check_pass(
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, object],
    *,
    vocab_size: int,
    max_context_length: int,
) -> list[Datum]:
    """Check a forward or forward_backward request and return its data in normal form.

    Returned arrays are contiguous: tokens and `target_tokens` int32, other inputs float32. Missing `weights` are ones,
    for every loss. `target_tokens` has shape `[tokens]`; for cross_entropy it may also be `[tokens, K]`, and `weights`
    then has the same shape. Entries that a sparse array omits are token 0 with weight 0.

    Raises `RequestError` for the first violation.
    """
    refuse_unserved(loss_fn)
    spec = LOSSES[loss_fn]
    check_config(spec, loss_fn_config)
    if not data:
        raise RequestError("data is empty; send at least one datum")
    _check_names(spec, data)
    tokens = token_ids("model_input", [datum.tokens for datum in data], vocab_size)
    _check_lengths(data, max_context_length)
    columns = {"target_tokens": _targets(data, loss_fn, vocab_size)}
    for name in INPUT_FIELDS:
        if name == "weights" or any(name in datum.loss_fn_inputs for datum in data):
            columns[name] = _float_inputs(name, data, columns["target_tokens"])
    _check_clips(spec, columns, loss_fn_config)
    return [
        Datum(
            tokens[i],
            {name: column[i] for name, column in columns.items() if name in datum.loss_fn_inputs or name == "weights"},
        )
        for i, datum in enumerate(data)
    ]


def check_config(spec: Loss, config: Mapping[str, object]) -> None:
    """Raise `RequestError` unless each setting in `config` is known to the loss and its value is a valid number."""
    for key, value in config.items():
        where = f"loss_fn_config[{key!r}]={value!r}"
        if key not in spec.knobs:
            known = ", ".join(spec.knobs) or "none"
            raise RequestError(f"{where}: {spec.name} has no such setting; known: {known}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{where}: must be a number; leave it out for {spec.knobs[key]}")
        if not abs(value) <= LARGEST:
            raise RequestError(f"{where}: must be finite and at most {LARGEST:g}; leave it out for {spec.knobs[key]}")
        if key.startswith("clip_") and value < 0:
            raise RequestError(f"{where}: bounds a probability ratio, which is never negative; use 0 or more")
        if key == "kl_coeff" and value < 0:
            raise RequestError(f"{where}: is the strength of a penalty, which is never negative; use 0 or more")
    knobs = {**spec.knobs, **config}
    if "clip_low_threshold" in knobs and knobs["clip_low_threshold"] > knobs["clip_high_threshold"]:
        raise RequestError(
            f"loss_fn_config: clip_low_threshold={knobs['clip_low_threshold']} is above "
            f"clip_high_threshold={knobs['clip_high_threshold']}; both are ratios around 1, such as 0.8 and 1.2"
        )


def check_sample(
    prompt: np.ndarray,
    params: SamplingParams,
    num_samples: int = 1,
    topk_prompt_logprobs: int = 0,
    *,
    vocab_size: int,
    max_context_length: int,
) -> int:
    """Check a sample request. Returns the maximum number of tokens to generate.

    This is `max_tokens`, or the rest of the context if `max_tokens` is None.

    Raises `RequestError` for the first violation.
    """
    length = len(prompt)
    if length == 0:
        raise RequestError("prompt is empty; send at least one token (a beginning-of-sequence token will do)")
    check_token_ids("prompt", prompt, vocab_size)
    if length >= max_context_length:
        raise RequestError(
            f"prompt has {length} tokens, which leaves no room to generate in the model's context of "
            f"{max_context_length}; send at most {max_context_length - 1}"
        )
    max_tokens = max_context_length - length if params.max_tokens is None else params.max_tokens
    if length + max_tokens > max_context_length:
        raise RequestError(
            f"max_tokens={max_tokens} after a prompt of {length} tokens exceeds the model's context of "
            f"{max_context_length}; use at most {max_context_length - length}, or leave it out to fill the context"
        )
    if not 1 <= num_samples <= MAX_NUM_SAMPLES:
        raise RequestError(f"num_samples={num_samples}: must be between 1 and {MAX_NUM_SAMPLES}")
    if not 0 <= topk_prompt_logprobs <= min(MAX_TOPK_PROMPT_LOGPROBS, vocab_size):
        raise RequestError(
            f"topk_prompt_logprobs={topk_prompt_logprobs}: must be between 0 (off) and "
            f"{min(MAX_TOPK_PROMPT_LOGPROBS, vocab_size)}"
        )
    check_seed("seed", params.seed)
    _check_stops(params, vocab_size)
    return max_tokens


def check_seed(field: str, seed: int | None) -> None:
    """Raise `RequestError` unless the seed is absent or an int64."""
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise RequestError(f"{field}={seed} does not fit into 64 bits; use a value from -2**63 to 2**63-1")


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    texts = [stop for stop in stops if isinstance(stop, str)]
    if texts and len(texts) != len(stops):
        raise RequestError(f"stop={stops!r} mixes strings and token ids; send one kind (stop strings may be tokenized)")
    if "" in texts:
        raise RequestError(f"stop={stops!r} has an empty string, which would end every sequence at once; remove it")
    if len(texts) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(texts)} strings; send at most {MAX_STOP_STRINGS}, or cut the sequences when they arrive"
        )
    for i, text in enumerate(texts):
        if len(text) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop[{i}]={text[:20]!r}... has {len(text)} characters; send at most {MAX_STOP_CHARACTERS}"
            )
    if stops and not texts:
        try:
            ids = np.asarray(stops, np.int64)
        except OverflowError:
            raise RequestError(f"stop={stops!r}: token ids must be in [0, {vocab_size})") from None
        check_token_ids("stop", ids, vocab_size)


def _check_names(spec: Loss, data: Sequence[Datum]) -> None:
    """Check that required inputs are present and all inputs are known, by name."""
    needed = {"target_tokens", *(FIELD_NAMES[field] for field in spec.needs)}
    allowed = {*needed, "weights", *(FIELD_NAMES[field] for field in spec.optional)}
    for i, datum in enumerate(data):
        given = datum.loss_fn_inputs.keys()
        if needed <= given <= allowed:
            continue
        if given - allowed:
            raise RequestError(
                f"datum {i}: loss_fn_inputs[{min(given - allowed)!r}] is not an input of {spec.name}; remove it "
                f"(known: {', '.join(sorted(allowed))})"
            )
        raise RequestError(
            f"datum {i}: loss_fn_inputs lacks {min(needed - given)!r}, which {spec.name} needs; add it "
            f"(needed: {', '.join(sorted(needed))})"
        )


def _check_lengths(data: Sequence[Datum], max_context_length: int) -> None:
    for i, datum in enumerate(data):
        length = len(datum.tokens)
        if length == 0:
            raise RequestError(f"datum {i}: model_input is empty; send at least one token")
        if length > max_context_length:
            raise RequestError(
                f"datum {i}: model_input has {length} tokens, more than the model's context of {max_context_length}; "
                "cut or split the sequence"
            )
        for name, values in datum.loss_fn_inputs.items():
            if values.ndim == 0 or len(values) != length:
                raise RequestError(
                    f"datum {i}: {name} has shape {list(values.shape)} but model_input has {length} tokens; shift "
                    f"targets by one and send {length} entries"
                )


def _targets(data: Sequence[Datum], loss_fn: str, vocab_size: int) -> list[np.ndarray]:
    """Return `target_tokens` of every datum as int32."""
    arrays = [datum.loss_fn_inputs["target_tokens"] for datum in data]
    for i, targets in enumerate(arrays):
        if targets.dtype.kind not in "iu":
            raise RequestError(f"datum {i}: target_tokens has dtype {targets.dtype}; send int64 token ids")
        several = targets.ndim == 2 and targets.shape[1] > 0
        if several and loss_fn != "cross_entropy":
            raise RequestError(
                f"datum {i}: target_tokens has shape {list(targets.shape)} but {loss_fn} takes one target per token; "
                "use cross_entropy for [tokens, K] targets"
            )
        if several and "weights" not in data[i].loss_fn_inputs:
            raise RequestError(
                f"datum {i}: target_tokens has shape {list(targets.shape)} without weights; add weights of that shape "
                "(the probability of each target)"
            )
        if targets.ndim != 1 and not several:
            raise RequestError(
                f"datum {i}: target_tokens has shape {list(targets.shape)}; send [tokens], or [tokens, K] with K >= 1"
            )
    return token_ids("target_tokens", arrays, vocab_size)


def _float_inputs(name: str, data: Sequence[Datum], targets: list[np.ndarray]) -> list[np.ndarray]:
    """Return a float input of every datum as float32. Missing `weights` are ones, other missing inputs `EMPTY`'s."""
    default = 1.0 if name == "weights" else getattr(EMPTY, INPUT_FIELDS[name])
    arrays: list[np.ndarray] = []
    given = set()
    for i, datum in enumerate(data):
        shape = targets[i].shape if name == "weights" else targets[i].shape[:1]
        values = datum.loss_fn_inputs.get(name)
        if values is None:
            arrays.append(np.full(shape, default, np.float32))
            continue
        if values.shape != shape:
            raise RequestError(
                f"datum {i}: {name} has shape {list(values.shape)}; it must be {list(shape)}, one value per target"
            )
        arrays.append(values)
        given.add(i)
    arrays = numbers(name, arrays)
    if name.startswith("clip_"):
        given_only = [values if i in given else np.zeros_like(values) for i, values in enumerate(arrays)]
        bounds = np.concatenate(given_only)
        refuse_where(name, bounds, arrays, lambda values: values < 0, "bounds a probability ratio; use 0 or more")
    return arrays


def _check_clips(spec: Loss, columns: Mapping[str, list[np.ndarray]], config: Mapping[str, Any]) -> None:
    """Check that no lower bound exceeds its upper bound, if the request has lower or upper bounds per token."""
    names = ("clip_low_threshold", "clip_high_threshold")
    if not columns.keys() & set(names):
        return
    bounds = []
    for name in names:
        knob = np.float32(config.get(name, spec.knobs[name]))
        empty = [np.full(targets.shape, -1, np.float32) for targets in columns["target_tokens"]]
        bounds.append([np.where(values < 0, knob, values) for values in columns.get(name, empty)])
    for i, (low, high) in enumerate(zip(*bounds, strict=True)):
        if np.any(low > high):
            at = int(np.argmax(low > high))
            raise RequestError(
                f"datum {i}: clip_low_threshold={low[at]:g} is above clip_high_threshold={high[at]:g} at position "
                f"{at}; both are ratios around 1, such as 0.8 and 1.2"
            )
