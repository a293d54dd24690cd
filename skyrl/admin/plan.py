"""`skyrl plan`: memory, rates and limits of a model on devices that need not be here."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skyrl.admin.words import number, plural
from skyrl.backends.base_folder import config_of, overridden
from skyrl.backends.common.memory_plan import size_of
from skyrl.backends.planning import rates
from skyrl.backends.planning.devices import Devices, devices_of
from skyrl.backends.planning.estimate import Estimate, Planner
from skyrl.backends.planning.rates import Rate
from skyrl.backends.registry import default_backend, find_backend, find_planner, options_of
from skyrl.errors import RequestError
from skyrl.tinker.config import describe, options_parser, read_config
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error

LENGTH = 4096
SHOWN = 3
"""Layouts that are shown."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status: 1 if nothing fits or the options are wrong."""
    parser = ArgumentParser(
        prog="skyrl plan",
        description="Say whether a model fits on devices, what limits it, and about how fast it is. Reads config.json "
        "only, and needs none of the devices. Without a layout in --backend-config, it tries all ways to divide the "
        "devices and shows the three best that fit.",
    )
    parser.add_argument("model", help="folder with config.json, hub id, or the contents of a config.json as JSON")
    parser.add_argument(
        "--devices",
        metavar="NAME[:COUNT]",
        help="a100, h100, h200, b200, v5e, v5p, v6e, cpu (this machine), or a JSON or YAML file; default: the devices "
        "of this machine",
    )
    parser.add_argument("--backend", help="torch or jax; default: torch for GPUs, otherwise jax")
    parser.add_argument("--backend-config", default="{}", metavar="JSON", help="options as for skyrl serve")
    parser.add_argument(
        "--length", type=int, default=LENGTH, metavar="N", help=f"tokens of a sequence; default: {LENGTH}"
    )
    parser.add_argument("--full", action="store_true", help="train all weights, instead of adapters")
    parser.add_argument("--tokens", type=float, metavar="N", help="number of tokens to give hours for, such as 1e9")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the programs of the best layout (JAX, for TPUs, H100 and H200): minutes. Needs a compiler, but "
        "no such device",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    if given.compile and given.devices is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a compiler that is installed looks for devices of its own
    try:
        if given.length < 1:
            raise RequestError(f"--length={given.length}: a sequence has at least one token; use more")
        if given.tokens is not None and not given.tokens > 0:
            raise RequestError(f"--tokens={given.tokens:g}: not above 0; give a number of tokens, such as 1e9")
        found = plan(
            given.model, given.devices, given.backend, given.backend_config, given.length, given.full, given.compile
        )
    except RequestError as error:
        say_error(f"skyrl plan: error: {error}")
        return 1
    if given.tokens is not None:
        for layout in found["layouts"]:
            for rate in filter(None, (layout["training"], layout["decoding"])):
                rate["hours"] = [given.tokens / each / 3600 for each in reversed(rate["tokens_per_s"])]
    say(json.dumps(found, indent=1) if given.json else "\n".join(report(found)))
    return 0


def of_server(argv: Sequence[str]) -> int:
    """Plan a server with these options of `skyrl serve` on this machine. Returns the exit status."""
    config, _ = read_config(options_parser("skyrl serve --plan", "Plan a server, and start none."), argv)
    if config.base_model is None:
        say_error("skyrl serve --plan: error: --base-model is not given; name the model to plan")
        return 1
    backend = [] if config.backend is None else ["--backend", config.backend]
    return main([config.base_model, *backend, "--backend-config", json.dumps(config.backend_config)])


