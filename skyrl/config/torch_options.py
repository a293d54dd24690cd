"""Options of the torch backend, derived from fields of a training configuration. Trainers and servers use them.

A trainer uses all options that follow from its configuration (`torch_options`). A server uses only options that follow
from the fields that it is given (`server_options`). The metadata of a field says which these are (`uses.sets`).
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from skyrl.config import FSDPConfig, InferenceEngineConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.config.machinery.fields import specs_of
from skyrl.config.machinery.uses import TORCH, Status, options_set, use_of, why_of_trainers
from skyrl.config.shared_options import base_dtype, config_overrides, sampler_options
from skyrl.config.strategies import ALIASES, NEEDS_OF_MEGATRON, worker_options
from skyrl.errors import ConfigError

MICRO_TRAIN = "micro_train_batch_size_per_gpu"
SHARDING, RESHARDING = "fsdp_size", "reshard_after_forward"
SEQUENCES = "sequence_parallel_size"
UTILIZATION = "gpu_memory_utilization"
STARTED_HERE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "data_parallel_size",
    "enforce_eager",
    "fully_sharded_loras",
    "distributed_executor_backend",
    "engine_init_kwargs",
)
"""Fields of inference engines that affect only vLLM servers that the trainer starts."""
SHARED_WORK = ("num_workers", "ray_workers_per_node", "fsdp_size", "reshard_after_forward", "tensor_parallel_size")
NAMES = ("torch", *ALIASES)
OWN = "trainer.torch"
PARAM_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def torch_options(config: SkyRLTrainConfig, model: str = "policy") -> dict[str, Any]:
    """Return options derived from a configuration. Options in the backend's own section override them.

    Args:
        config: The configuration, resolved or not.
        model: Model (policy, critic or ref) whose workers get the options. For critic and ref, options in the backend's
            section that distribute work over workers (`SHARED_WORK`) are ignored, because they are for the policy's.
    """
    trainer, generator = config.trainer, config.generator
    own = own_of(trainer, model)
    options: dict[str, Any] = {
        "dtype": _dtype(config, model),
        "value_head": trainer.algorithm.value_head_prefix,
        "gradient_checkpointing": trainer.gradient_checkpointing,
        "compile_scores": trainer.policy.use_torch_compile,
        SEQUENCES: own.sequences,
        **sampler_options(config),
        **worker_options(own.nodes, own.gpus_per_node),
    }
    if overrides := config_overrides(config):
        options["config_overrides"] = overrides
    given = {name: value for name, value in trainer.torch.items() if model == "policy" or name not in SHARED_WORK}
    fsdp = own.fsdp
    if trains_all_weights(trainer, model):
        options |= sharding_of_all_weights(given.get(SHARDING, fsdp.fsdp_size))
    elif fsdp.is_given(SHARDING):
        options[SHARDING] = fsdp.fsdp_size
    if fsdp.is_given(RESHARDING):
        options["reshard_after_forward"] = fsdp.reshard_after_forward
    if fsdp.cpu_offload:
        options["cpu_offload"] = True
    if count := _full_models(trainer, model):
        options["full_models"] = count
    if not offloads(trainer, model):
        options["offload_after_step"] = False
    if (asked := reduce_dtype(config, model)) is not None:
        options["reduce_dtype"] = PARAM_DTYPES.get(asked, asked)
    if rank := max(trainer.policy.model.lora.rank, trainer.critic.model.lora.rank):
        options["max_lora_rank"] = rank
    if trainer.is_given(MICRO_TRAIN):
        options["train_micro_batch_size"] = trainer.micro_train_batch_size_per_gpu
    if not trainer.use_sample_packing:
        options["train_micro_batch_size"] = options["forward_micro_batch_size"] = 1
    elif trainer.is_given("micro_forward_batch_size_per_gpu"):
        options["forward_micro_batch_size"] = trainer.micro_forward_batch_size_per_gpu
    if generator.inference_engine.is_given(UTILIZATION):
        options[UTILIZATION] = generator.inference_engine.gpu_memory_utilization
    if generator.inference_engine.is_given("max_num_seqs"):
        options["sample_max_num_sequences"] = generator.inference_engine.max_num_seqs
    if generator.inference_engine.external or launched(config):
        options["engines"] = _engines(config, given.pop("engines", {}))
    if _places_workers(given):
        options.pop("ray_workers_per_node", None)
    return options | given


def _places_workers(given: Mapping[str, Any]) -> bool:
    """Return True if given options place workers on nodes in their own way, or not on Ray."""
    return "ray_strategy" in given or given.get("workers", "ray") != "ray"


class ModelFields(NamedTuple):
    """Values of fields that exist for each of policy, critic and ref."""

    nodes: int
    gpus_per_node: int
    sequences: int
    """Number of ranks over which a sequence is split."""
    fsdp: FSDPConfig


def own_of(trainer: TrainerConfig, model: str) -> ModelFields:
    """Return these values for one model."""
    places, policy, critic, ref = trainer.placement, trainer.policy, trainer.critic, trainer.ref
    if model == "policy":
        counts = places.policy_num_nodes, places.policy_num_gpus_per_node
        return ModelFields(*counts, policy.sequence_parallel_size, policy.fsdp_config)
    if model == "critic":
        counts = places.critic_num_nodes, places.critic_num_gpus_per_node
        return ModelFields(*counts, critic.sequence_parallel_size, critic.fsdp_config)
    counts = places.ref_num_nodes, places.ref_num_gpus_per_node
    return ModelFields(*counts, ref.sequence_parallel_size, ref.fsdp_config)


def options_apart(config: SkyRLTrainConfig, model: str) -> dict[str, Any]:
    """Return the options of a separate backend for the critic or the reference (ref)."""
    trainer, options = config.trainer, torch_options(config, model)
    if model == "ref":  # the reference is never trained
        options.pop("float32_parts", None)
    if not trainer.placement.policy_num_gpus_per_node:
        options["device"] = "cpu"
    if options["workers"] == "ray":
        return options
    before = ["policy", *[name for name in trainer.apart if name < model]]
    return options | {"first_gpu": sum(trainer.gpus(name) for name in before)}


def sharding_of_all_weights(fsdp_size: int) -> dict[str, Any]:
    """Return the sharding options of workers that train all weights of a model.

    Sharded weights are in float32, so that reduced gradients are not rounded.
    """
    return {SHARDING: fsdp_size} | ({} if fsdp_size == 1 else {"float32_parts": True})


def trains_all_weights(trainer: TrainerConfig, model: str) -> bool:
    """Return True if the workers of `model` train all weights of at least one model.

    A reference is not trained. Its workers share weights as those of the policy, which it copies.
    """
    names = trained_by(trainer, "policy" if model == "ref" else model)
    return any(not getattr(trainer, name).model.lora.rank for name in names if name in trainer.models)


def trained_by(trainer: TrainerConfig, model: str) -> list[str]:
    """Return the names of the models (policy, critic) that the workers of `model` train, if the run has them."""
    if model == "ref":
        return []
    return ["critic"] if model == "critic" else [name for name in ("policy", "critic") if name not in trainer.apart]


def offloads(trainer: TrainerConfig, model: str) -> bool:
    """Return True if the workers of `model` offload after a step.

    They do if `offload_after_step` is set for each trained model on these workers.
    """
    return all(getattr(trainer, name).optimizer_config.offload_after_step for name in trained_by(trainer, model))


def _full_models(trainer: TrainerConfig, model: str) -> int:
    """Return the number of fully trained models that the workers of `model` hold during a run.

    A reference has its own weights only if it is replaced by an earlier policy (`update_ref_every_epoch`). Otherwise it
    is a base model.
    """
    held = [model] if model != "policy" else [name for name in trainer.models if name not in trainer.apart]
    ranks = {"policy": trainer.policy, "critic": trainer.critic, "ref": trainer.policy}
    trained = [name for name in held if name != "ref" or trainer.update_ref_every_epoch]
    return sum(not ranks[name].model.lora.rank for name in trained)


def _dtype(config: SkyRLTrainConfig, model: str) -> str:
    asked = param_dtype(config, model)
    if asked is not None and not config.generator.inference_engine.is_given("model_dtype"):
        return PARAM_DTYPES.get(asked, asked)
    return base_dtype(config)


def param_dtype(config: SkyRLTrainConfig, model: str) -> str | None:
    """Return the format of base weights that the model's FSDP section sets. None if it sets none."""
    precision = own_of(config.trainer, model).fsdp.mixed_precision
    return precision.param_dtype if precision is not None and precision.is_given("param_dtype") else None


