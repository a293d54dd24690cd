"""The sampling operation."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from pydantic import ValidationError

from skyrl.algorithms.checks.requests import check_sample
from skyrl.algorithms.checks.scores import check_scores
from skyrl.backends.operations import NO_OPTIONS, Sample
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.surplus_versions import limit_that_removed
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.tables import SamplerRow
from skyrl.tinker.identity import ids
from skyrl.tinker.operations.admission import Accepted, Admission
from skyrl.tinker.operations.operation import operation, refuse_unserved
from skyrl.tinker.wire import codec, json_numbers, schemas
from skyrl.tinker.wire.parsing import Body, Limits, Parsed, SamplerAddress, describe_faults, json_object, read_address
from skyrl.types import SamplingOptions, TokenMatrix

LARGE_PROMPTS = 64 * 2**20


@dataclass(frozen=True)
class SampleInput:
    """A parsed sampling request, with its tokens as arrays."""

    request: schemas.SampleRequest
    prompt: np.ndarray
    targets: TokenMatrix | None = None
    options: SamplingOptions = NO_OPTIONS
    """Options that the Tinker API does not have."""
    reports_progress: bool = False
    routing_key: str | None = None


def _parse_sample(body: Body, limits: Limits) -> Parsed:
    value = json_object(body, partial(json_numbers.parse, max_tokens=limits.max_context_length))
    address = read_address(SamplerAddress, value)
    try:
        request = schemas.SampleRequest.model_validate(value)
        targets = request.target_prompt_logprobs
        cells = None if targets is None else codec.target_matrix(targets)
        return Parsed(address, SampleInput(request, codec.prompt_tokens(request.prompt), cells))
    except ValidationError as error:
        return Parsed(address, None, describe_faults(error))
    except RequestError as error:
        return Parsed(address, None, str(error))


@operation(ids.SAMPLE, _parse_sample, codec.encode_sample, LARGE_PROMPTS)
async def sample(admission: Admission, given: SampleInput) -> Accepted:
    """Continue a prompt with a sampler's weights. An inflight sampler uses its model's newest inflight version."""
    request, prompt, cells = given.request, given.prompt, given.targets
    refuse_unserved(request)
    service, sampler = admission.service, admission.sampler
    service.info.check_samples()
    version, folder = sampler.version, sampler.folder
    if sampler.kind == "inflight":
        assert sampler.model_id is not None
        model = await service.directory.model(sampler.model_id, admission.caller)
        version, folder = model.inflight_version, model.inflight_folder
    if sampler.kind != "base" and version is None:
        raise RequestError(_gone(sampler, service.config))
    service.version_use.begin(admission.request_id, version, folder and service.path_of(folder))
    if sampler.base_model != service.info.base_model:
        raise RequestError(
            f"sampling_session_id={sampler.sampler_id} samples from base model {sampler.base_model!r}, which is not "
            f"the one served now ({service.info.base_model!r}); start the server with --base-model {sampler.base_model}"
        )
    params = request.sampling_params
    max_tokens = check_sample(
        prompt,
        params,
        request.num_samples,
        request.topk_prompt_logprobs,
        vocab_size=service.info.vocab_size,
        max_context_length=service.info.max_context_length,
    )
    check_scores(
        len(prompt),
        request.num_samples,
        max_tokens,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=cells,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        vocab_size=service.info.vocab_size,
    )
    seed = ids.new_seed() if params.seed is None else params.seed
    operation = Sample(
        request_id=admission.request_id,
        version=version,
        path=None if folder is None else service.path_of(folder),
        prompt=prompt,
        params=params.model_copy(update={"max_tokens": max_tokens, "seed": seed}),
        options=given.options,
        num_samples=request.num_samples,
        reports_progress=given.reports_progress,
        routing_key=given.routing_key,
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=cells,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
    )
    return Accepted(operation)


def _gone(sampler: SamplerRow, config: EngineConfig) -> str:
    """Return the reason why a sampler has no weights any more."""
    field = f"sampling_session_id={sampler.sampler_id}"
    if sampler.kind == "checkpoint":
        return f"{field}: its checkpoint {sampler.model_path} was deleted or has expired; make a sampler of another one"
    if (limit := limit_that_removed(sampler, config)) is not None:
        return f"{field}: {limit}"
    return (
        f"{field}: its weights are gone; those without a name are kept for {config.ephemeral_grace_sec} seconds after "
        "their session was finished, or has been silent for a day. Give save_weights_for_sampler a name (path) to keep "
        "them"
    )