def plan(
    model: str,
    devices: str | None,
    backend: str | None,
    backend_config: str,
    length: int,
    full: bool,
    compiles: bool = False,
) -> dict[str, Any]:
    """Plan a model on devices. The arguments are those of the command. Returns what `--json` prints.

    Raises:
        RequestError: An option is wrong, or no layout fits.
    """
    there = None if devices is None else devices_of(devices)
    name = backend or (default_backend() if there is None else "torch" if there.kind.platform == "gpu" else "jax")
    kind = find_planner(name)
    options, given = options_of(find_backend(name)), _object("--backend-config", backend_config)
    with tempfile.TemporaryDirectory(prefix="skyrl-plan-") as scratch:
        folder = Path(scratch, "config")
        folder.mkdir()
        config = _object("MODEL", model) if model.lstrip().startswith("{") else config_of(model, "MODEL")
        (folder / "config.json").write_text(json.dumps(config))
        if changes := given.pop("config_overrides", None):
            folder = overridden(folder, changes, scratch)
        try:
            planner = kind(folder, options, given, there)
            estimates = _estimates(planner)
            fitting = [one for one in estimates if one.fits and (not full or _room_for_full(one) >= 0)]
            if not fitting:
                raise RequestError(_nothing_fits(estimates, full))
            facts = {id(one): _facts(one, there, min(length, one.longest), full) for one in fitting}
            fitting.sort(key=lambda one: _slowness(facts[id(one)]))
            if compiles:
                best = planner.compiled(fitting[0].layout, full)
                fitting, facts = [best], {id(best): _facts(best, there, min(length, best.longest), full)}
        except ValidationError as error:
            raise RequestError(f"--backend-config: {describe(error, known=options.model_fields)}") from None
        except RequestError as error:
            raise RequestError(str(error).replace(f"{folder}/", "").replace(str(folder), _short(model))) from None
    return {
        "model": _short(model),
        "parameters": fitting[0].parameters,
        "backend": name,
        "devices": None if there is None else {"count": there.count, **there.kind.model_dump()},
        "length": length,
        "trains": "all weights" if full else f"adapters of rank {fitting[0].rank}",
        "efficiency": {"training": rates.TRAINING, "decoding": rates.DECODING},
        "layouts_tried": len(estimates),
        "layouts": [facts[id(one)] for one in fitting[:SHOWN]],
    }


def _estimates(planner: Planner) -> list[Estimate]:
    """Estimates of all possible layouts. Raises the error of the last one if none is possible."""
    found, failure = [], None
    for layout in planner.layouts():
        try:
            found.append(planner.estimate(layout))
        except (RequestError, ValidationError) as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return found


def _room_for_full(one: Estimate) -> int:
    """Bytes left beside one fully trained model; negative if there is no room, or no such training."""
    return -1 if one.full_model is None else one.plan.left - one.full_model


def _nothing_fits(estimates: Sequence[Estimate], full: bool) -> str:
    """Describe the layout that lacks least."""
    able = [one for one in estimates if not full or one.full_model is not None]
    if not able:
        return "--full: layouts with tensor parallelism train adapters only; leave tensor_parallel_size at 1"
    lack = {id(one): max(one.missing, -_room_for_full(one) if full else 0) for one in able}
    best = min(able, key=lambda one: lack[id(one)])
    model = best.full_model if full else best.plan.model
    return (
        f"nothing fits: {len(estimates)} layout(s) tried, and the closest, {json.dumps(best.layout)}, lacks "
        f"{size_of(lack[id(best)])} on each device (base weights {size_of(best.plan.base)}, KV cache "
        f"{size_of(best.plan.cache)}, a call {size_of(best.plan.call)}, a model {size_of(model or 0)}; "
        f"{size_of(best.plan.usable)} usable); use more devices or larger ones, or a smaller kv_cache_gib, "
        "train_tile_tokens or max_lora_rank"
    )


def _facts(one: Estimate, devices: Devices | None, length: int, full: bool) -> dict[str, Any]:
    """Facts of a layout, as JSON. Sizes are bytes."""
    memory, host, versions = one.budget
    model, samplers = (one.full_model if full else one.plan.model) or 1, one.decoding.at_once
    version = one.full_version if full else one.version
    tokens = one.plan.cache // max(1, one.token_bytes)
    if full:
        memory, versions = max(memory, model), max(0, versions - max(0, model - memory))
    training = devices and rates.training_rate(one, devices, length, full)
    decoding = devices and rates.decoding_rate(one, devices, length)
    per_node = 1 if devices is None else min(devices.kind.per_node, one.devices)
    return {
        "layout": one.layout,
        "memory": {
            "device": one.plan.total,
            "usable": one.plan.usable,
            "base_weights": one.plan.base,
            "kv_cache": one.plan.cache,
            "training_call" if one.knows_calls else "optimizer_step": one.plan.training,
            "decode_call": one.plan.decoding,
            "models": memory,
            "versions": versions,
        },
        "host_memory_per_node": {"models": host} if host else None,
        "models_on_devices": memory // model,
        "models_in_host_memory": host // (model * per_node),
        "versions": versions // version,
        "model_bytes": model,
        "version_bytes": version,
        "sequences_at_once": one.rows * samplers,
        "cached_tokens": tokens * samplers,
        "max_context_length": one.longest,
        "recomputes_layers": one.recomputes,
        "training": _rate(training),
        "decoding": _rate(decoding),
        "programs": [{**program._asdict(), "total": program.total} for program in one.programs],
        "notes": one.notes if one.shape is not None else (*one.notes, "work is not counted for a model of this form"),
    }


