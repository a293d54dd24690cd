"""Lookup of a configuration's family, and rejection of unknown architectures."""

from collections.abc import Mapping
from typing import Any

from skyrl.tx.design.design import Design
from skyrl.tx.design.family import FAMILIES
from skyrl.utils.files import hf_files


def design_of(config: Any) -> Design:
    """Return the design of a configuration. Raises ValueError for options that are not implemented."""
    return FAMILIES[(config.architectures or [""])[0]].design(config)


def architectures() -> dict[str, str]:
    """Map each supported architecture to itself, and each multimodal one to the architecture of its text part."""
    parts = {name: text for text in FAMILIES for name in FAMILIES[text].multimodal}
    return {name: parts.get(name, name) for name in sorted([*FAMILIES, *parts])}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a known architecture. For a multimodal model, return the one of its text part."""
    architecture = (config.get("architectures") or [""])[0]
    text = architectures()[architecture]
    if text == architecture:
        return dict(config)
    return hf_files.text_config(config, text)


def check_known(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if the JAX backend does not support the architecture of a config.json, or quantised weights.

    Args:
        config: Contents of the file.
        where: Name of the model in messages.
    """
    names = config.get("architectures") or ["none"]
    if names[0] not in (known := architectures()):
        way_out = ", or the torch backend (--backend torch), which loads this one" if _torch_loads(config) else ""
        raise ValueError(
            f"{where}: architectures={names} is not implemented (known: {', '.join(known)}); use a base model of a "
            f"known architecture{way_out}"
        )
    if quantised := config.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config.quant_method={quantised.get('quant_method')!r}: quantised "
            "base models are not served yet; use the model's bfloat16 weights"
        )


def _torch_loads(config: Mapping[str, Any]) -> bool:
    """Return True if transformers' AutoModelForCausalLM supports the architecture, or the text part of a multimodal
    one. Imports transformers and torch."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    except ImportError:
        return False
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") in NAMES:
        return True
    return NAMES.get(config.get("model_type", "")) in (config.get("architectures") or [])
