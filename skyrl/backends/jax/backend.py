"""The embedded backend: one base model in memory, many LoRA adapters training and sampling, on JAX.

Each operation is a generator that yields after every micro-batch, so the executor can take turns between models and
samples. A pass collects gradients in a scratch of its own and adds them to the model's sums at its end; nothing that
the model owns is ever donated to a program, so a failure at any point leaves the model as it was.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial, singledispatchmethod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from skyrl.backends.backend import (
    CreateModel,
    DeleteModel,
    ForwardBackward,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    SaveCheckpoint,
    SaveSnapshot,
)
from skyrl.backends.batching import Tile, TileShape, make_tiles
from skyrl.backends.executor import Executor, Work
from skyrl.backends.jax import checkpoints
from skyrl.backends.jax.adapters import ModelState, zeros_like
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.loading import keep_compiled_programs, model_folder
from skyrl.backends.jax.sampler import Sampler
from skyrl.backends.jax.step import AdamScalars, PassOutput, TrainingPrograms
from skyrl.backends.jax.versions import VersionPool
from skyrl.backends.prepared import version_of
from skyrl.errors import RequestError
from skyrl.tx.lora import init_adapter, padded_rank, zero_adapter
from skyrl.tx.models.types import Adapter
from skyrl.tx.weights import load_model
from skyrl.types import (
    BackendInfo,
    ForwardBackwardOutput,
    LoraConfig,
    ModelMetadata,
    ModelOutput,
    OptimStepOutput,
    PreparedSampleBatch,
    SaveOutput,
)
from skyrl.utils.crash_points import crash_point
from skyrl.utils.storage import write_folder
from skyrl.utils.tokenizer import Tokenizer

LONGEST_DEFAULT_CONTEXT = 8192
"""Limit of sequence length unless `max_context_length` asks for more."""

READ_TURN_S = 0.005
"""Seconds that a checkpoint being read holds up others in each of its turns."""


class JaxBackend(Executor):
    """`AbstractBackend` on JAX. `base_model` is a hub id or a model folder.

    Raises `RequestError` if the base model cannot be loaded.
    """

    config: JaxBackendConfig

    def __init__(
        self, base_model: str, config: JaxBackendConfig, progress: Callable[[str], None] = lambda message: None
    ):
        super().__init__(base_model, config)
        if config.compilation_cache:
            keep_compiled_programs()
        self._folder = model_folder(base_model)
        progress(f"reading the weights of {self._folder}")
        self.model = load_model(
            self._folder,
            dtype=None if config.dtype == "auto" else config.dtype,
            max_lora_adapters=config.max_lora_adapters,
            max_lora_rank=config.max_lora_rank,
            shard_attention_heads=config.shard_attention_heads,
            loss_chunk_size=config.loss_chunk_size,
            gradient_checkpointing=config.gradient_checkpointing,
            mhc_expansion_rate=config.mhc_expansion_rate,
        )
        self.model_config = self.model.config
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
        graphdef, self._base = nnx.split(self.model)
        self._programs = TrainingPrograms(graphdef, config.loss_chunk_size)
        self._tile_shape = TileShape(config.train_tile_tokens, config.train_micro_batch_size)
        self._states: dict[str, ModelState] = {}
        zero = zero_adapter(self.model_config, padded_rank(config.max_lora_rank))
        self._versions = VersionPool(
            zero,
            slots=config.max_lora_adapters,
            load=lambda path: checkpoints.load_version(path, self.model_config, config.max_lora_rank)[0],
        )
        self.sampler = self._sampler = Sampler(
            graphdef,
            self._base,
            self._versions,
            zero,
            self.tokenizer,
            self.model_config,
            max_context_length=self._max_context_length,
            cache_bytes=int(config.kv_cache_gib * 2**30),
            max_rows=config.sample_max_num_sequences,
            deterministic=config.deterministic,
        )
        self._warm_up = self._sampler.warm_up() if config.warm_up and not config.enforce_eager else iter(())

    # -- what the executor asks for -----------------------------------------------------------------------------------

    def step(self):
        with self._computing():
            return super().step()

    def prepare(self) -> bool:
        with self._computing():
            return next(self._warm_up, None) is not None

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """How every program is traced and run."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_matmul_precision("highest"))
            if self.config.enforce_eager:
                stack.enter_context(jax.disable_jit())
            yield

    def run(self, operation: ModelOperation) -> Work:
        return self._work(operation)

    def discard_gradients(self, model_id: str) -> None:
        if model_id in self._states:
            self._states[model_id].gradient_sums = None

    def has_model(self, model_id: str) -> bool:
        return model_id in self._states

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
        )

    # -- documented, beside the contract -----------------------------------------------------------------------------

    def load_sampler_checkpoint(self, model_id: str, checkpoint_id: str, checkpoint_path: str) -> None:
        """Make the sampler or training checkpoint in a folder samplable as `checkpoint_id` of `model_id`."""
        version = version_of(model_id, checkpoint_id)
        adapter, _ = checkpoints.load_version(checkpoint_path, self.model_config, self.config.max_lora_rank)
        self._versions.publish(version, adapter)
        self._versions.mark_stored(version, adapter, checkpoint_path)

    def load_sampler_weights(self, prepared_batch: PreparedSampleBatch) -> list[int]:
        """Put the versions that a batch names into slots. Returns each row's slot; 0 is the base model.

        Slots are a cache: running samples keep theirs, others may be given to another version later.
        """
        slots: list[int] = []
        try:
            for model_id, checkpoint_id in zip(
                prepared_batch.all_model_ids, prepared_batch.all_checkpoint_ids, strict=True
            ):
                slot = self._versions.acquire(version_of(model_id, checkpoint_id) if model_id else None)
                if slot is None:
                    raise RequestError(
                        f"max_lora_adapters={self.config.max_lora_adapters}: no slot is left for {model_id}/"
                        f"{checkpoint_id}; send fewer versions at once, or raise it"
                    )
                slots.append(slot)
        finally:
            for slot in slots:
                self._versions.release(slot)
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
            model_id: ModelMetadata(index, state.lora_config)
            for index, (model_id, state) in enumerate(self._states.items(), 1)
        }

    @property
    def optimizers(self) -> dict[str, tuple[Any, Any, int]]:
        """(first moment, second moment, step) of each model."""
        return {name: (state.first_moment, state.second_moment, state.step) for name, state in self._states.items()}

    @property
    def accumulated_grads(self) -> dict[str, Any]:
        """Gradient sums of each model, None where no pass has added any."""
        return {name: state.gradient_sums for name, state in self._states.items()}

    def adapter(self, model_id: str) -> Adapter:
        """The model's current `Adapter`."""
        return self._state(model_id).adapter

    def _state(self, model_id: str) -> ModelState:
        if model_id not in self._states:
            raise RequestError(f"model_id={model_id} is not loaded; create it, or load it from a checkpoint, first")
        return self._states[model_id]

    # -- operations ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _work(self, operation: ModelOperation) -> Work:
        raise NotImplementedError(type(operation).__name__)

    @_work.register
    def _create(self, operation: CreateModel) -> Work:
        model_id, lora_config = operation.model_id, operation.lora_config
        if model_id in self._states:
            raise RequestError(f"model_id={model_id} exists already; choose another id or delete it first")
        self._check_rank(lora_config.rank)
        if not (lora_config.train_attn or lora_config.train_mlp or lora_config.train_unembed):
            raise RequestError(
                "lora_config: train_attn, train_mlp and train_unembed are all false, so there is nothing to train; "
                "set at least one of them"
            )
        seed = lora_config.seed if lora_config.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
        adapter = init_adapter(self.model_config, lora_config, seed, padded_rank(lora_config.rank))
        yield
        self._states[model_id] = ModelState.fresh(lora_config, adapter)
        return ModelOutput(model_id)

    @_work.register
    def _delete(self, operation: DeleteModel) -> Work:
        self._state(operation.model_id)
        yield
        del self._states[operation.model_id]
        return ModelOutput(operation.model_id)

    @_work.register
    def _forward_backward(self, operation: ForwardBackward) -> Work:
        state = self._state(operation.model_id)
        tiles = make_tiles(operation.data, operation.loss_fn, operation.loss_fn_config, self._tile_shape)
        outputs: list[dict[str, np.ndarray]] = [{} for _ in operation.data]
        scratch = None if operation.forward_only else zeros_like(state.adapter.weights)
        for tile in tiles:
            adapters, arrays = (state.adapter,), (tile.arrays,)
            if scratch is None:
                (result,) = self._programs.forward(self._base, adapters, arrays)
            else:
                ((result, scratch),) = self._programs.forward_backward(self._base, adapters, (scratch,), arrays)
            for index, output in _by_datum(operation, tile, result):
                outputs[index] = output
            yield
        if scratch is not None:
            state.add_gradients(scratch)
        tokens = sum(len(datum.tokens) for datum in operation.data)
        loss = sum(float(output["elementwise_loss"].sum(dtype=np.float64)) for output in outputs)
        return ForwardBackwardOutput(outputs, {"loss:sum": loss, "num_tokens:sum": float(tokens)})

    @_work.register
    def _optim_step(self, operation: OptimStep) -> Work:
        state, params = self._state(operation.model_id), operation.adam_params
        gradients = state.gradient_sums if state.gradient_sums is not None else zeros_like(state.adapter.weights)
        weights, first, second, norm = self._programs.optim_step(
            state.adapter.weights,
            gradients,
            state.first_moment,
            state.second_moment,
            AdamScalars.of(params, state.step + 1),
        )
        grad_norm = float(norm)  # waits for the step, so that a failure shows before anything is replaced
        yield
        crash_point("engine: optimizer step computed, not kept")
        state.adapter = state.adapter._replace(weights=weights)
        state.first_moment, state.second_moment = first, second
        state.step += 1
        state.gradient_sums = None
        return OptimStepOutput({"skyrl.ai/grad_norm": grad_norm, "skyrl.ai/learning_rate": params.learning_rate})

    @_work.register
    def _save(self, operation: SaveCheckpoint) -> Work:
        state = dataclasses.replace(self._state(operation.model_id), gradient_sums=None)
        yield
        return self._writer.submit(self._write_state, operation.path, state)

    def _write_state(self, path: str, state: ModelState) -> SaveOutput:
        return SaveOutput(path, *write_folder(path, checkpoints.pack_training(state, self.info().base_model)))

    @_work.register
    def _snapshot(self, operation: SaveSnapshot) -> Work:
        state = dataclasses.replace(self._state(operation.model_id))
        yield
        return self._writer.snapshot(operation.model_id, partial(self._write_state, operation.path, state))

    @_work.register
    def _load(self, operation: LoadCheckpoint) -> Work:
        return (yield from self._read(operation.model_id, partial(self._read_state, operation)))

    @_work.register
    def _load_snapshot(self, operation: LoadSnapshot) -> Work:
        return (yield from self._read(operation.model_id, partial(self._read_snapshot, operation)))

    def _read(self, model_id: str, read: Callable[[], ModelState]) -> Work:
        """Make a model of what `read` returns, in turns with the work of others."""
        reading = self._writer.submit(read)  # after the writes that are under way
        yield
        while not reading.done():
            wait([reading], READ_TURN_S)
            yield
        self._states[model_id] = reading.result()
        return ModelOutput(model_id)

    def _read_snapshot(self, operation: LoadSnapshot) -> ModelState:
        return checkpoints.load_training(operation.path, self._empty_adapter, digest=operation.digest)

    def _read_state(self, operation: LoadCheckpoint) -> ModelState:
        def like(lora_config: LoraConfig) -> Adapter:
            if operation.model_id in self._states:
                _check_same_adapter(operation.path, lora_config, self._states[operation.model_id])
            return self._empty_adapter(lora_config)

        path, digest = operation.path, operation.digest
        return checkpoints.load_training(path, like, load_optimizer=operation.load_optimizer, digest=digest)

    def _empty_adapter(self, lora_config: LoraConfig) -> Adapter:
        self._check_rank(lora_config.rank)
        return zero_adapter(self.model_config, padded_rank(lora_config.rank))

    @_work.register
    def _publish(self, operation: Publish) -> Work:
        state = self._state(operation.model_id)
        adapter, lora_config = state.adapter, state.lora_config
        yield
        store = partial(self._store, operation, adapter, lora_config)
        if operation.persist:
            return self._writer.submit(store)
        self._versions.publish(operation.version, adapter)
        self._writer.keep_version(operation.version, operation.model_id, store)
        return SaveOutput(operation.path)

    def _store(self, operation: Publish, adapter: Adapter, lora_config: LoraConfig) -> SaveOutput:
        """Write a version's files, so that it may leave memory. One that is to persist exists only from then on."""
        files = checkpoints.pack_sampler(adapter, lora_config, self.model_config)
        saved = SaveOutput(operation.path, *write_folder(operation.path, files))
        if operation.persist:
            self._versions.publish(operation.version, adapter)
        self._versions.mark_stored(operation.version, adapter, operation.path)
        return saved

    def _check_rank(self, rank: int) -> None:
        if rank > self.config.max_lora_rank:
            raise RequestError(
                f"lora_config.rank={rank} is above this server's max_lora_rank={self.config.max_lora_rank}; "
                "ask for a smaller rank, or start the server with a larger one"
            )


def _check_same_adapter(path: str, stored: LoraConfig, model: ModelState) -> None:
    """Loading in place keeps the model's rank, and once it has taken a step its trained modules."""
    loaded = model.lora_config
    modules = ("train_attn", "train_mlp", "train_unembed") if model.step else ()
    for name in ("rank", "alpha", *modules):
        if getattr(stored, name) != getattr(loaded, name):
            raise RequestError(
                f"path={path}: the checkpoint has {name}={getattr(stored, name)} but the model was created with "
                f"{name}={getattr(loaded, name)}; create a new model from the checkpoint instead"
            )


def _by_datum(
    operation: ForwardBackward, tile: Tile, result: PassOutput
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Cut a tile's outputs into (datum index, its outputs), with the shape of its targets."""
    logprobs, losses = np.asarray(result.logprobs), np.asarray(result.losses)
    for place in tile.placements:
        cells = place.row, slice(place.start, place.start + place.length)
        shape = operation.data[place.datum].loss_fn_inputs["target_tokens"].shape
        width = shape[1] if len(shape) == 2 else 1
        yield (
            place.datum,
            {"logprobs": logprobs[cells][:, :width].reshape(shape).copy(), "elementwise_loss": losses[cells].copy()},
        )
