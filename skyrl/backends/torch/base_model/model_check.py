"""Checks of a model's forward passes against transformers' own, which decide how the model is computed.

The same checks run on the model, with short sequences, and on a small random copy (`small_copy`), with sequences longer
than every limit of its configuration: windows, chunks, original lengths of rotary embeddings.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from skyrl.backends.torch.base_model.attention import DecodeBurst, Packed, Paged, PagedCache, PagedParts
from skyrl.backends.torch.base_model.experts import routed_experts
from skyrl.backends.torch.base_model.forward import Forward
from skyrl.backends.torch.base_model.loading import check_memory, one_line
from skyrl.backends.torch.base_model.lora import targets_of
from skyrl.errors import RequestError

log = logging.getLogger(__name__)

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Tolerance of logits, relative to the largest logit, for differences in the order of summation. Rounding to bfloat16
may change the experts of a token."""
HEAD_ROUNDING = 4
"""Tolerance of logits of the same hidden states, relative to the largest logit, in units of the dtype's epsilon."""
EXPERTS_ARGUMENTS = 3
"""Number of arguments of experts: inputs, selected experts and their weights."""
PAGE = 8
"""Tokens per page of the cache in checks."""
UNSUPPORTED = (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, LookupError)
"""Errors of models that cannot be computed in one of the ways that are tried."""


class Abilities(NamedTuple):
    """Ways in which a model can be computed."""

    own_attention: bool = False
    """True if the model uses the attention of transformers instead of ours."""
    packs: bool = True
    """True if a row may hold several sequences, because tokens interact only through attention."""
    samples: bool = True
    """True if the keys and values of our attention are all that a token needs of earlier ones."""
    own_step: bool = False
    """True if `LlamaStep` computes decode steps."""
    unadaptable: frozenset[str] = frozenset()
    """Names of modules that cannot have adapters, as returned by `ModelCheck.unadaptable`."""


