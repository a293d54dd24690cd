"""The JAX backend: one base model in memory, on which many LoRA adapters train and sample.

A model of rank 0 is fully trained: it has its own base weights in addition to the shared ones.

Each operation is a generator that yields after every micro-batch, so the executor can interleave models and samples. A
pass accumulates gradients separately and adds them to the model's sums at its end. No array of a model is donated to a
program, so a failure at any point leaves the model unchanged.
"""

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from skyrl.backends.active_parameters import active_parameters
from skyrl.backends.backend import (
    ForwardBackward,
)
from skyrl.backends.base_folder import config_of, model_folder, overridden
from skyrl.backends.base_id import base_id
from skyrl.backends.common.dimuon import DimuonScalars
from skyrl.backends.common.memory_plan import CONTEXTS, contexts, size_of
from skyrl.backends.common.models.kind import Kind, check_selects
from skyrl.backends.common.models.operations import ModelBackend, StepScalars
from skyrl.backends.common.models.store import Storage
from skyrl.backends.common.offload import MemoryBudget, ModelOffload
from skyrl.backends.common.packing import TileShape
from skyrl.backends.common.sampling.sampler import SAMPLING_OPTIONS, Sampler
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.executor import Quantum
from skyrl.backends.jax.compile_cache import by_turns
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.backends.jax.layout import Layout, make_mesh
from skyrl.backends.jax.memory_plan import PREALLOCATED, tokens_together
from skyrl.backends.jax.models.checkpoint_format import JaxFormat
from skyrl.backends.jax.models.padding import fitted
from skyrl.backends.jax.models.state import (
    ModelState,
    Tree,
    bytes_of,
    fresh_adapter,
    model_bytes,
    zeros_like,
)
from skyrl.backends.jax.sampling.adapter_stacks import adapters_in_stacks, most_sampled
from skyrl.backends.jax.sampling.runner import JaxRunner
from skyrl.backends.jax.training.microbatches import Passes
from skyrl.backends.jax.training.program_choice import defaults_for, planned, with_planned_cache
from skyrl.errors import RequestError
from skyrl.tx.design.rotations import length_notice
from skyrl.tx.families import check_known
from skyrl.tx.io.peft import adaptable
from skyrl.tx.io.weights import abstract_model, stored_tensor, with_random_weights, with_weights
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.lora import adapted, connector_targets, lora_targets, padded_rank, zero_adapter
from skyrl.types import AdapterConfig, BackendInfo, LoraConfig, ModuleGroup
from skyrl.utils.adapters.fitting import Features
from skyrl.utils.files.paths import cache_folder
from skyrl.utils.tokenizer import Tokenizer

THREADS_OF_A_DEVICE = 2
"""Threads for each part of a split CPU: one that may wait in a collective, and one that computes."""
CACHE_BYTES = 8 * 2**30
"""Maximum bytes of compiled programs on disk. The least recently used are removed first."""


