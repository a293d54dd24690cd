"""Loading of base models from transformers: whole, or as a skeleton whose layers are filled one at a time.

Ranks that share weights have no memory for all of them. So each rank loads one layer, keeps its part, and continues
with the next layer.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from skyrl.backends.base_folder import config_of
from skyrl.backends.torch.base_model.experts import file_name, names_in_files, stacked_in_files
from skyrl.errors import RequestError
from skyrl.utils.files.hf_files import text_config, text_names, untied_copy
from skyrl.utils.files.tensor_file import TensorReader, equal_tensors
from skyrl.utils.files.weight_files import weight_files

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Settings of config.json that must be at least 1."""
FILLED = frozenset({torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
"""Functions that classes of models create weights with, beside `torch.empty`."""
LARGE = 2**20
"""Minimum values of their tensors that get no memory in a skeleton."""
NO_MEMORY = ("DefaultCPUAllocator: ", "Cannot allocate memory")
"""Parts of messages of errors that are raised for a lack of memory."""
NAMED = 3
"""Maximum tensors that an error names."""

Dtype = Literal["auto", "float32", "bfloat16"]
Checkpointing = bool | Literal["auto"]
"""Activation checkpointing of layers; "auto": only if needed to fit into memory."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a model."""

    dtype: Dtype = "auto"
    random_weights: bool = False
    gradient_checkpointing: Checkpointing = False
    """Recompute activations of layers in the backward pass. "auto" must be resolved before a model is loaded."""
    deterministic: bool = False
    """Use no kernel whose results are not bitwise reproducible."""
    max_context_length: int = 0
    """Longest sequence in tokens; 0: the shortest default."""


def load(folder: Path, device: torch.device, options: LoadOptions) -> Any:
    """Load a model with all weights, in the dtype for a device. Random weights are created on the device."""
    from transformers import AutoModelForCausalLM

    tied = skeleton(folder, device, options).all_tied_weights_keys  # refuses a model before its weights are read
    config, dtype = _settings(folder, device, options)
    model: Any
    try:
        if options.random_weights:
            with torch.device(device):
                torch.manual_seed(0)  # equal on all ranks
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            weight_files(folder)  # refuses files that transformers would read in another way, or fail on
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
            model, report = loaded
            _check_complete(folder, report)
            for copy in sorted(tied.keys() - model.all_tied_weights_keys.keys()):
                raise RequestError(untied_copy(f"base_model={folder}", tied[copy], copy))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _cannot_load(folder, error) from error
    return model.eval()


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise `RequestError` if the loading report of transformers lists weights that it initialized at random."""
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing:
        names = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        raise RequestError(
            f"base_model={folder}: its files have no tensor for {names}; fetch all files again, and use a config.json "
            "that belongs to them"
        )


def load_onto(where: torch.device, folder: Path, device: torch.device, options: LoadOptions) -> Any:
    """Load a model like `load` for `device`, but read the weights onto `where`, one tensor at a time.

    If tensor names in the files differ from the model's, the whole model is loaded into host memory first.
    """
    if not options.random_weights:
        model = skeleton(folder, device, options)
        files = WeightFiles(folder, model, where)
        if files.fit:
            files.check_copies(folder)
            files.fill_buffers()
            files.fill(model)
            return model.to(where)
    return load(folder, device, options).to(where)


def load_by_layers(folder: Path, device: torch.device, options: LoadOptions) -> tuple[Any, Callable[[nn.Module], None]]:
    """Return a model on the CPU, as from `load` for a device, and a function that loads missing weights of a module.

    If tensor names in the files differ from the model's, or weights are random, the model is complete already.
    """
    if not options.random_weights:
        model = skeleton(folder, device, options)
        files = WeightFiles(folder, model)
        if files.fit:
            files.check_copies(folder)
            files.fill_buffers()
            return model, files.fill
        log.info("each worker loads all of %s: its files have other names than its weights", folder)
    return load(folder, device, options).to("cpu"), lambda module: None


def skeleton(folder: Path, device: torch.device, options: LoadOptions) -> Any:
    """Return a model as from `load`, but with its large weights on the meta device. Its buffers are on the CPU.

    Raises `RequestError` for a model that transformers cannot create, or that has no linear maps in its layers.
    """
    from transformers import AutoModelForCausalLM

    config, dtype = _settings(folder, device, options)
    try:
        model = unfilled(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    except Exception as error:  # of any type, as each class has checks of its own
        raise _cannot_load(folder, error) from error
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise RequestError(
            f"base_model={folder}: the configuration of {config.model_type} has no hidden_size, as its layers have no "
            "common width; use another model"
        )
    if model.get_output_embeddings() is None:
        raise RequestError(f"base_model={folder} has no vocabulary projection, so it is no causal language model")
    _check_linear(model, folder)
    return model.eval()


def _check_linear(model: Any, folder: Path) -> None:
    """Raise `RequestError` for a model without linear maps in its layers."""
    layers = decoder_layers(model) or [model.base_model]
    modules = [(name.rpartition(".")[2], module) for layer in layers for name, module in layer.named_modules()]
    if any(isinstance(module, nn.Linear) for _, module in modules):
        return
    others = {
        name: f"{name} is {type(module).__name__}"
        for name, module in modules
        if any(weight.dim() == 2 for weight in module.parameters(recurse=False))
    }
    raise RequestError(
        f"base_model={folder}: the decoder blocks of {type(model).__name__} have no nn.Linear "
        f"({', '.join(others.values()) or 'nor another matrix'}), so no adapter can be on them; use a model whose "
        "blocks have"
    )


def layers_of(model: Any, folder: Path, purpose: str = "shard; leave fsdp_size at 1") -> Sequence[nn.Module]:
    """Decoder blocks of a model. Raises `RequestError` if it has no list of them; `purpose` is what to do instead."""
    if layers := decoder_layers(model):
        return layers
    raise RequestError(f"base_model={folder}: {model.config.model_type} has no list of layers to {purpose}")


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """Decoder blocks of a model; empty if it has no list of them."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    return next((list(module) for module in lists if len(module) == count), [])


class WeightFiles:
    """Safetensors files of a model's folder, from which a skeleton is filled.

    Args:
        folder: Folder of the model.
        model: Skeleton of the model.
        device: Device for its weights.
    """

    def __init__(self, folder: Path, model: nn.Module, device: torch.device = CPU):
        self._device = device
        self._quantised = getattr(getattr(model, "config", None), "quantization_config", None) is not None
        stored = weight_files(folder)
        self._places = {name: (folder / stored[own], own) for name, own in text_names(stored).items()}
        """File of each tensor, and the tensor's name in that file."""
        self._stacks: dict[str, list[tuple[Any, str]]] = {}
        """(index, tensor in files) of each part of a parameter whose parts are tensors of their own in the files."""
        self._open: dict[Path, Any] = {}
        """Files whose memory is that of loaded tensors. Others are closed, as an open file stays in memory."""
        self._names: dict[int, str] = {}
        self._copies: list[tuple[str, str, str]] = []
        """(name, second name, dtype) of each tied parameter that is stored twice."""
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        """Modules of each parameter, by `id()`; a tied parameter has several."""
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                full = f"{prefix}.{name}".removeprefix(".")
                if (first := self._names.setdefault(id(parameter), full)) != full and full in self._places:
                    self._copies.append((first, full, str(parameter.dtype).removeprefix("torch.")))
                self._owners.setdefault(id(parameter), []).append((module, name))
        self._parameters = list(model.parameters())
        """References that keep the ids valid."""
        persistent = model.state_dict().keys()  # transformers computes all other buffers, and ignores stored ones
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        self._use_names_of_experts(model)

    def _use_names_of_experts(self, model: nn.Module) -> None:
        """Find tensors of a model with experts under the names that they have in files."""
        stacks = stacked_in_files(model)
        if any(not all(name in self._places for _, name in parts) for parts in stacks.values()):
            return
        self._stacks = {name: parts for name, parts in stacks.items() if name not in self._places}
        if self._stacks:
            names = names_in_files(model)
            for name in {*self._names.values(), *self._buffers} - self._places.keys():
                if (own := file_name(name, names)) in self._places:
                    self._places[name] = self._places[own]

    @property
    def fit(self) -> bool:
        """True if the files have the model's tensor names and are not quantized. Otherwise transformers has to convert
        them."""
        return not self._quantised and set(self._names.values()) <= self._places.keys() | self._stacks.keys()

    def check_copies(self, folder: Path) -> None:
        """Raise `RequestError` if a tied parameter is stored twice, with different values."""
        for name, copy, dtype in self._copies:
            (file, stored), (other, other_stored) = self._places[name], self._places[copy]
            with TensorReader(file) as reader, TensorReader(other) as other_reader:
                equal = equal_tensors((reader, stored), (other_reader, other_stored), np.dtype(dtype))
            if not equal:
                raise RequestError(untied_copy(f"base_model={folder}", name, copy))

    def fill(self, module: nn.Module) -> None:
        """Load the weights of a module that are not loaded yet."""
        for parameter in list(module.parameters()):
            if id(parameter) in self._names:
                values = self._read(self._names[id(parameter)], parameter)
                filled = nn.Parameter(values, requires_grad=False)
                for owner, name in self._owners[id(parameter)]:
                    setattr(owner, name, filled)

    def fill_buffers(self) -> None:
        """Load buffers that are in the files."""
        for name, buffer in self._buffers.items():
            if name in self._places:
                buffer.copy_(self._read(name, buffer))  # on its current device, until the model moves

    def _read(self, name: str, like: Tensor) -> Tensor:
        if name in self._stacks:
            return self._stacked(name, like)
        path, stored = self._places[name]
        file = self._open.get(path) or safe_open(path, "pt")
        values = file.get_tensor(stored)
        _check_shape(name, values.shape, like.shape)
        read = values.to(self._device, like.dtype)
        if read is values:  # it keeps the whole file mapped, which others then can share
            self._open[path] = file
        return read

    def _stacked(self, name: str, like: Tensor) -> Tensor:
        """Read a parameter whose parts are tensors of their own in the files, one part at a time."""
        stack = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        with ExitStack() as opened:
            readers = {
                path: opened.enter_context(TensorReader(path))
                for path in {self._places[part][0] for _, part in self._stacks[name]}
            }
            for index, part in self._stacks[name]:
                path, stored = self._places[part]
                values = readers[path].read(stored)
                _check_shape(part, values.shape, stack[index].shape)
                stack[index] = _tensor_of(values)
        return stack


def _tensor_of(array: np.ndarray) -> Tensor:
    """A NumPy array, possibly bfloat16, as a tensor in the same memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise RequestError(
            f"base_model: {name} has shape {tuple(found)} in its files and {tuple(wanted)} by its config.json; use "
            "files that belong together"
        )


def _text_part(config: Any, folder: Path) -> Any:
    """Configuration of the text part of a multimodal model, or of the model itself.

    Raises `RequestError` if transformers has no causal language model of the text part alone.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        text = config.get_text_config()
    except ValueError as error:  # of several text parts
        raise RequestError(
            f"base_model={folder}: {config.model_type} is multimodal, and has no single text part ({one_line(error)}); "
            "use a text model"
        ) from error
    if text is config:
        return config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RequestError(
            f"base_model={folder}: {config.model_type} is multimodal, and transformers has no causal language model "
            f"of its text part, {text.model_type}; use a text model"
        )
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    return type(text).from_dict(text_config(config.to_dict() | {"text_config": text.to_dict()}, model.__name__))


def has_nested_names(folder: Path) -> bool:
    """Return True if AutoModelForCausalLM loads a folder as a multimodal model, in which the text part's names differ.

    PEFT loads an adapter onto that model, so files of adapters need its names (`hf_files.nested_name`).
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    if text is config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] is not MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]


def _check_config(folder: Path) -> None:
    """Raise `RequestError` for a config.json that transformers cannot read, or that names code of a model hub."""
    from transformers import CONFIG_MAPPING, __version__

    config = config_of(str(folder))
    if (kind := config.get("model_type")) not in CONFIG_MAPPING:
        raise RequestError(
            f"base_model={folder}: config.json has model_type={kind!r}, unknown to transformers {__version__}; use "
            "another model, or another version of transformers"
        )
    for name, value in _implementations(config):
        if "/" in value:
            raise RequestError(
                f"base_model={folder}: config.json has {name}={value!r}, which would run code of a model hub; remove it"
            )
    for name in SIZES:
        size = config.get(name)
        if isinstance(size, int) and size < 1:
            raise RequestError(
                f"base_model={folder}: config.json has {name}={size}, which must be at least 1; fetch the file again"
            )


def _implementations(config: Mapping[str, Any], field: str = "") -> Iterator[tuple[str, str]]:
    """Yield (field, value) of all choices of an implementation, such as `attn_implementation`."""
    for name, value in config.items():
        chosen = field or (name if name.endswith("_implementation") else "")
        if isinstance(value, Mapping):
            yield from _implementations(value, chosen)
        elif chosen and isinstance(value, str):
            yield chosen, value


def lacks_memory(error: BaseException) -> bool:
    """Return True if the system or the device had no memory left when this error was raised."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if any(said in str(error) for said in NO_MEMORY):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and lacks_memory(before)


def check_memory(folder: Path, error: BaseException) -> None:
    """Raise `RequestError` if an error in loading or checking a model comes from a lack of memory."""
    if lacks_memory(error):
        raise RequestError(
            f"base_model={folder}: there is not enough memory to load and check it ({one_line(error)}); use a machine "
            "with more memory, fewer other processes, or a smaller model"
        ) from error


def one_line(error: BaseException) -> str:
    """Message of an error, or the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__


def _cannot_load(folder: Path, error: Exception) -> RequestError:
    """Error for a model that transformers rejects, in one line. Raises `RequestError` if memory is lacking."""
    check_memory(folder, error)
    return RequestError(
        f"base_model={folder}: transformers cannot load it ({one_line(error.__cause__ or error)}); fetch its files "
        "again, or use another model"
    )


def unfilled(create: Callable[[], Any]) -> Any:
    """Create a model with its large weights on the meta device. Its buffers have memory and values."""
    try:
        with _Unfilled(FILLED):
            model = create()
        if not any(x.is_meta for module in model.modules() for x in _not_parameters(module)):
            return model
    except Exception:  # of any type, from a use of values that are not there
        pass
    with _Unfilled():
        return create()


def _not_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Tensors of a module itself that are not parameters."""
    yield from module.buffers(recurse=False)
    yield from (x for x in vars(module).values() if isinstance(x, Tensor))


class _Unfilled(TorchFunctionMode):
    """Mode in which `torch.empty` allocates on the meta device. Computed tensors are unaffected.

    Args:
        filled: Other functions, whose large tensors are on the meta device, too. What is computed from these tensors is
            there as well, or fails.
    """

    def __init__(self, filled: frozenset[Any] = frozenset()):
        super().__init__()
        self._filled = filled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty or func in self._filled:
            without = func(*args, **kwargs | {"device": "meta"})
            if func is torch.empty or without.numel() >= LARGE:
                return without
        return func(*args, **kwargs)


def _settings(folder: Path, device: torch.device, options: LoadOptions) -> tuple[Any, torch.dtype]:
    """Configuration of a model, and the dtype of its weights."""
    from transformers import AutoConfig
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    _check_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any type, as each configuration class has checks of its own
        raise _cannot_load(folder, error) from error
    config = _text_part(config, folder)
    dtype: Any = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(options.dtype)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else getattr(config, "dtype", None) or torch.bfloat16
    return config, dtype