def reduce_dtype(config: SkyRLTrainConfig, model: str) -> str | None:
    """Return the format in which gradients are reduced, as the model's FSDP section sets it. None if it sets none."""
    precision = own_of(config.trainer, model).fsdp.mixed_precision
    return precision.reduce_dtype if precision is not None and precision.is_given("reduce_dtype") else None


def urls_of(engines: InferenceEngineConfig) -> list[str]:
    """Return the URLs of external engines. If only the router in front of them is known, return its URL."""
    if engines.external_server_urls:
        return engines.external_server_urls
    if engines.external_proxy_url:
        return [engines.external_proxy_url]
    return [] if engines.run_engines_locally else engines.remote_urls


def launched(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Return the launch options that the configuration gives for engines. Empty: the trainer starts no engines."""
    engines = config.trainer.torch.get("engines") or {}
    return dict(engines.get("launch") or {}) if isinstance(engines, Mapping) else {}


def _engines(config: SkyRLTrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the engines that sample. Options in `given` override derived options."""
    engines, launch = config.generator.inference_engine, launched(config)
    options: dict[str, Any] = {"urls": urls_of(engines), "folder": config.trainer.policy.model.lora.lora_sync_path}
    if engines.is_given("max_num_seqs") or launch:
        options["max_requests"] = engines.max_num_seqs
    if launch:
        options["launch"] = _launch(config, launch)
    return {**options, **{name: value for name, value in given.items() if name != "launch"}}


def engines_of_a_run(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Return the engine options that only a trainer's run has, because it has a single policy."""
    trainer, launch = config.trainer, launched(config)
    options: dict[str, Any] = {"whole": not trainer.policy.model.lora.rank}
    if launch:
        options["colocated"] = trainer.placement.colocate_all
        if not trainer.policy.model.lora.is_given("lora_sync_path"):
            run = hashlib.sha256(trainer.ckpt_path.encode()).hexdigest()[:12]
            options["folder"] = f"{trainer.policy.model.lora.lora_sync_path}/{run}"  # no two runs share engines
        if gpus := trainer.placement.policy_num_gpus_per_node:
            apart = sum(getattr(trainer.placement, f"{name}_num_gpus_per_node") for name in trainer.apart)
            places = {
                "gpus": config.generator.inference_engine.gpus_per_engine,
                "first_gpu": 0 if trainer.placement.colocate_all else gpus + apart,
            }
            options["launch"] = places | _launch(config, launch)
    return options | {name: value for name, value in trainer.torch.get("engines", {}).items() if name != "launch"}


def _launch(config: SkyRLTrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the launch options of engines that the trainer starts. Options in `given` override derived options."""
    engines = config.generator.inference_engine
    options: dict[str, Any] = {"count": engines.num_engines}
    if not given.get("python"):
        return {**options, **given}
    arguments = _arguments(engines)
    if engines.expert_parallel_size > 1:
        arguments["enable_expert_parallel"] = True
    if engines.fully_sharded_loras:
        arguments["fully_sharded_loras"] = True
    if engines.is_given("distributed_executor_backend"):
        arguments["distributed_executor_backend"] = engines.distributed_executor_backend
    arguments = {**arguments, **engines.engine_init_kwargs, **given.get("arguments", {})}
    return {**options, **given, "arguments": arguments}


def _arguments(engines: InferenceEngineConfig) -> dict[str, Any]:
    """Return the values of engine fields that have the same names as vLLM's arguments.

    Chunked prefill is included only if it is given. Otherwise, vLLM decides.
    """
    chunked = engines.is_given("enable_chunked_prefill")
    return {
        "tensor_parallel_size": engines.tensor_parallel_size,
        "pipeline_parallel_size": engines.pipeline_parallel_size,
        "data_parallel_size": engines.data_parallel_size,
        "enforce_eager": engines.enforce_eager,
        UTILIZATION: engines.gpu_memory_utilization,
        "max_num_batched_tokens": engines.max_num_batched_tokens,
        "enable_prefix_caching": engines.enable_prefix_caching,
        **({"enable_chunked_prefill": engines.enable_chunked_prefill} if chunked else {}),
    }


def engine_problems(config: SkyRLTrainConfig, on_ray: Iterable[str]) -> Iterator[str]:
    """Yield messages about engine fields that have no effect or contradict other fields.

    Args:
        config: The configuration.
        on_ray: Models (policy, critic or ref) whose workers are on Ray.
    """
    engines, launch = config.generator.inference_engine, launched(config)
    if engines.external and launch:
        yield (
            f"trainer.torch.engines.launch={launch} and engines that were started elsewhere (remote_urls, "
            "external_server_urls or external_proxy_url); leave one of them out"
        )
    for cause, way_out in dict.fromkeys(_cause_of_ray(config.trainer, model) for model in on_ray) if launch else ():
        yield (
            f"trainer.torch.engines.launch and workers on Ray ({cause}): engines are started on this machine alone, "
            "and Ray may place workers on their GPUs or on other machines; start the engines yourself and give their "
            f"addresses as generator.inference_engine.external_server_urls, or {way_out} to keep workers on this "
            "machine"
        )
    if launch.get("python"):
        fields = _arguments(engines)
        for name, value in engines.engine_init_kwargs.items():
            if name in fields:
                yield (
                    f"generator.inference_engine.engine_init_kwargs.{name}={value} is the field "
                    f"generator.inference_engine.{name}={fields[name]}; set that, and leave it out here"
                )
        return
    why = "the policy's workers sample"
    if engines.external or launch:
        why = "how such an engine computes is said where it is started"
    for name in STARTED_HERE:
        value = getattr(engines, name)
        if value != getattr(InferenceEngineConfig(), name):
            yield (
                f"generator.inference_engine.{name}={value} without vLLM servers that are started here: {why}; leave "
                "it out, or name a Python that has vLLM as trainer.torch.engines={launch: {python: PYTHON}}"
            )


def _cause_of_ray(trainer: TrainerConfig, model: str) -> tuple[str, str]:
    """Return the setting that puts the workers of `model` on Ray, and the change that avoids Ray."""
    if (nodes := own_of(trainer, model).nodes) > 1:
        return f"trainer.placement.{model}_num_nodes={nodes}", f"set {model}_num_nodes=1"
    processes = "set trainer.torch.workers=processes"
    if "workers" in trainer.torch:
        return "trainer.torch.workers=ray", processes
    return f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}", f"unset RAY_ADDRESS or {processes}"


def sharing_problems(
    config: SkyRLTrainConfig, model: str = "policy", own: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield messages about sharding options that do not fit the number of ranks.

    Args:
        config: The configuration.
        model: Same as in `torch_options`.
        own: Options of a server that were given by their own names. They override the configuration.
    """
    trainer, options = config.trainer, {**torch_options(config, model), **(own or {})}
    fsdp, path = own_of(trainer, model).fsdp, f"trainer.{model}.fsdp_config"
    workers, asked = options["num_workers"], options.get(SHARDING, 0)
    given = {name: f"{OWN}.{name}" for name in (trainer.torch if model == "policy" else ())}
    given |= {name: name for name in own or ()}
    size = given.get(SHARDING, f"{path}.{SHARDING}")
    count = given.get("num_workers", f"trainer.placement.{model}_num_nodes x {model}_num_gpus_per_node")
    there = f"the {workers} worker(s) ({count})"
    if (sequences := options[SEQUENCES]) > 1 and workers % sequences:
        yield f"trainer.{model}.{SEQUENCES}={sequences} does not divide {there}; use a divisor of {workers}"
    if asked > 0 and workers % asked:
        yield f"{size}={asked} does not divide {there}; use a divisor of {workers}, or -1 for all workers"
        return
    ranks = workers if asked in (-1, 0) else asked
    alone = f"and no ranks share weights ({size}, of {there})"
    again, summed = fsdp.reshard_after_forward, reduce_dtype(config, model)
    if ranks == 1 and fsdp.cpu_offload:
        yield f"{path}.cpu_offload=True, {alone}: all are used where they are; leave it out, or use 2 workers or more"
    if ranks == 1 and fsdp.is_given(RESHARDING) and again is False:
        yield f"{path}.{RESHARDING}=False, {alone}: none are gathered; leave it out, or use 2 workers or more"
    if ranks == 1 and PARAM_DTYPES.get(summed or "fp32") == "bfloat16":
        yield (
            f"{path}.mixed_precision.reduce_dtype={summed}, {alone}: gradients are added up in fp32; leave it out, or "
            "use 2 workers or more"
        )
    if not isinstance(again, bool) and not (1 < again < ranks and ranks % again == 0):
        yield (
            f"{path}.{RESHARDING}={again} is no divisor between 1 and the {ranks} rank(s) that share weights "
            f"({size}); use one, or true or false"
        )


OF_A_RUN = "it is about a run of a trainer, and a server has none; leave it out"


def server_options(given: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of a server that follow from `given` fields of a trainer's configuration.

    Keys of `given` are dotted paths. The value of a section is a mapping. `own` are options that were given by their
    own names. Raises `ConfigError` for unknown fields, values of the wrong type, and fields that a server does not
    support.
    """
    given = dict(_flattened(given))
    config = SkyRLTrainConfig.from_cli_overrides(given)
    own = own or {}
    names = {name for path in given for name in options_set(SkyRLTrainConfig, path)} | set(config.trainer.torch)
    followed = torch_options(config)
    on_ray = "workers" in names - set(own) and followed["workers"] == "ray"
    problems = [problem for path in given for problem in _problems(config, path)]
    problems += engine_problems(config, ["policy"] if on_ray else [])
    problems += sharing_problems(config, own=own)
    if problems:
        raise ConfigError("\n".join(problems))
    if launched(config) and "trainer.policy.model.lora.lora_sync_path" not in given:
        engines = config.trainer.torch["engines"]
        followed["engines"] = {**followed["engines"], "folder": engines.get("folder")}  # the default is for a run
    if _places_workers(own):
        followed.pop("ray_workers_per_node", None)
    return {name: value for name, value in followed.items() if name in names}


def _flattened(given: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of each given field, including the fields of sections that are given as mappings."""
    for name, value in given.items():
        path = f"{section}{name}"
        if isinstance(value, Mapping) and _is_section(path):
            yield from _flattened(value, f"{path}.")
        else:
            yield path, value


def _is_section(path: str) -> bool:
    cls: Any = SkyRLTrainConfig
    for name in path.split("."):
        spec = specs_of(cls).get(name)
        if spec is None or spec.config_class is None:
            return False
        cls = spec.config_class
    return True


def _problems(config: SkyRLTrainConfig, path: str) -> Iterator[str]:
    """Yield the reason why a server does not support the given field. Yield nothing if it does."""
    use, follows = use_of(SkyRLTrainConfig, path, TORCH), options_set(SkyRLTrainConfig, path)
    value, default = _at(config, path), _at(SkyRLTrainConfig(), path)
    if path == "trainer.strategy" and value == "megatron":
        yield f"{path}={value} is not served yet: it would need {NEEDS_OF_MEGATRON}; leave it out"
    elif path == "trainer.strategy" and value not in NAMES:
        yield f"{path}={value}, and this server computes with torch; leave it out, or start it with --backend {value}"
    elif use.status is Status.REFUSED and value != default:
        yield f"{path}={value}: {use.why}"
    elif use.status is Status.READ and not follows and not path.startswith(("trainer.strategy", OWN)):
        yield f"{path}={value} has no meaning for a server: {why_of_trainers(SkyRLTrainConfig, path) or OF_A_RUN}"


def _at(config: SkyRLTrainConfig, path: str) -> Any:
    """Return the value of the field at `path`.

    If `path` names an entry of a mapping, return the mapping. If the section is None, return None.
    """
    value: Any = config
    for name in path.split("."):
        if value is None or isinstance(value, Mapping):
            break
        value = getattr(value, name)
    return value
