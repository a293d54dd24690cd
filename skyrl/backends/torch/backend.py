"""The torch backend: any causal language model of transformers, many LoRA adapters, local or remote workers.

Workers compute. This module decides the commands for them, and keeps the handles of each model's buffers.
"""

import math
import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from skyrl.backends.active_parameters import active_parameters
from skyrl.backends.base_folder import model_folder, overridden
from skyrl.backends.base_id import base_id
from skyrl.backends.common.dimuon import DimuonScalars
from skyrl.backends.common.memory_plan import CPU_CACHE, GIB
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.models.operations import ModelBackend, StepScalars
from skyrl.backends.common.models.store import Storage
from skyrl.backends.common.offload import MemoryBudget, ModelOffload
from skyrl.backends.common.packing import TileShape, make_tiles
from skyrl.backends.common.pass_output import PassOutputs
from skyrl.backends.common.sampling.no_sampler import NoSampler
from skyrl.backends.common.sampling.rank_samplers import RankSamplers, Turn
from skyrl.backends.common.sampling.sampler import SAMPLING_OPTIONS, Sampler
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.engines.adapter_folder import AdapterFolder, Exports
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.launcher.vllm import Served, with_command
from skyrl.backends.engines.sampler import EngineSampler
from skyrl.backends.executor import Quantum
from skyrl.backends.executor.phases import Phase
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.torch.base_model.memory import tile_tokens
from skyrl.backends.torch.config import TorchBackendConfig
from skyrl.backends.torch.memory_snapshot import write_snapshot
from skyrl.backends.torch.models.checkpoints import TorchFormat
from skyrl.backends.torch.models.state import (
    TorchState,
    TorchVersion,
    adaptable,
    fresh_state,
    layout_of,
    random_version,
    state_bytes,
)
from skyrl.backends.torch.opening import open_group
from skyrl.backends.torch.runner import TorchRunner
from skyrl.backends.torch.workers.group import Buffer, WorkerGroup
from skyrl.backends.torch.workers.rendezvous import TILE, pass_of
from skyrl.errors import RequestError
from skyrl.types import BackendInfo, LoraConfig
from skyrl.utils.adapters.fitting import Features
from skyrl.utils.tokenizer import Tokenizer

FULL_MODEL = Kind(LoraConfig(rank=0), value_head=True)
"""Largest kind of model of which all weights are trained."""
DISPATCH_FLOPS = {"cpu": 2e10, "cuda": 4e13}
"""Floating-point operations of a list of micro-batches in a dispatch, by type of device: about 0.1 s of a rank, so that
messages and agreements, about 1 ms, take little of it. Other models and samples wait for a dispatch."""