class ModelCheck:
    """Comparison of a model with transformers.

    Args:
        forward: The model. Its `own_attention` is set if only that is right.
        folder: Folder of the model, for messages.
        lengths: Lengths of two sequences, the longer one first.
        run: Function that calls another one with all weights of the model.
    """

    def __init__(
        self,
        forward: Forward,
        folder: Path,
        lengths: tuple[int, int],
        run: Callable[[Callable[[], Any]], Any] = lambda compute: compute(),
    ):
        self._forward, self._folder, self.lengths, self._run = forward, folder, lengths, run
        self._kind: str = forward.config.model_type
        device, size = forward.hf.get_input_embeddings().weight.device, forward.vocab_size
        rng = np.random.default_rng(0)
        self.rows = [torch.tensor(rng.integers(0, size, n), device=device)[None] for n in lengths]
        """Tokens int64 `[1, tokens]` of each sequence."""
        self.places = [torch.arange(n, device=device)[None] for n in lengths]
        with torch.no_grad():
            self.wanted: Tensor = run(self._of_transformers)
            """Logits of transformers, float32 `[tokens of all sequences, vocab]`."""

    @torch.no_grad()
    def check(self, abilities: Abilities) -> Abilities:
        """Return those of these abilities with which the logits are those of transformers.

        Raises `RequestError` if they differ in any way to compute the model.
        """
        return self._run(lambda: self._check(abilities))

    def _check(self, abilities: Abilities) -> Abilities:
        forward = self._forward
        why = "" if abilities.own_attention else self._why_not(forward.attention.name)
        if why:
            log.warning("%s computes attention by itself and is not sampled: %s", self._kind, why)
        if why or abilities.own_attention:
            forward.own_attention = True
            if why := self._why_not("eager"):
                raise self._not_served(why)
            return abilities._replace(own_attention=True, packs=False, samples=False)
        if abilities.packs and not self._agree(self.logits(self.rows, self.places, self.lengths)):
            log.warning("packing is off for %s: its attention does not keep packed sequences apart", self._kind)
            return abilities._replace(packs=False, samples=False)
        return abilities

    def logits(self, rows: Sequence[Tensor], places: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """Logits float32 `[tokens, vocab]` of sequences of these lengths in one row. Call within `base.run`."""
        hidden = self._forward.hidden(torch.cat(list(rows), 1), torch.cat(list(places), 1), Packed(lengths))
        return self._forward.logits(hidden)[0].float()

    def _alone(self, padding: int) -> Tensor:
        """Logits of each sequence in a row of its own, before this number of other tokens."""
        after, places_after = self.rows[0][:, :padding], self.places[0][:, :padding]
        return torch.cat(
            [
                self.logits((row, after), (place, places_after), row.shape[1:])[: row.shape[1]]
                for row, place in zip(self.rows, self.places, strict=True)
            ]
        )

    def _of_transformers(self) -> Tensor:
        """Logits of transformers' own forward pass.

        Raises `RequestError` if `Forward.logits` has other results for the same hidden states.
        """
        forward, hidden = self._forward, list[Tensor]()
        forward.hf.set_attn_implementation("eager")
        hook = forward.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
        try:
            wanted = [forward.hf(input_ids=row, use_cache=False).logits[0].float() for row in self.rows]
        except UNSUPPORTED as error:
            raise self._not_served(f"its forward pass fails in transformers ({self._reason(error)})") from error
        finally:
            hook.remove()
        own = [forward.logits(x)[0].float() for x in hidden]
        rounding = HEAD_ROUNDING * torch.finfo(forward.dtype).eps
        alike = [x.shape for x in own] == [x.shape for x in wanted]
        if not alike or not _agree(torch.cat(wanted), torch.cat(own), rounding):
            raise self._not_served()
        return torch.cat(wanted)

    def _not_served(self, why: str = "its logits are not what transformers computes") -> RequestError:
        """Error for a model that cannot be computed."""
        return RequestError(
            f"base_model={self._folder}: {self._kind} is not served by torch: {why}; use another model, or report "
            "this architecture"
        )

    def _reason(self, error: Exception) -> str:
        """Message of an error. Raises `RequestError` if memory is lacking, which is no property of the model."""
        check_memory(self._folder, error)
        return one_line(error)

    def _why_not(self, attention: str) -> str:
        """Reason why a model cannot use this attention; empty if it can. Leaves the attention selected."""
        try:
            self._forward.hf.set_attn_implementation(attention)
            agree = all(self._agree(self._alone(padding)) for padding in (2, self.lengths[0]))
            return "" if agree else "its logits are not what transformers computes"
        except UNSUPPORTED as error:
            return self._reason(error)

    def keeps_apart(self) -> bool:
        """Return True if no gradient of a sequence depends on another sequence of its row.

        The gradient of the second sequence's logits must be exactly 0 at the first sequence's tokens, and nonzero at
        its own tokens. Unlike a difference of logits, this does not depend on the size of weights.
        """
        inputs: list[Tensor] = []

        def embed(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs.append(output.detach().requires_grad_())
            return inputs[-1].clone()  # models may change it in place

        hook = self._forward.hf.get_input_embeddings().register_forward_hook(embed)
        try:
            logits = self.logits(self.rows, self.places, self.lengths)
            logits[self.lengths[0] :].square().sum().backward()
        finally:
            hook.remove()
        gradient = inputs[0].grad
        first, own = False, False
        if gradient is not None:
            first, own = (bool((part != 0).any()) for part in gradient[0].split(self.lengths))
        if first or not own:
            log.warning(
                "packing is off for %s: results or gradients of a sequence depend on others of its row", self._kind
            )
        return own and not first

    def unadaptable(self) -> frozenset[str]:
        """Names, without their paths, of modules that affect the logits in other ways than their class says.

        An `nn.Linear` should compute x W^T + b, and experts what `routed_experts` computes. Adapters are applied to the
        outputs of a module. So they have no effect on weights that are read without a call of the module, and a wrong
        one if a subclass of `nn.Linear` computes something else.
        """
        forward = self._forward
        head = next(name for name, module in forward.hf.named_modules() if module is forward.head)
        modules: dict[str, Any] = {
            name: forward.hf.get_submodule(name)
            for name in dict.fromkeys(target.experts or target.module for target in targets_of(forward.hf, head))
        }
        as_expected = dict[nn.Module, bool]()

        def compare(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            with torch.no_grad():
                wanted = None
                if isinstance(module, nn.Linear):
                    wanted = nn.functional.linear(args[0], module.weight, module.bias)
                elif len(args) == EXPERTS_ARGUMENTS:
                    wanted = routed_experts(module, *args, lambda part, inputs, outputs, routing: outputs)
            alike = False
            if isinstance(output, Tensor) and wanted is not None and wanted.shape == output.shape:
                alike = self.agree(wanted, output.detach())
            as_expected[module] = as_expected.get(module, True) and alike

        hooks = [x.register_forward_hook(compare) for x in modules.values()]
        weights = {name: next(x.parameters()) for name, x in modules.items()}
        try:
            for x in weights.values():
                x.requires_grad_()
            self.logits(self.rows[:1], self.places[:1], self.lengths[:1]).square().sum().backward()
            used = {name for name, x in weights.items() if x.grad is not None and bool(x.grad.any())}
        finally:
            for x, hook in zip(weights.values(), hooks, strict=True):
                hook.remove()
                x.requires_grad_(False)
                x.grad = None
        names = frozenset(name.rpartition(".")[2] for name in used if not as_expected.get(modules[name]))
        if names:
            log.warning("adapters do not cover %s of %s: it is no linear map of its inputs", sorted(names), self._kind)
        return names

    @torch.no_grad()
    def samples(self) -> bool:
        """Return True if tokens read from a cache have the logits of whole sequences."""
        try:
            shapes = self._forward.called_shapes()
            agree = bool(shapes) and self._agree(self._sampled(shapes))
            why = (
                "its state is more than the keys and values of each layer"
                if shapes
                else "a layer has no cache of its own"
            )
        except UNSUPPORTED as error:
            agree, why = False, self._reason(error)
        if not agree:
            log.warning("%s is not sampled: %s", self._kind, why)
        return agree

    @torch.no_grad()
    def steps(self) -> bool:
        """Return True if the model fits `LlamaStep`, and decoded tokens then have the logits of whole sequences."""
        forward = self._forward
        if not forward.use_own_step():
            return False
        try:
            return self._agree(self._sampled(forward.called_shapes()))
        except UNSUPPORTED as error:
            self._reason(error)
            return False
        finally:
            forward.step = None

    def _sampled(self, shapes: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits of both sequences, read in two parts of each and one token at a time."""
        device, pages = self.rows[0].device, -(-self.lengths[0] // PAGE)
        cache = PagedCache(2 * pages, PAGE, shapes, self._forward.dtype, device)
        table = torch.arange(2 * pages, device=device).view(2, pages).flip(1)
        found = [torch.zeros(0, self.wanted.shape[1], device=device) for _ in self.lengths]
        ends = [n // 2 for n in self.lengths]
        for part in range(2):
            cells = [slice(part * end // 2, (part + 1) * end // 2) for end in ends]
            views = [
                Paged(cache, table[number : number + 1], self.places[number][:, own], first=not part)
                for number, own in enumerate(cells)
            ]
            tokens = torch.cat([row[:, own] for row, own in zip(self.rows, cells, strict=True)], 1)
            logits = self._next(tokens, PagedParts(views))[0].split([view.positions.shape[1] for view in views])
            found = [torch.cat(both) for both in zip(found, logits, strict=True)]
        steps = [n - end for n, end in zip(self.lengths, ends, strict=True)]
        view: Paged | None = None
        for step in range(steps[0]):
            here = [number for number in range(2) if step < steps[number]]
            positions = torch.tensor([[ends[number] + step] for number in here], device=device)
            if not step:
                view = DecodeBurst(cache, table, positions, self.lengths[0])
            elif isinstance(view, DecodeBurst) and len(here) == 2:
                view.to(positions)
            else:
                if isinstance(view, DecodeBurst):
                    view.keep()
                view = Paged(cache, table[here], positions)
            assert view is not None
            tokens = torch.stack([self.rows[number][0, ends[number] + step] for number in here])[:, None]
            for number, row in zip(here, self._next(tokens, view), strict=True):
                found[number] = torch.cat([found[number], row])
        return torch.cat(found)

    def _next(self, tokens: Tensor, view: Paged | PagedParts) -> Tensor:
        return self._forward.logits(self._forward.hidden(tokens, view.positions, view)).float()

    def _agree(self, got: Tensor) -> bool:
        return self.agree(self.wanted, got)

    def agree(self, wanted: Tensor, got: Tensor) -> bool:
        """Return True if logits differ by rounding only."""
        return _agree(wanted, got, ROUNDING[self._forward.dtype])


def _agree(wanted: Tensor, got: Tensor, rounding: float) -> bool:
    """Return True if values differ by at most `rounding`, relative to the largest one."""
    return bool((wanted - got).abs().max() <= rounding * wanted.abs().max())
