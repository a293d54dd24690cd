"""The embedded backend: one base model in memory, many LoRA adapters training and sampling, on JAX.

A model of rank 0 is trained as a whole: it has base weights of its own beside those that the others share.

Each operation is a generator that yields after every micro-batch, so the executor can take turns between models and
samples. A pass collects gradients in a scratch of its own and adds them to the model's sums at its end; nothing that
the model owns is ever donated to a program, so a failure at any point leaves the model as it was.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial, singledispatchmethod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from skyrl.algorithms.checks.objectives import check_objective_data
from skyrl.backends.backend import (
    CreateModel,
    DeleteModel,
    ExportModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.backends.base_folder import model_folder
from skyrl.backends.common.offload import MemoryBudget, ModelOffload
from skyrl.backends.common.packing import TileShape
from skyrl.backends.common.versions import Claim, VersionPool
from skyrl.backends.common.waiting import Awaiting
from skyrl.backends.executor import Executor, Quantum, Work
from skyrl.backends.jax.compile_cache import by_turns
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.loading import claim_device_memory, keep_compiled_programs
from skyrl.backends.jax.models import checkpoint_format
from skyrl.backends.jax.models.padding import fitted
from skyrl.backends.jax.models.state import (
    Kind,
    ModelState,
    Tree,
    bytes_of,
    empty_adapter,
    fresh_adapter,
    model_bytes,
    zeros_like,
)
from skyrl.backends.jax.models.store import Storage
from skyrl.backends.jax.sampling.sampler import SAMPLING_OPTIONS, Sampler
from skyrl.backends.jax.training.microbatches import Passes
from skyrl.backends.jax.training.program_choice import defaults_for, planned
from skyrl.backends.jax.training.programs import AdamScalars
from skyrl.backends.prepared import version_of
from skyrl.errors import RequestError
from skyrl.tx.io.weights import abstract_model, stored_tensor, with_random_weights, with_weights
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import padded_rank, zero_adapter
from skyrl.types import BackendInfo, ModelMetadata, ModelOutput, OptimStepOutput, PreparedSampleBatch
from skyrl.utils.failpoints import crash_point
from skyrl.utils.tokenizer import Tokenizer

ENDED = object()
"""Sentinel of a warm-up that has no pieces left."""

LONGEST_DEFAULT_CONTEXT = 8192
"""Limit of sequence length unless `max_context_length` asks for more."""


class JaxBackend(Executor):
    """`AbstractBackend` on JAX. `base_model` is a hub id or a model folder.

    Raises `RequestError` if the base model cannot be loaded.
    """

    config: JaxBackendConfig

    def __init__(
        self, base_model: str, config: JaxBackendConfig, progress: Callable[[str], None] = lambda message: None
    ):
        super().__init__(base_model, config)
        claim_device_memory()
        if config.compilation_cache:
            keep_compiled_programs()
        self._folder = model_folder(base_model)
        model = abstract_model(
            self._folder,
            dtype=None if config.dtype == "auto" else config.dtype,
            max_lora_adapters=config.max_lora_adapters,
            max_lora_rank=config.max_lora_rank,
            shard_attention_heads=config.shard_attention_heads,
            loss_chunk_size=config.loss_chunk_size,
            mhc_expansion_rate=config.mhc_expansion_rate,
        )
        self.model_config = model.config
        made_for = self.model_config.max_position_embeddings
        if config.max_context_length > made_for:
            raise RequestError(
                f"max_context_length={config.max_context_length} is above the {made_for} tokens that the base model "
                f"was made for; use at most {made_for}, or 0"
            )
        self._max_context_length = config.max_context_length or min(made_for, LONGEST_DEFAULT_CONTEXT)
        self.tokenizer = Tokenizer(self._folder)
        self.mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("fsdp", "ep", "tp"))
        self.process_id = 0
        zero = zero_adapter(self.model_config, padded_rank(config.max_lora_rank))
        self._defaults = defaults = defaults_for(model, config)
        shape = TileShape(defaults.tile_tokens, config.train_micro_batch_size)
        device, dtype = jax.devices()[0], jax.tree.leaves(nnx.state(model))[0].dtype
        progress(f"device {device.platform} ({device.device_kind}), base weights in {dtype}, {defaults}")
        with self._computing():
            self._programs, plan, stacks = planned(
                model, config, defaults.cache_bytes, shape, self._max_context_length, zero
            )
        self.plan = plan
        progress(str(plan))
        budget = MemoryBudget(*plan.models(config.adapter_memory_gib, config.adapter_host_memory_gib))
        version_bytes = plan.versions(config.version_memory_gib, (budget.device, budget.host))
        self._models = ModelOffload[ModelState](
            budget,
            lambda path, state: self._storage.write_state(path, state),
            lambda path: self._storage.read_state(path),
            config.offload_folder,
            self.notify,
        )
        if config.load_format == "dummy":
            progress("making random weights (load_format=dummy)")
            self.model = with_random_weights(model)
        else:
            progress(f"reading the weights of {self._folder}")
            self.model = with_weights(model, self._folder, beside={f"{config.value_head}.weight"})
        graphdef, self._base = nnx.split(self.model)
        ranks = sorted({padded_rank(rank) for rank in range(1, config.max_lora_rank + 1)})
        self._passes = Passes(
            self._programs,
            self._base,
            shape,
            self._max_context_length,
            empty=partial(zero_adapter, self.model_config),
            ranks=ranks,
            stacks=(1,) if config.deterministic else stacks,
            forward_shape=TileShape(shape.tokens, config.forward_micro_batch_size or config.train_micro_batch_size),
        )
        self._versions = VersionPool[Adapter](
            slots=config.max_lora_adapters,
            nbytes=bytes_of,
            fitted=partial(fitted, like=zero),
            max_bytes=version_bytes,
            load=lambda path: self._writer.read(path, partial(self._read_version, path)),
            notify=self.notify,
        )
        self._storage = Storage(
            base_model=self.info().base_model,
            folder=self._folder,
            model_config=self.model_config,
            base=self._base,
            value_head=config.value_head,
            like=self._empty_adapter,
            writer=self._writer,
            versions=self._versions,
            unwritten_bytes=max(1, version_bytes // 2),
        )
        self.sampler = self._sampler = Sampler(
            graphdef,
            self._base,
            self._versions,
            zero,
            self.tokenizer,
            self.model_config,
            max_context_length=self._max_context_length,
            cache_bytes=defaults.cache_bytes,
            max_rows=defaults.rows,
            deterministic=config.deterministic,
        )
        warm_up = by_turns(self._passes.warm_up(), self._sampler.warm_up())
        self._warm_up = warm_up if config.warm_up and not config.enforce_eager else iter(())

    # -- what the executor asks for -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return super().busy or self._models.has_news

    def step(self):
        self._models.tidy()
        with self._computing():
            return super().step()

    def prepare(self) -> bool:
        with self._computing():
            return next(self._warm_up, ENDED) is not ENDED

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """How every program is traced and run."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_matmul_precision(self._defaults.matmul_precision))
            if self.config.enforce_eager:
                stack.enter_context(jax.disable_jit())
            yield

    def run(self, operation: ModelOperation) -> Work:
        return self._work(operation)

    def compute(self, quanta: list[Quantum]) -> list[Any]:
        return self._passes.compute([quantum.inputs for quantum in quanta])

    def most_together(self, kind: Any) -> int:
        return self._passes.most_together(kind)

    def may_wait(self, operation: ModelOperation) -> bool:
        if operation.model_id in self._models and not isinstance(operation, LoadCheckpoint):
            writes = isinstance(operation, SaveCheckpoint | ExportModel | Publish)
            crowded = writes and self._storage.is_crowded(operation.model_id)
            return crowded or not self._models.is_on_device(operation.model_id)
        return isinstance(operation, CreateModel | LoadCheckpoint | LoadSnapshot)

    def discard_gradients(self, model_id: str) -> None:
        if model_id in self._models:
            self._models.drop_sums(model_id)

    def has_model(self, model_id: str) -> bool:
        return model_id in self._models

    def has_own_base(self, model_id: str) -> bool:
        return model_id in self._models and self._models.info(model_id).lora_config.rank == 0

    def close(self) -> None:
        super().close()
        self._models.close()

    def drop_version(self, version: str) -> None:
        self._writer.forget_version(version)
        self._versions.drop(version)

    def info(self) -> BackendInfo:
        local = Path(self.base_model).expanduser().is_dir()
        return BackendInfo(
            base_model=str(self._folder) if local else self.base_model,
            architecture=self.model_config.architecture,
            vocab_size=self.model_config.vocab_size,
            max_context_length=self._max_context_length,
            max_lora_rank=self.config.max_lora_rank,
            tokenizer_path=str(self._folder),
            sampling_options=SAMPLING_OPTIONS,
        )

    # -- documented, beside the contract -----------------------------------------------------------------------------

    def load_sampler_checkpoint(self, model_id: str, checkpoint_id: str, checkpoint_path: str) -> None:
        """Make the sampler or training checkpoint in a folder samplable as `checkpoint_id` of `model_id`."""
        version = version_of(model_id, checkpoint_id)
        adapter = self._read_version(checkpoint_path)
        self._versions.publish(version, adapter)
        self._versions.mark_stored(version, adapter, checkpoint_path)

    def load_sampler_weights(self, prepared_batch: PreparedSampleBatch) -> list[int]:
        """Put the versions that a batch names into slots. Returns each row's slot; 0 is the base model.

        Slots are a cache: running samples keep theirs, others may be given to another version later.
        """
        slots: list[int] = []
        claims: list[Claim] = []
        try:
            for model_id, checkpoint_id in zip(
                prepared_batch.all_model_ids, prepared_batch.all_checkpoint_ids, strict=True
            ):
                claim = self._versions.claim(version_of(model_id, checkpoint_id) if model_id else None)
                claims.append(claim)
                while True:
                    ended = self._versions.reads_ended
                    if self._versions.at_hand(claim):
                        break
                    with self._wake:
                        self._wake.wait_for(lambda ended=ended: self._versions.reads_ended != ended)
                slot = self._versions.acquire(claim)
                if slot is None:
                    raise RequestError(
                        f"max_lora_adapters={self.config.max_lora_adapters}: no slot is left for {model_id}/"
                        f"{checkpoint_id}; send fewer versions at once, or raise it"
                    )
                slots.append(slot)
        finally:
            for slot in slots:
                self._versions.release(slot)
            for claim in claims:
                self._versions.disclaim(claim)
        return slots

    @property
    def metrics(self) -> dict[str, int]:
        """Compiled programs so far; the numbers stand still once all shapes have been seen."""
        return {"training_programs": self._programs.compiled, "sampling_programs": self._sampler.programs}

    # -- documented read-only views -----------------------------------------------------------------------------------

    @property
    def models(self) -> dict[str, ModelMetadata]:
        """Loaded models; `adapter_index` counts them from 1 (0 is the base model)."""
        return {
            model_id: ModelMetadata(index, self._models.info(model_id).lora_config)
            for index, model_id in enumerate(self._models, 1)
        }

    @property
    def optimizers(self) -> dict[str, tuple[Any, Any, int]]:
        """(first moment, second moment, step) of each model."""
        return {name: (state.first_moment, state.second_moment, state.step) for name, state in self._peeked()}

    @property
    def accumulated_grads(self) -> dict[str, Any]:
        """Gradient sums of each model, None where no pass has added any."""
        return {name: state.gradient_sums for name, state in self._peeked()}

    def adapter(self, model_id: str) -> Adapter:
        """The model's current `Adapter`."""
        self._check_loaded(model_id)
        return self._models.peek(model_id).adapter

    def _read_version(self, path: str) -> Adapter:
        return checkpoint_format.load_version(path, self.model, self.config.max_lora_rank)[0]

    def _peeked(self) -> Iterator[tuple[str, ModelState]]:
        return ((model_id, self._models.peek(model_id)) for model_id in self._models)

    def _check_loaded(self, model_id: str) -> None:
        if model_id not in self._models:
            raise RequestError(f"model_id={model_id} is not loaded; create it, or load it from a checkpoint, first")

    # -- operations ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _work(self, operation: ModelOperation) -> Work:
        raise NotImplementedError(type(operation).__name__)

    @_work.register
    def _create(self, operation: CreateModel) -> Work:
        model_id, lora_config = operation.model_id, operation.lora_config
        if model_id in self._models:
            raise RequestError(f"model_id={model_id} exists already; choose another id or delete it first")
        parts = lora_config.train_attn, lora_config.train_mlp, lora_config.train_unembed
        if lora_config.rank == 0 and not all(parts):
            raise RequestError(
                f"lora_config: rank=0 trains all weights, but train_attn, train_mlp, train_unembed are {parts}; set "
                "them to true, or ask for a rank of at least 1"
            )
        if not any(parts):
            raise RequestError(
                "lora_config: train_attn, train_mlp and train_unembed are all false, so there is nothing to train; "
                "set at least one of them"
            )
        kind = Kind(lora_config, operation.value_head)
        seed = lora_config.seed if lora_config.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
        with self._room_for(kind) as admitted:
            yield from admitted
            stored = kind.value_head and self.config.load_format != "dummy"
            head = stored_tensor(self._folder, f"{self.config.value_head}.weight") if stored else None
            adapter = fresh_adapter(self.model_config, self._base, kind, seed, None if head is None else head[0])
            self._models.put(model_id, ModelState.fresh(lora_config, adapter))
        return ModelOutput(model_id)

    def _room_for(self, kind: Kind) -> contextlib.AbstractContextManager[Awaiting[None]]:
        """Room on the device for one more model, once what this returns has waited for it."""
        self._check_rank(kind.lora_config.rank)
        nbytes = model_bytes(self.model_config, self._base, kind)
        self._models.check_room(nbytes)
        return self._models.reserved(nbytes)

    @_work.register
    def _delete(self, operation: DeleteModel) -> Work:
        self._check_loaded(operation.model_id)
        yield
        self._models.remove(operation.model_id)
        return ModelOutput(operation.model_id)

    @_work.register
    def _forward_backward(self, operation: ForwardBackward) -> Work:
        with self._at_work(operation.model_id) as brought:
            state = yield from brought
            operation = self._checked(operation, state)
            output, gradients = yield from self._passes.run(operation, state.adapter)
            if gradients is not None:
                sums = state.gradient_sums
                state.gradient_sums = gradients if sums is None else self._summed(sums, gradients)
            return output

    def _checked(self, operation: ForwardBackward, state: ModelState) -> ForwardBackward:
        """A pass of the protocol was checked before it came here; data of an objective are the trainer's."""
        if operation.reference and not operation.forward_only:
            raise RequestError("reference=True and forward_only=False: the base model is not trained; set forward_only")
        if isinstance(operation.loss_fn, str):
            return operation
        if "values" in operation.loss_fn.outputs and (not state.value_head or operation.reference):
            raise RequestError(
                f"model_id={operation.model_id} has no value head, so it has no values; create a critic with "
                "value_head=True"
            )
        data = check_objective_data(
            operation.data,
            operation.loss_fn,
            vocab_size=self.model_config.vocab_size,
            max_context_length=self._max_context_length,
        )
        return dataclasses.replace(operation, data=data)

    def _summed(self, sums: Tree, gradients: Tree) -> Tree:
        """Waits for the result, so that a failure shows before it is kept."""
        return jax.block_until_ready(self._programs.add(sums, gradients))

    @_work.register
    def _optim_step(self, operation: OptimStep) -> Work:
        params = operation.adam_params
        with self._at_work(operation.model_id) as brought:
            state = yield from brought
            gradients = state.gradient_sums if state.gradient_sums is not None else zeros_like(state.adapter.weights)
            weights, first, second, norm = self._programs.optim_step(
                state.adapter.weights,
                gradients,
                state.first_moment,
                state.second_moment,
                AdamScalars.of(params, state.step + 1),
            )
            grad_norm = float(norm)  # waits for the step, so that a failure shows before anything is replaced
            crash_point("engine: optimizer step computed, not kept")
            if math.isfinite(grad_norm) or not operation.skip_if_not_finite:
                state.adapter = state.adapter._replace(weights=weights)
                state.first_moment, state.second_moment = first, second
                state.step += 1
            state.gradient_sums = None
            return OptimStepOutput({"skyrl.ai/grad_norm": grad_norm, "skyrl.ai/learning_rate": params.learning_rate})

    @contextlib.contextmanager
    def _at_work(self, model_id: str) -> Iterator[Awaiting[ModelState]]:
        """A model that is loaded stays on the device, to which the generator brings it."""
        self._check_loaded(model_id)
        with self._models.used(model_id) as brought:
            yield brought

    @_work.register
    def _write(self, operation: SaveCheckpoint | SaveSnapshot | ExportModel | Publish) -> Work:
        if not isinstance(operation, SaveSnapshot):  # before the model is at work: that must not wait for others
            yield from self._storage.room_to_write(operation.model_id)
        with self._at_work(operation.model_id) as brought:
            return (yield from self._storage.write(operation, (yield from brought)))

    @_work.register
    def _load(self, operation: LoadCheckpoint | LoadSnapshot) -> Work:
        model_id = operation.model_id
        loaded = self._models.info(model_id) if model_id in self._models else None
        with self._room_for((yield from self._storage.stored_kind(operation))) as admitted:
            yield from admitted
            self._models.put(model_id, (yield from self._storage.read(operation, loaded)))
        return ModelOutput(model_id)

    def _empty_adapter(self, kind: Kind) -> Adapter:
        self._check_rank(kind.lora_config.rank)
        return empty_adapter(self.model_config, self._base, kind)

    def _check_rank(self, rank: int) -> None:
        if rank > self.config.max_lora_rank:
            raise RequestError(
                f"lora_config.rank={rank} is above this server's max_lora_rank={self.config.max_lora_rank}; "
                "ask for a smaller rank, or start the server with a larger one"
            )
