"""Requests as SDK 0.38 and older clients send them, and options that are refused by name."""

import pytest
from pydantic import ValidationError
from tinker import types as sdk

from skyrl.tinker.wire import schemas

MODEL = "e9475d17:train:0"
PROMPT = {"chunks": [{"tokens": [1, 2, 3, 4], "type": "encoded_text"}]}
SAMPLE = {"sampling_session_id": "e9475d17:sample:0", "seq_id": 0, "prompt": PROMPT, "sampling_params": {}}
CREATE = {"session_id": "e9475d17", "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
STEP = {"model_id": "m", "seq_id": 1}
LOAD = {"path": f"tinker://{MODEL}/weights/s1"}

RECORDED = [
    (
        schemas.CreateSessionRequest,
        {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "display_name": "dn",
         "type": "create_session"},
    ),
    (
        schemas.CreateModelRequest,
        CREATE | {"user_metadata": {"run": "x"}, "optimizer_config": {"type": "adamw"}, "type": "create_model",
                  "lora_config": {"rank": 8, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}},
    ),
    (schemas.RetrieveFutureRequest, {"request_id": "r", "allow_metadata_only": True}),
    (schemas.GetInfoRequest, {"model_id": MODEL, "type": "get_info"}),
    (
        schemas.OptimStepRequest,
        {"model_id": MODEL, "seq_id": 2, "type": "optim_step",
         "adam_params": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1,
                         "grad_clip_norm": 1.0}},
    ),
    (
        schemas.SaveWeightsRequest,
        {"model_id": MODEL, "path": "s1", "seq_id": 7, "overwrite": False, "user_metadata": {"k": "v"},
         "type": "save_weights"},
    ),
    (schemas.LoadWeightsRequest, LOAD | {"model_id": MODEL, "seq_id": 8, "optimizer": False, "type": "load_weights"}),
    (
        schemas.LoadWeightsRequest,
        LOAD | {"session_id": "e9475d17", "model_seq_id": 1, "user_metadata": {"z": "1"}, "optimizer": True,
                "type": "load_weights"},
    ),
    (
        schemas.SaveWeightsForSamplerRequest,
        {"model_id": MODEL, "path": "samp1", "kind": "snapshot", "seq_id": 10, "type": "save_weights_for_sampler"},
    ),
    (
        schemas.SaveWeightsForSamplerRequest,
        {"model_id": MODEL, "sampling_session_seq_id": 1, "kind": "inflight", "seq_id": 11},
    ),
    (
        schemas.CreateSamplingSessionRequest,
        {"session_id": "e9475d17", "sampling_session_seq_id": 0, "model_path": "tinker://x/sampler_weights/y"},
    ),
    (
        schemas.SampleRequest,
        SAMPLE | {"num_samples": 2, "prompt_logprobs": False, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0,
                  "prompt_alt_tokens_k": 0, "record_stability_info": False, "type": "sample",
                  "sampling_params": {"max_tokens": 4, "seed": 3, "stop": ["\n"], "temperature": 0.7, "top_k": 5,
                                      "top_p": 0.9}},
    ),
    (schemas.WeightsInfoRequest, {"tinker_path": f"tinker://{MODEL}/weights/s1"}),
    (schemas.SessionHeartbeatRequest, {"session_id": "e9475d17", "type": "session_heartbeat"}),
    (schemas.FinishSessionRequest, {"reason": {"type": "success"}, "detail": None}),
    (schemas.UnloadModelRequest, {"model_id": MODEL}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), RECORDED)
def test_requests_of_the_sdk_are_read_and_served(kind, body):
    request = kind.model_validate(body)
    assert request.unserved() is None
    for name, value in body.items():
        assert getattr(request, name) == value or isinstance(value, dict)


@pytest.mark.parametrize(("kind", "body"), RECORDED)
def test_explicit_nulls_are_defaults(kind, body):
    nulls = {name: None for name, field in kind.model_fields.items() if name not in body and not field.is_required()}
    assert kind.model_validate(body | nulls) == kind.model_validate(body)


def test_older_clients_leave_out_what_is_at_its_default():
    request = schemas.OptimStepRequest.model_validate(
        {"model_id": MODEL, "seq_id": 2, "adam_params": {"learning_rate": 1e-4, "eps": None}}
    )
    assert request.adam_params.model_dump() == sdk.AdamParams(learning_rate=1e-4).model_dump()


def test_sampling_defaults_are_the_sdks():
    request = schemas.SampleRequest.model_validate(SAMPLE | {"sampling_params": {"max_tokens": 3}})
    assert request.sampling_params.model_dump() == sdk.SamplingParams(max_tokens=3).model_dump()


def test_nulls_of_the_users_metadata_stay():
    request = schemas.CreateModelRequest.model_validate(CREATE | {"user_metadata": {"a": None}})
    assert request.user_metadata == {"a": None}