class TorchBackend(ModelBackend[TorchState, TorchVersion]):
    """`AbstractBackend` on torch. `base_model` is a hub id or a model folder.

    Raises `RequestError` if the base model cannot be loaded or is not supported.
    """

    config: TorchBackendConfig

    def __init__(
        self, base_model: str, config: TorchBackendConfig, progress: Callable[[str], None] = lambda message: None
    ):
        config.engines.check()
        super().__init__(base_model, config)
        self.max_lora_rank, self.max_lora_adapters = config.max_lora_rank, config.max_lora_adapters
        self.gradient_reduction = config.gradient_reduction
        self._folder = self._computed = model_folder(base_model)
        """The requested model folder, and the folder that workers load."""
        if config.config_overrides:
            self._computed = overridden(self._folder, config.config_overrides, config.offload_folder)
            self._forget = weakref.finalize(self, shutil.rmtree, self._computed.parent, ignore_errors=True)
        self.tokenizer = Tokenizer(self._folder)
        if disagreement := self.tokenizer.disagreement:
            progress(disagreement)
        progress(f"starting {config.num_workers} torch worker(s) ({config.workers}) on {self._folder}")
        self.group = self._open()
        facts = self.group.facts
        where = (
            f"shared by {max(facts.decided.fsdp_size, config.tensor_parallel_size)} workers"
            if facts.is_sharded
            else "whole on each worker"
        )
        how = "packed" if facts.packs else "one by one"
        how += "" if facts.cache_shapes else " and not sampled"
        if config.sequence_parallel_size > 1:
            how += f", each on {config.sequence_parallel_size} workers"
        progress(f"device {facts.device}, base weights in {facts.dtype}, {where}; sequences {how}")
        plan = facts.decided.plan
        for note in (str(plan), *facts.decided.notes, *self.group.notes):
            progress(note)
        if facts.longest is not None and config.max_context_length > facts.longest:
            self.group.close()
            raise RequestError(
                f"max_context_length={config.max_context_length} is above the {facts.longest} tokens that the base "
                f"model was made for; use at most {facts.longest}, or 0"
            )
        self._max_context_length = facts.decided.longest
        self._active_parameters = active_parameters(self._computed)
        self._base_id = base_id(self._computed, random=config.load_format == "dummy")
        self._shape, self._forward_shape = self._shapes()
        try:
            held = self._held_bytes
            room = facts.decided.models(config.adapter_memory_gib, config.adapter_host_memory_gib, held)
            version_bytes, self._bank_bytes = plan.versions_and_stacks(
                config.version_memory_gib, room, facts.decided.adapter, config.max_lora_adapters - 1
            )
        except RequestError:
            self.group.close()
            raise
        whole = config.full_models and config.full_models * self.stored_bytes(FULL_MODEL)
        if (copies := facts.decided.copies) is not None and copies.left >= whole:
            progress(
                "a copy of the base weights on each worker would fit; with fsdp_size=1 (torch.fsdp_size of trainers), "
                "no pass waits for weights of other workers, and each worker samples a share of the requests"
            )
        self._models = ModelOffload[TorchState](
            MemoryBudget(*room),
            lambda path, state: self._storage.write_state(path, state),
            lambda path: self._storage.read_state(path),
            config.offload_folder,
            self.notify,
            offloads=config.offload_after_step,
        )
        self._format = TorchFormat(
            base_model=self.info().base_model,
            folder=self._computed,
            group=self.group,
            value_head=config.value_head,
            max_lora_rank=config.max_lora_rank,
        )
        self._versions = VersionPool[TorchVersion](
            slots=config.max_lora_adapters,
            nbytes=self._format.version_bytes,
            fitted=lambda version: version,
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
        self._engines: EngineSampler[TorchVersion] | None = None
        self.sampler = self._samplers() if facts.cache_shapes else NoSampler(self.info)
        if config.engines.count:
            self.phase_s = config.engines.phase_s
            try:
                self.info().check_samples()  # the scores that engines are compared with
                assert isinstance(self.sampler, Sampler)
                self.sampler = self._engines = self._engine_sampler(self.sampler)
                self._engines.open(progress)
            except BaseException:  # including interruptions: loading a model into engines takes minutes
                if self._engines is not None:
                    self._engines.close()
                self.group.close()
                raise
        if config.workers != "in_process":
            self.deadline_s = self.group.timeout_s = config.dispatch_timeout_s
            self.in_flight = 2
            tokens = DISPATCH_FLOPS[facts.device.partition(":")[0]] / (6 * (self._active_parameters or math.inf))
            self.dispatch_tokens = int(self.group.tiles_at_once * tokens)

    @property
    def _held_bytes(self) -> int:
        """Bytes that `full_models` models take on a worker."""
        count = self.config.full_models
        return count and count * self.nbytes_of(FULL_MODEL)

    @property
    def _cache_bytes(self) -> int:
        """Maximum bytes of KV cache on a worker."""
        asked = int(self.config.kv_cache_gib * GIB)
        return asked if asked and not self.config.gpu_memory_utilization else self.group.facts.decided.plan.cache

    def _samplers(self) -> Sampler[TorchVersion] | RankSamplers[TorchVersion]:
        """One sampler for each worker. A single sampler if workers share the base model, or if engines sample."""
        if self.group.facts.is_sharded or self.group.world == 1 or self.config.engines.count:
            return self._own_sampler()
        turn = Turn()
        with turn:
            return RankSamplers([self._own_sampler(rank, turn) for rank in range(self.group.world)], turn)

    def _own_sampler(self, rank: int = 0, turn: Turn | None = None) -> Sampler[TorchVersion]:
        config, facts = self.config, self.group.facts
        itemsize = 4 if facts.dtype == "float32" else 2
        runner = TorchRunner(
            self.group,
            self._versions,
            token_bytes=itemsize * sum(heads * (key + value) for heads, key, value in facts.cache_shapes),
            max_rows=facts.decided.rows,
            bank_bytes=self._bank_bytes,
            deterministic=config.deterministic,
            max_tokens=config.sample_max_num_batched_tokens,
            call=partial(self._ask, rank, turn),
        )
        return Sampler(
            runner,
            self._versions,
            self.tokenizer,
            max_context_length=self._max_context_length,
            base=self._base_id,
            cache_bytes=self._cache_bytes,
            max_rows=facts.decided.rows,
            deterministic=config.deterministic,
            prefix_caching=config.prefix_caching,
            chunked_prefill=config.chunked_prefill,
            on_progress=lambda progress: self.on_progress(progress),
        )

    def _ask(self, rank: int, turn: Turn | None, *command: Any) -> Any:
        """Return the result of a worker's command. Other ranks' samplers run in the meantime."""
        with nullcontext() if turn is None else turn.passed_on():
            return self.group.wait(self.group.on(rank, *command), command[0], rank)

    def _engine_sampler(self, sampler: Sampler[TorchVersion]) -> EngineSampler[TorchVersion]:
        options = self._with_command(self.config.engines)
        assert options.folder is not None
        return EngineSampler(
            options,
            sampler,
            self._versions,
            Exports(
                AdapterFolder(options.folder, int(options.folder_gib * GIB)),
                self._format,
                lambda version: version.kind.lora_config,
            ),
            lambda config, scale: random_version(self.group, Kind(config), scale),
            self.info(),
            self.tokenizer,
            self.notify,
            self._computed,
            lambda progress: self.on_progress(progress),
        )

    def _with_command(self, options: EngineOptions) -> EngineOptions:
        """Return options of engines. If we launch vLLM, they contain a command that matches this backend."""
        if options.launch is None:
            return options
        served = Served(
            model=self._computed,
            dtype=self.group.facts.dtype,
            longest=self._max_context_length,
            max_requests=options.max_requests,
            max_logprobs=options.max_logprobs,
            max_loras=0 if options.whole else options.max_loras,
            max_lora_rank=self.config.max_lora_rank,
            on_gpu=not self.group.facts.device.startswith("cpu"),
            cache_gib=self.config.kv_cache_gib or CPU_CACHE / GIB,
            colocated=options.colocated,
            development=options.whole or options.colocated,
        )
        return options.model_copy(update={"launch": with_command(options.launch, served)})

    def _open(self) -> WorkerGroup:
        return open_group(self.config, self._computed, self.lose)

    def _shapes(self) -> tuple[TileShape, TileShape]:
        """Tile shapes of passes with and without gradients."""
        config, facts = self.config, self.group.facts
        tokens = tile_tokens(config.train_tile_tokens, facts.device.partition(":")[0])
        rows = config.train_micro_batch_size if facts.packs else 1
        forward = config.forward_micro_batch_size or rows if facts.packs else 1
        return TileShape(tokens, rows), TileShape(tokens, forward)

    def close(self) -> None:
        if self._engines is not None:
            self._engines.close()
        super().close()
        if isinstance(self.sampler, RankSamplers):
            self.sampler.close()
        self.group.close()
        if self._computed != self._folder:
            self._forget()

    @cached_property
    def _adaptable(self) -> dict[str, Features]:
        return adaptable(self.group.facts)

    def info(self) -> BackendInfo:
        facts = self.group.facts
        local = Path(self.base_model).expanduser().is_dir()
        engines = self.config.engines
        return BackendInfo(
            base_model=str(self._folder) if local else self.base_model,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_context_length=self._max_context_length,
            max_lora_rank=self.config.max_lora_rank,
            tokenizer_path=str(self._folder),
            active_parameters=self._active_parameters,
            samples_at_a_time=max(
                BackendInfo.samples_at_a_time,
                engines.count * engines.max_requests * self._max_context_length,
            ),
            sampling_options=SAMPLING_OPTIONS,
            adaptable=self._adaptable,
            samples=bool(facts.cache_shapes),
            base_id=self._base_id,
            colocated=bool(engines.count) and engines.colocated,
        )

    # -- devices shared with engines ----------------------------------------------------------------------------------

    def pause(self) -> "Future[Any] | None":
        return None if self._engines is None else self._engines.fleet.pause()

    def sleep(self, phase: Phase) -> "Future[Any] | None":
        if phase == "training":
            return self.group.run("offload") if self._offloads else None
        return None if self._engines is None else self._engines.fleet.sleep()

    @property
    def _offloads(self) -> bool:
        """True if models move from a device with its own memory to host memory. On a CPU they are there already."""
        return self.config.offload_after_step and not self.group.facts.device.startswith("cpu")

    def wake(self, phase: Phase) -> "Future[Any] | None":
        return self._engines.fleet.wake() if self._engines is not None and phase == "sampling" else None

    def resume(self) -> None:
        if self._engines is not None:
            self._engines.fleet.resume()

    @staticmethod
    def record_memory(path: Path) -> None:
        """Write a memory snapshot of this process to a file, as JSON."""
        write_snapshot(path)

    # -- hooks of the executor ----------------------------------------------------------------------------------------

    def most_together(self, kind: Any) -> int:
        return 1 if kind is None else self.group.tiles_at_once

    def compute(self, quanta: list[Quantum]) -> "list[Any] | Future[list[Any]]":
        if quanta[0].kind is not None:
            answers = self.group.tiles([quantum.inputs for quantum in quanta])
        else:
            answers = self._alone(quanta[0])
        return answers.result() if self.config.workers == "in_process" else answers

    def hang(self) -> str:
        return self.group.hang()

    def _alone(self, quantum: Quantum) -> "Future[list[Any]]":
        """Run a command on all ranks. The future gives a list with the answer, or raises the command's exception."""
        outcome: Future[list[Any]] = Future()
        outcome.set_running_or_notify_cancel()

        def done(answer: "Future[Any]") -> None:
            error = answer.exception()
            outcome.set_result([answer.result()]) if error is None else outcome.set_exception(error)

        self.group.run(*quantum.inputs).add_done_callback(done)
        return outcome

    # -- models -------------------------------------------------------------------------------------------------------

    def check_kind(self, kind: Kind) -> None:
        super().check_kind(kind)
        layout_of(self.group.facts, kind)

    def nbytes_of(self, kind: Kind) -> int:
        weights, moments, _ = map(self.group.parts, self.group.spreads(kind))
        return state_bytes(kind, layout_of(self.group.facts, kind).size, weights, moments)

    def stored_bytes(self, kind: Kind) -> int:
        return state_bytes(kind, layout_of(self.group.facts, kind).size)

    def fresh_state(self, kind: Kind, seed: int) -> TorchState:
        return fresh_state(self.group, kind, seed)

    def run_pass(self, operation: ForwardBackward, state: TorchState):
        objective = None if isinstance(operation.loss_fn, str) else operation.loss_fn
        weights = None if operation.reference else state.weights.handle
        spreads = self.group.spreads(state.kind)
        sums = None if operation.forward_only else Buffer(self.group, state.weights.size, spreads.sums)
        handle = None if sums is None else sums.handle
        shape = self._forward_shape if operation.forward_only else self._shape
        outputs = PassOutputs(operation)
        tiles = list(make_tiles(operation.data, operation.loss_fn, operation.loss_fn_config, shape))
        config = state.kind.lora_config
        arrays = [one.arrays if sums is None else one.arrays.with_dropout(config, state.step) for one in tiles]
        together = self._together(state.kind, weights, handle)
        answers = yield [
            Quantum(tile.length, together, (TILE, state.kind, weights, handle, inputs, objective))
            for tile, inputs in zip(tiles, arrays, strict=True)
        ]
        for tile, answer in zip(tiles, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            outputs.fill(tile, answer)
        return outputs.result(), sums

    def _together(self, kind: Kind, weights: int | None, sums: int | None) -> tuple[Any, ...]:
        """Key of a pass. Ranks may compute tiles with equal keys at the same time, because their collectives match."""
        facts = self.group.facts
        return pass_of(facts.targets, kind, weights, sums) if facts.is_sharded else (TILE,)

    def add_gradients(self, state: TorchState, gradients: Buffer) -> None:
        if state.gradient_sums is None:
            state.gradient_sums = gradients
            return
        total = Buffer(self.group, gradients.size, gradients.spread)
        self.group.tell("add", total.handle, state.gradient_sums.handle, gradients.handle)
        state.gradient_sums = total

    def run_step(self, scalars: StepScalars, state: TorchState):
        if isinstance(scalars, DimuonScalars):
            return (yield from self._run_dimuon_step(scalars, state))
        size, sums = state.weights.size, state.gradient_sums
        after = tuple(
            Buffer(self.group, size, buffer.spread)
            for buffer in (state.weights, state.first_moment, state.second_moment)
        )
        before = (
            state.weights.handle,
            None if sums is None else sums.handle,
            state.first_moment.handle,
            state.second_moment.handle,
        )
        norm = yield Quantum(
            1, None, ("step", size, state.weights.spread, before, tuple(buffer.handle for buffer in after), scalars)
        )

        def keep() -> None:
            state.weights, state.first_moment, state.second_moment = after
            state.step += 1

        return norm, keep

    def _run_dimuon_step(self, scalars: DimuonScalars, state: TorchState):
        size, sums = state.weights.size, state.gradient_sums
        weights, momentum = (Buffer(self.group, size, buffer.spread) for buffer in (state.weights, state.first_moment))
        before = state.weights.handle, None if sums is None else sums.handle, state.first_moment.handle
        shapes = [part.shape for part in layout_of(self.group.facts, state.kind).parts]
        after = weights.handle, momentum.handle
        norm = yield Quantum(1, None, ("dimuon_step", shapes, before, after, scalars))

        def keep() -> None:
            state.weights, state.first_moment = weights, momentum
            state.step += 1

        return norm, keep