def keep_compiled_programs() -> None:
    """Enable JAX's persistent compilation cache in the user's cache folder, unless it is configured.

    JAX adds nothing to the cache while any entry lacks a file with its access time. An entry lacks this file if it was
    written without a limit on the cache size, or if its process was killed during the write. Such entries get the
    access time 0.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = cache_folder() / "xla"
        for entry in folder.glob("*-cache"):
            last_use = entry.with_name(f"{entry.name.removesuffix('-cache')}-atime")
            if not last_use.exists():
                last_use.write_bytes(bytes(8))
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def claim_device_memory() -> None:
    """Let JAX preallocate 90 % of a GPU's memory instead of 75 %, unless it is configured.

    The rest is for the driver, and for the workspaces of cuBLAS and cuDNN. No effect if JAX has started.
    """
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(PREALLOCATED)


def enough_threads() -> None:
    """Let JAX have threads for each part of a split CPU. No effect if JAX has started.

    By default it has as many as cores. A device that waits for others in a collective keeps its thread, so that all may
    wait for ever.
    """
    devices = int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1)
    if devices > (os.cpu_count() or 1):
        os.environ.setdefault("NPROC", str(THREADS_OF_A_DEVICE * devices))


ENDED = object()
"""Sentinel of a warm-up that has ended."""


class JaxBackend(ModelBackend[ModelState, Adapter]):
    """`AbstractBackend` on JAX. `base_model` is a hub id or a model folder.

    Raises `RequestError` if the base model cannot be loaded.
    """

    config: JaxBackendConfig

    def __init__(
        self, base_model: str, config: JaxBackendConfig, progress: Callable[[str], None] = lambda message: None
    ):
        super().__init__(base_model, config)
        self.max_lora_rank, self.max_lora_adapters = config.max_lora_rank, config.max_lora_adapters
        self.gradient_reduction = config.gradient_reduction
        claim_device_memory()
        enough_threads()
        if config.compilation_cache:
            keep_compiled_programs()
        try:
            check_known(config_of(base_model), f"base_model={base_model}")  # before weights are downloaded
            self._folder = self._computed = model_folder(base_model)
            """The requested model folder, and the folder that is loaded."""
            if config.config_overrides:
                self._computed = overridden(self._folder, config.config_overrides, config.offload_folder)
                self._forget = weakref.finalize(self, shutil.rmtree, self._computed.parent, ignore_errors=True)
            model = abstract_model(
                self._computed,
                dtype=None if config.dtype == "auto" else config.dtype,
                max_lora_adapters=config.max_lora_adapters,
                max_lora_rank=config.max_lora_rank,
                shard_attention_heads=config.shard_attention_heads,
                loss_chunk_size=config.loss_chunk_size,
                mhc_expansion_rate=config.mhc_expansion_rate,
                max_context_length=config.max_context_length or CONTEXTS[-1],  # read by longrope only
            )
        except ValueError as error:
            raise RequestError(str(error)) from error
        self.model_config = model.config
        self.model_config.name_or_path = str(self._folder)
        made_for = self.model_config.max_position_embeddings
        if config.max_context_length > made_for:
            raise RequestError(
                f"max_context_length={config.max_context_length} is above the {made_for} tokens that the base model "
                f"was made for; use at most {made_for}, or 0"
            )
        self._active_parameters = active_parameters(self._computed)
        self._base_id = base_id(self._computed, random=config.load_format == "dummy")
        self.tokenizer = Tokenizer(self._folder)
        if disagreement := self.tokenizer.disagreement:
            progress(disagreement)
        if notice := length_notice(self.model_config):
            progress(notice)
        self.mesh = make_mesh(config.mesh_sizes, model.design, jax.devices())
        self._layout = layout = Layout(self.mesh, model.design, config.shard_attention_heads)
        self.process_id = 0
        zero = self._zero_adapter(padded_rank(config.max_lora_rank))
        self._defaults = defaults = defaults_for(model, config, layout)
        shape = TileShape(defaults.tile_tokens, config.train_micro_batch_size)
        device, dtype = jax.devices()[0], jax.tree.leaves(nnx.state(model))[0].dtype
        progress(f"device {device.platform} ({device.device_kind}), base weights in {dtype}, {defaults}")
        if len(jax.devices()) > 1:
            progress(layout.description(len(jax.devices())))
        with self._computing():
            lengths = contexts(config.max_context_length, self.model_config, defaults.cache_tokens)
            self._programs, plan, stacks, self._max_context_length, _ = planned(
                model, config, defaults.cache_bytes, shape, lengths, zero, layout
            )
            if plan.cache < defaults.cache_bytes:
                self._defaults = defaults = defaults_for(model, with_planned_cache(config, plan), layout)
                progress(f"KV cache of {size_of(plan.cache)} and {defaults.rows} rows, as calls need the rest")
        self.plan = plan
        progress(str(plan))
        budget = MemoryBudget(*plan.models(config.adapter_memory_gib, config.adapter_host_memory_gib))
        version_bytes, stack_bytes = plan.versions_and_stacks(
            config.version_memory_gib,
            (budget.device, budget.host),
            layout.nbytes(zero),
            adapters_in_stacks(config.max_lora_adapters - 1),
        )
        if device.platform != "cpu":  # sizes of models are those of their parts on a device, and so is a CPU's plan
            budget.host //= self.mesh.size
        self._models = ModelOffload[ModelState](
            budget,
            lambda path, state: self._storage.write_state(path, state),
            lambda path: self._storage.read_state(path),
            config.offload_folder,
            self.notify,
            offloads=config.offload_after_step,
        )
        shardings = layout.of_parameters(nnx.split(model)[1])
        if config.load_format == "dummy":
            progress("making random weights (load_format=dummy)")
            self.model = with_random_weights(model, shardings)
        else:
            progress(f"reading the weights of {self._folder}")
            beside = {f"{config.value_head}.weight"}
            self.model = with_weights(model, self._folder, beside, shardings)
        graphdef, self._base = nnx.split(self.model)
        ranks = sorted({padded_rank(rank) for rank in range(1, config.max_lora_rank + 1)})
        self._passes = Passes(
            self._programs,
            self._base,
            shape,
            self._max_context_length,
            empty=self._zero_adapter,
            ranks=ranks,
            stacks=stacks,
            together=tokens_together(shape.tokens),
            pads=device.platform != "cpu" or layout.rows > 1,
            forward_shape=TileShape(shape.tokens, config.forward_micro_batch_size or config.train_micro_batch_size),
            has_connectors=config.mhc_expansion_rate > 1,
            rows=layout.rows,
            alone=config.deterministic,
        )
        self._format = JaxFormat(
            base_model=self.info().base_model,
            folder=self._computed,
            model=self.model,
            base=self._base,
            layout=layout,
            value_head=config.value_head,
            max_lora_rank=config.max_lora_rank,
        )
        self._versions = VersionPool[Adapter](
            slots=1 + min(config.max_lora_adapters - 1, most_sampled(stack_bytes, layout.nbytes(zero))),
            nbytes=bytes_of,
            fitted=partial(fitted, like=zero),
            max_bytes=version_bytes,
            load=lambda path: self._writer.read(path, partial(self._storage.read_version, path)),
            notify=self.notify,
        )
        self._storage = Storage(
            format=self._format,
            writer=self._writer,
            versions=self._versions,
            check=self.check_kind,
            archives=self.archives(config.offload_folder),
            unwritten_bytes=max(1, version_bytes // 2),
        )
        self._runner = JaxRunner(
            graphdef,
            self._base,
            self._versions,
            zero,
            self.model_config,
            layout,
            max_rows=defaults.rows,
            deterministic=config.deterministic,
            max_tokens=config.sample_max_num_batched_tokens,
        )
        self.sampler = Sampler(
            self._runner,
            self._versions,
            self.tokenizer,
            max_context_length=self._max_context_length,
            base=self._base_id,
            cache_bytes=defaults.cache_bytes,
            max_rows=defaults.rows,
            deterministic=config.deterministic,
            prefix_caching=config.prefix_caching,
            chunked_prefill=config.chunked_prefill,
            on_progress=lambda progress: self.on_progress(progress),
        )
        warm_up = config.warm_up and not config.enforce_eager
        self._sampling_warm_up = self.sampler.warm_up() if warm_up else iter(())
        self._warm_up = by_turns(self._passes.warm_up(), self._sampling_warm_up) if warm_up else iter(())

    def _zero_adapter(self, rank: int) -> Adapter:
        """An adapter without effect, of a padded rank."""
        return self._layout.place(zero_adapter(self.model_config, rank))

    # -- hooks of the executor ----------------------------------------------------------------------------------------

    def step(self):
        with self._computing():
            return super().step()

    def prepare_first(self) -> None:
        with self._computing():
            next((ready for ready in self._sampling_warm_up if ready), None)

    def prepare(self) -> bool:
        with self._computing():
            return next(self._warm_up, ENDED) is not ENDED

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Context for tracing and running programs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_matmul_precision(self._defaults.matmul_precision))
            if self._layout.spread:
                stack.enter_context(jax.set_mesh(self.mesh))
            if self.config.enforce_eager:
                stack.enter_context(jax.disable_jit())
            yield

    def compute(self, quanta: list[Quantum]) -> list[Any]:
        return self._passes.compute([quantum.inputs for quantum in quanta])

    def most_together(self, kind: Any) -> int:
        return self._passes.most_together(kind)

    @staticmethod
    def record_memory(path: Path) -> None:
        """Write a device memory profile of the process to a file, for pprof."""
        path.parent.mkdir(parents=True, exist_ok=True)
        jax.profiler.save_device_memory_profile(str(path))

    def close(self) -> None:
        super().close()
        if self._computed != self._folder:
            self._forget()

    @cached_property
    def _adaptable(self) -> dict[str, Features]:
        return adaptable(lora_targets(self.model_config))

    def info(self) -> BackendInfo:
        local = Path(self.base_model).expanduser().is_dir()
        return BackendInfo(
            base_model=str(self._folder) if local else self.base_model,
            architecture=self.model_config.architecture,
            vocab_size=self.model_config.vocab_size,
            max_context_length=self._max_context_length,
            max_lora_rank=self.config.max_lora_rank,
            tokenizer_path=str(self._folder),
            active_parameters=self._active_parameters,
            sampling_options=SAMPLING_OPTIONS,
            adaptable=self._adaptable,
            base_id=self._base_id,
        )

    @property
    def metrics(self) -> dict[str, int]:
        """Numbers of compiled programs. They stop growing once all shapes have been seen."""
        return {"training_programs": self._programs.compiled, "sampling_programs": self._runner.compiled}

    # -- documented read-only views -----------------------------------------------------------------------------------

    @property
    def optimizers(self) -> dict[str, tuple[Any, Any, int]]:
        """(first moment, second moment, step) of each model."""
        return {name: (state.first_moment, state.second_moment, state.step) for name, state in self._peeked()}

    @property
    def accumulated_grads(self) -> dict[str, Any]:
        """Gradient sums of each model; None if there are none."""
        return {name: state.gradient_sums for name, state in self._peeked()}

    def adapter(self, model_id: str) -> Adapter:
        """The model's current `Adapter`."""
        self._check_loaded(model_id)
        return self._models.peek(model_id).adapter

    def _peeked(self) -> Iterator[tuple[str, ModelState]]:
        return ((model_id, self._models.peek(model_id)) for model_id in self._models)

    # -- models -------------------------------------------------------------------------------------------------------

    def check_kind(self, kind: Kind) -> None:
        super().check_kind(kind)
        if isinstance(kind.lora_config, AdapterConfig):
            modules: list[tuple[str, ModuleGroup]] = [
                (module, target.group) for target in lora_targets(self.model_config) for _, module in target.modules
            ]
            connectors = [name for target in connector_targets(self.model_config) for _, name in target.modules]
            check_selects(kind.lora_config, modules, self.model_config.architecture, connectors)

    def _check_no_connectors(self, lora_config: LoraConfig) -> None:
        """Raise `RequestError` if an adapter has connectors, which Dimuon does not support."""
        targets = connector_targets(self.model_config)
        if name := next((module for target in targets for _, module in adapted(target, lora_config)), None):
            raise RequestError(
                f"mhc_expansion_rate={self.config.mhc_expansion_rate}: the adapter has connectors such as {name}, and "
                "Dimuon is for matrices of LoRA; use AdamW, or leave them out (exclude_modules='.*_connector')"
            )

    def nbytes_of(self, kind: Kind) -> int:
        return model_bytes(self.model_config, self._base, kind, self._layout)

    def fresh_state(self, kind: Kind, seed: int) -> ModelState:
        stored = kind.value_head and self.config.load_format != "dummy"
        head = stored_tensor(self._folder, f"{self.config.value_head}.weight") if stored else None
        adapter = fresh_adapter(self.model_config, self._base, kind, seed, None if head is None else head[0])
        return ModelState.fresh(kind.lora_config, self._layout.place(adapter))

    def run_pass(self, operation: ForwardBackward, state: ModelState):
        return self._passes.run(operation, state)

    def add_gradients(self, state: ModelState, gradients: Tree) -> None:
        """Add gradients and wait for the result, so that a failure shows before the model changes."""
        sums = state.gradient_sums
        state.gradient_sums = gradients if sums is None else jax.block_until_ready(self._programs.add(sums, gradients))

    def step_metrics(self, scalars: StepScalars, state: ModelState) -> dict[str, float]:
        if self.config.mhc_expansion_rate == 1:
            return {}
        sums = state.gradient_sums
        norm = 0.0 if sums is None else float(self._programs.connector_norm(sums)) / float(scalars.gradient_divisor)
        return {"skyrl.ai/mhc_gradient_norm": norm}

    def run_step(self, scalars: StepScalars, state: ModelState):
        if isinstance(scalars, DimuonScalars):
            self._check_no_connectors(state.lora_config)
        gradients = state.gradient_sums if state.gradient_sums is not None else zeros_like(state.adapter.weights)
        weights, first, second = state.adapter.weights, state.first_moment, state.second_moment
        if isinstance(scalars, DimuonScalars):
            weights, first, norm = self._programs.dimuon_step(weights, gradients, first, scalars)
        else:
            weights, first, second, norm = self._programs.optim_step(weights, gradients, first, second, scalars)

        def keep() -> None:
            state.adapter = state.adapter._replace(weights=weights)
            state.first_moment, state.second_moment = first, second
            state.step += 1

        return float(norm), keep  # waits for the step, so that a failure shows before the model changes
        yield