def _rate(rate: Rate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {
        "flops_per_token": rate.flops,
        "tokens_per_step": rate.tokens,
        "memory_bytes_per_step": rate.memory_bytes,
        "exchanged_bytes_per_step": rate.exchanged_bytes,
        "tokens_per_s": [rate.low, rate.high],
        "limit": rate.limit,
    }


def _slowness(layout: Mapping[str, Any]) -> tuple[float, float]:
    """Sort key of a layout: seconds of a trained token and of a decoded one; without rates, use of memory."""
    both = [layout["training"], layout["decoding"]]
    seconds = sum(1 / rate["tokens_per_s"][0] for rate in both if rate is not None)
    return seconds, -layout["memory"]["models"]


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a report for a terminal. `found`: the result of `plan`."""
    devices = found["devices"]
    where = "this machine" if devices is None else f"{devices['count']} x {devices['name']}"
    yield (
        f"{found['model']}: {found['parameters'] / 1e9:.2f} billion parameters, {found['backend']} on {where}, "
        f"{found['trains']}, sequences of {found['length']} tokens"
    )
    shown = found["layouts"]
    if found["layouts_tried"] > 1:
        yield f"{found['layouts_tried']} layouts tried; the best {len(shown)} of those that fit:"
    for layout in shown:
        yield ""
        yield from _lines(layout)
    (low, high), (slow, fast) = found["efficiency"]["training"], found["efficiency"]["decoding"]
    yield ""
    if any(layout["training"] for layout in shown):
        yield (
            f"Rates are {low:.0%} to {high:.0%} (training) and {slow:.0%} to {fast:.0%} (decoding) of a roofline: an "
            "assumption, not a measurement."
        )
    else:
        yield "No rates: the speeds of these devices or the work of this model are unknown."


def _lines(layout: Mapping[str, Any]) -> Iterator[str]:
    memory, host = layout["memory"], layout["host_memory_per_node"]
    yield f"layout {json.dumps(layout['layout'])}"
    yield f"  memory of a device   {size_of(memory['device'])}, of which {size_of(memory['usable'])} are planned for"
    beside = {
        "KV cache": f"{number(layout['cached_tokens'])} tokens on all devices",
        "models": f"{plural(layout['models_on_devices'], 'model')} of {size_of(layout['model_bytes'])}",
        "versions": f"{plural(layout['versions'], 'version')} of {size_of(layout['version_bytes'])}",
    }
    for field, nbytes in memory.items():
        name = field.replace("_", " ").replace("kv", "KV")
        if nbytes and field not in ("device", "usable"):  # the JAX backend plans no decode calls
            yield f"    {name:<18} {size_of(nbytes):>11}  {beside.get(name, '')}".rstrip()
    if host is None:
        yield "  memory of a host     none for idle models"
    else:
        idle = plural(layout["models_in_host_memory"], "idle model")
        yield f"  memory of a host     {size_of(host['models'])} for {idle}"
    yield (
        f"  decoded at once      {plural(layout['sequences_at_once'], 'sequence')}, of up to "
        f"{layout['max_context_length']:,} tokens each"
    )
    for name in ("training", "decoding"):
        if (rate := layout[name]) is not None:
            slow, fast = rate["tokens_per_s"]
            hours = "" if "hours" not in rate else f", {rate['hours'][0]:,.1f} to {rate['hours'][1]:,.1f} hours"
            yield f"  {name:<20} {number(slow)} to {number(fast)} tokens/s{hours}, limited by {rate['limit']}"
            yield (
                f"    {rate['flops_per_token'] / 1e9:,.1f} GFLOP a token; a step of {rate['tokens_per_step']:,} tokens "
                f"reads {size_of(rate['memory_bytes_per_step'])} and receives "
                f"{size_of(rate['exchanged_bytes_per_step'])} on each device"
            )
    if layout["programs"]:
        yield "  compiled programs    bytes of a device: arguments + temporary + results, of those that are planned for"
    for program in layout["programs"]:
        parts = " + ".join(size_of(program[part]) for part in ("arguments", "temporary", "results"))
        received = sum(program["received"].values())
        yield (
            f"    {program['name']}: {parts} = {size_of(program['total'])} of {size_of(program['planned'])}"
            + (f", receives {size_of(received)}" if received > 2**20 else "")
        )
    for note in layout["notes"]:
        yield f"  note: {note}"


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{option}={text}: not JSON ({error}); write an object such as '{{\"max_lora_rank\": 64}}'"
        ) from None
    if not isinstance(found, dict):
        raise RequestError(f"{option}={text}: no object; write one such as '{{\"max_lora_rank\": 64}}'")
    return found


def _short(model: str) -> str:
    return "MODEL" if model.lstrip().startswith("{") else model
