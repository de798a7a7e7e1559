"""Models by name, without data: their shapes are all that a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ingot.lab.naming import suggestion
from ingot.lab.own_code import function_named
from ingot.lab.torchvision_ops import make_torchvision_importable

FORMS = "'timm:resnet50', 'hf:gpt2', or 'package.module:function' for a function that returns a model"


class NamedModel(NamedTuple):
    """A model on the device "meta", and what it is called with."""

    model: nn.Module
    example: Callable[[int, tuple[int, ...] | None], Any]  # from a number of samples and the shape of one


def named_model(name: str) -> NamedModel:
    """The model of a name; a ValueError that says which there are if there is none."""
    source, _, rest = name.partition(":")
    if not source or not rest:
        raise ValueError(f"{name!r} names no model: write {FORMS}")
    make_torchvision_importable()  # which timm and transformers import
    try:
        return {"timm": _of_timm, "hf": _of_transformers}.get(source, _of_function)(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name!r} needs {error.name}, which is not installed") from error


def _of_timm(name: str) -> NamedModel:
    import timm

    rest = name.partition(":")[2]
    if not timm.is_model(rest):
        raise _unknown(name, "timm has no such model", timm.list_models())
    with torch.device("meta"):
        model: Any = timm.create_model(rest)

    def example(batch: int, shape: tuple[int, ...] | None) -> Tensor:
        return torch.empty(batch, *(shape or model.default_cfg["input_size"]), device="meta")

    return NamedModel(model, example)


def _of_transformers(name: str) -> NamedModel:
    import transformers

    rest = name.partition(":")[2]
    if rest not in transformers.CONFIG_MAPPING:
        why = "transformers has no such architecture, whose default sizes would be planned"
        raise _unknown(name, why, transformers.CONFIG_MAPPING)
    config = transformers.AutoConfig.for_model(rest)
    heads = ("MaskedLM", "CausalLM", "Seq2SeqLM", "ImageClassification")
    autos = [getattr(transformers, f"AutoModelFor{head}") for head in heads]
    auto = next((a for a in autos if type(config) in a._model_mapping), transformers.AutoModel)
    with torch.device("meta"):
        model = auto.from_config(config)

    def example(batch: int, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
        if model.main_input_name == "input_ids":
            length = getattr(config, "max_position_embeddings", None) or 512
            tokens = torch.empty(batch, *(shape or (length,)), dtype=torch.int64, device="meta")
            return {"input_ids": tokens} | (
                {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
            )
        if shape is None:
            size = getattr(config, "image_size", None)
            if not isinstance(size, int):
                raise ValueError(f"{name!r} does not tell the shape of its input: give --input")
            shape = getattr(config, "num_channels", 3), size, size
        return {model.main_input_name: torch.empty(batch, *shape, device="meta")}

    return NamedModel(model, example)


def _of_function(name: str) -> NamedModel:
    """A function may return a model, or a model and what it is called with."""
    function = function_named(name, FORMS)
    with torch.device("meta"):
        made = function()
    model, given = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, where a model was expected")

    def example(batch: int, shape: tuple[int, ...] | None) -> Any:
        if shape is None and given is None:
            raise ValueError("give --input, or let the function return the model and its arguments as a pair")
        return given if shape is None else torch.empty(batch, *shape, device="meta")

    return NamedModel(model, example)


def _unknown(name: str, why: str, known: Iterable[str]) -> ValueError:
    near = suggestion(name.partition(":")[2], known)
    return ValueError(
        f"{name!r} names no model: {why}{near if 'did you mean' in near else f'; write {FORMS}'}"
    )