def test_sequence_numbers_beyond_float_precision_are_exact():
    request = schemas.SampleRequest.model_validate_json(
        '{"sampling_session_id": "s", "seq_id": 692158627000000001, "prompt": {}}'
    )
    assert request.seq_id == 692158627000000001


@pytest.mark.parametrize(
    ("kind", "body", "option", "value"),
    [
        (schemas.SampleRequest, SAMPLE, "base_model", "x"),
        (schemas.SampleRequest, SAMPLE, "model_path", "tinker://x/weights/y"),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_name(kind, body, option, value):
    assert kind.model_validate(body).unserved() is None
    message = kind.model_validate(body | {option: value}).unserved()
    assert message.startswith(f"{option}=")
    assert "is not served yet; " in message


@pytest.mark.parametrize(
    ("kind", "body", "fault"),
    [
        (schemas.CreateModelRequest, CREATE | {"optimizer_config": {"type": "lion"}}, "optimizer_config.type"),
        (
            schemas.CreateModelRequest,
            CREATE | {"optimizer_config": {"type": "dimuon", "version": 2}},
            "optimizer_config.version",
        ),
        (schemas.CreateModelRequest, CREATE | {"lora_config": {"optimizer": "dimuon"}}, "send optimizer_config beside"),
        (schemas.OptimStepRequest, STEP | {"optimizer_params": {"type": "dimuon"}}, "learning_rate"),
        (schemas.OptimStepRequest, STEP | {"optimizer_params": {"type": "lion", "learning_rate": 1}}, "type"),
        (
            schemas.OptimStepRequest,
            STEP | {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1, "damping": 1e-4}},
            "damping",
        ),
    ],
)
def test_an_optimizer_that_is_not_served_is_refused_by_field(kind, body, fault):
    with pytest.raises(ValidationError, match=fault):
        kind.model_validate(body)


def test_a_chunk_with_two_contents_is_refused():
    with pytest.raises(ValidationError, match="both tokens and data"):
        schemas.ModelInputChunk.model_validate({"type": "encoded_text", "tokens": [1], "data": "aGk="})


def test_stability_info_may_be_recorded_because_nothing_reads_it():
    assert schemas.SampleRequest.model_validate(SAMPLE | {"record_stability_info": True}).unserved() is None


LORA = {"rank": 4}

REFUSED = {
    "unknown field": (schemas.GetInfoRequest, {"model_id": "m", "verbose": True}, "verbose"),
    "alpha": (schemas.CreateModelRequest, CREATE | {"lora_config": LORA | {"alpha": 16}}, "alpha is not an option"),
    "nothing to train": (
        schemas.CreateModelRequest,
        CREATE | {"lora_config": LORA | {"train_attn": False, "train_mlp": False, "train_unembed": False}},
        "nothing to train",
    ),
    "large LoRA seed": (schemas.CreateModelRequest, CREATE | {"lora_config": LORA | {"seed": 2**63}}, "64 bits"),
    "two destinations": (
        schemas.SaveWeightsForSamplerRequest,
        {"model_id": "m", "seq_id": 1, "path": "x", "sampling_session_seq_id": 0},
        "either path",
    ),
    "no destination": (schemas.SaveWeightsForSamplerRequest, {"model_id": "m", "seq_id": 1}, "either path"),
    "unknown kind": (
        schemas.SaveWeightsForSamplerRequest, {"model_id": "m", "seq_id": 1, "path": "x", "kind": "live"}, "kind"
    ),
    "two addresses": (
        schemas.LoadWeightsRequest,
        LOAD | {"model_id": "m", "seq_id": 1, "session_id": "s", "model_seq_id": 1},
        "either model_id",
    ),
    "half an address": (schemas.LoadWeightsRequest, LOAD | {"model_id": "m"}, "either model_id"),
    "no model": (
        schemas.CreateSamplingSessionRequest, {"session_id": "s", "sampling_session_seq_id": 0}, "give base_model"
    ),
    "negative seq_id": (schemas.SampleRequest, SAMPLE | {"seq_id": -1}, "seq_id"),
    "mixed stops": (schemas.SampleRequest, SAMPLE | {"sampling_params": {"stop": ["a", 1]}}, "stop"),
    "infinite temperature": (
        schemas.SampleRequest, SAMPLE | {"sampling_params": {"temperature": float("inf")}}, "temperature"
    ),
    "text among tokens": (schemas.SampleRequest, SAMPLE | {"prompt": {"chunks": [{"tokens": ["1"]}]}}, "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case):
    kind, body, message = REFUSED[case]
    with pytest.raises(ValidationError, match=message):
        kind.model_validate(body)


def test_a_long_list_of_bad_tokens_is_one_error():
    with pytest.raises(ValidationError) as error:
        schemas.ModelInput.model_validate({"chunks": [{"tokens": ["x"] * 1000}]})
    assert error.value.error_count() == 1
