"""Batches for an architecture. A maker returns None if the model's forward does not take its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.shrink import IMAGE, TEXT

Batch = dict[str, Any]
Maker = Callable[[Any, torch.Generator], Batch | None]
"""(model, generator of random numbers) → arguments of the forward."""

BATCH, LENGTH, SAMPLES, FRAMES = 2, 16, 2400, 64


def takes(model: nn.Module, *names: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return all(name in parameters for name in names)


def part(config: Any, *names: str) -> Any:
    """Return the first of the configurations in `config` that exists, or `config`."""
    for name in names:
        if (found := config.__dict__.get(name)) is not None and not isinstance(found, dict):
            return found
    return config


def number(config: Any, *names: str) -> int | None:
    """Return the first whole number that `config` has under one of the names."""
    for name in names:
        found = config.__dict__.get(name)
        found = found[0] if isinstance(found, (list, tuple)) and found else found
        if isinstance(found, int):
            return found
    return None


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, TEXT, (BATCH, length), generator=generator)


def text(model: Any, generator: torch.Generator) -> Batch | None:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()} if takes(model, "input_ids", "labels") else None


def text_without_labels(model: Any, generator: torch.Generator) -> Batch | None:
    return {"input_ids": _tokens(generator)} if takes(model, "input_ids") else None


def labelled_text(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "input_ids", "labels"):
        return None
    tokens = _tokens(generator)
    tokens[:, -1] = 2  # the end, where some classify
    return {"input_ids": tokens, "labels": torch.randint(2, (BATCH,), generator=generator)}


# -- images ------------------------------------------------------------------------------------------------------------


def _pixels(model: Any, generator: torch.Generator, *shape: int) -> torch.Tensor:
    vision = part(model.config, "vision_config", "vision", "backbone_config", "encoder_config")
    size = number(vision, "image_size", "img_size") or IMAGE
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        size = max(size, 4 * IMAGE)  # the statistics of two values amplify every rounding
    channels = number(vision, "num_channels", "in_channels", "in_chans")
    return torch.randn(BATCH, *shape, channels if channels in (1, 3) else 3, size, size, generator=generator)


def labelled_image(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "pixel_values", "labels"):
        return None
    pixels = _pixels(model, generator)
    return {"pixel_values": pixels, "labels": torch.randint(2, (BATCH,), generator=generator)}


def image(model: Any, generator: torch.Generator) -> Batch | None:
    return {"pixel_values": _pixels(model, generator)} if takes(model, "pixel_values") else None


def large_image(model: Any, generator: torch.Generator) -> Batch | None:
    """Images for models that halve them often."""
    pixels = torch.randn(BATCH, 3, 4 * IMAGE, 4 * IMAGE, generator=generator)
    return {"pixel_values": pixels} if takes(model, "pixel_values") else None


def labelled_video(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "pixel_values", "labels"):
        return None
    pixels = _pixels(model, generator, number(model.config, "num_frames") or 2)
    return {"pixel_values": pixels, "labels": torch.randint(2, (BATCH,), generator=generator)}


def video(model: Any, generator: torch.Generator) -> Batch | None:
    frames = number(model.config, "num_frames", "frames_per_clip") or 2
    name = next((name for name in ("pixel_values_videos", "pixel_values") if takes(model, name)), None)
    return None if name is None else {name: _pixels(model, generator, frames)}


def contrast_without_loss(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "input_ids", "pixel_values"):
        return None
    tokens = _tokens(generator)
    tokens[:, -1] = number(part(model.config, "text_config"), "eos_token_id") or 2
    return {"input_ids": tokens, "pixel_values": _pixels(model, generator)}


def contrast(model: Any, generator: torch.Generator) -> Batch | None:
    batch = contrast_without_loss(model, generator)
    return None if batch is None or not takes(model, "return_loss") else {**batch, "return_loss": True}


# -- images in text ----------------------------------------------------------------------------------------------------


def _features(output: Any) -> int:
    """Return the number of rows that are put in place of tokens: those of all images."""
    if isinstance(output, torch.Tensor):
        return output.shape[:-1].numel()
    if (pooled := getattr(output, "pooler_output", None)) is not None:
        return _features(pooled)
    if isinstance(output, (list, tuple)):
        return sum(map(_features, output))
    return _features(output.last_hidden_state)


def _with_features(model: Any, generator: torch.Generator, inputs: Batch, method: str, *names: str) -> Batch | None:
    """Return text in which a special token stands for each row of the features of `inputs`."""
    get, token = getattr(model, method, None), number(model.config, *names)
    if get is None or token is None:
        return None
    with torch.no_grad():
        count = _features(get(**inputs))
    if count % BATCH or count > 400:
        return None
    tokens = torch.cat([torch.full((BATCH, count // BATCH), token), _tokens(generator)], 1)
    tokens = torch.cat([torch.full((BATCH, 1), 1), tokens], 1)
    batch = {"input_ids": tokens, "labels": tokens.where(tokens < TEXT, -100), **inputs}
    if takes(model, "mm_token_type_ids"):
        batch["mm_token_type_ids"] = (tokens == token).long()
    if takes(model, "token_type_ids"):
        batch["token_type_ids"] = (tokens == token).long()
    return batch


_IMAGE_TOKENS = "image_token_id", "image_token_index", "media_placeholder_token_id", "img_token_id"


def image_in_text(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "input_ids", "pixel_values"):
        return None
    pixels = {"pixel_values": _pixels(model, generator)}
    return _with_features(model, generator, pixels, "get_image_features", *_IMAGE_TOKENS)


def patches_in_text(model: Any, generator: torch.Generator) -> Batch | None:
    """Images as rows of flat patches with their grids, as in Qwen-VL."""
    if not takes(model, "input_ids", "pixel_values", "image_grid_thw"):
        return None
    vision = part(model.config, "vision_config")
    patch, merge = number(vision, "patch_size") or 14, number(vision, "spatial_merge_size") or 2
    depth = (number(vision, "in_channels", "num_channels", "in_chans") or 3) * (
        number(vision, "temporal_patch_size") or 1
    )
    rows = torch.randn(BATCH * (2 * merge) ** 2, depth * patch**2, generator=generator)
    grid = torch.tensor([[1, 2 * merge, 2 * merge]] * BATCH)
    inputs = {"pixel_values": rows, "image_grid_thw": grid}
    return _with_features(model, generator, inputs, "get_image_features", *_IMAGE_TOKENS)


def sound_in_text(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "input_ids", "input_features"):
        return None
    bins = number(part(model.config, "audio_config", "encoder_config"), "num_mel_bins", "feature_size") or 16
    sound = {"input_features": torch.randn(BATCH, bins, 2 * FRAMES, generator=generator)}
    return _with_features(model, generator, sound, "get_audio_features", "audio_token_id", "audio_token_index")


def image_beside_text(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "input_ids", "pixel_values", "labels"):
        return None
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": _pixels(model, generator)}


def image_to_text(model: Any, generator: torch.Generator) -> Batch | None:
    if takes(model, "input_ids") or not takes(model, "pixel_values", "labels"):
        return None
    return {"pixel_values": _pixels(model, generator), "labels": _tokens(generator)}


# -- sound -------------------------------------------------------------------------------------------------------------


def _labels(model: Any, generator: torch.Generator) -> torch.Tensor:
    return (
        torch.randint(2, (BATCH,), generator=generator)
        if "Classification" in type(model).__name__
        else _tokens(generator, 5).clamp(max=30)
    )


def waves(model: Any, generator: torch.Generator) -> Batch | None:
    if not takes(model, "input_values", "labels"):
        return None
    return {"input_values": torch.randn(BATCH, SAMPLES * 8, generator=generator), "labels": _labels(model, generator)}


def _spectrum(model: Any, generator: torch.Generator, name: str, *, last: bool, frames: int) -> Batch | None:
    if not takes(model, name, "labels"):
        return None
    config = part(model.config, "encoder_config", "audio_config")
    bins = number(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim") or 16
    shape = (BATCH, frames, bins) if last else (BATCH, bins, frames)
    return {name: torch.randn(*shape, generator=generator), "labels": _labels(model, generator)}


def spectrum(model: Any, generator: torch.Generator) -> Batch | None:
    frames = 2 * (number(model.config, "max_source_positions") or FRAMES // 2)
    return _spectrum(model, generator, "input_features", last=False, frames=frames)


def frames(model: Any, generator: torch.Generator) -> Batch | None:
    return _spectrum(model, generator, "input_features", last=True, frames=2 * FRAMES)


def masked_frames(model: Any, generator: torch.Generator) -> Batch | None:
    batch = frames(model, generator)
    if batch is None or not takes(model, "attention_mask"):
        return None
    return {**batch, "attention_mask": torch.ones(BATCH, 2 * FRAMES, dtype=torch.long)}


def frames_as_values(model: Any, generator: torch.Generator) -> Batch | None:
    return _spectrum(model, generator, "input_values", last=True, frames=number(model.config, "max_length") or FRAMES)


IMAGES: tuple[Maker, ...] = (labelled_image, image, large_image)
VIDEOS: tuple[Maker, ...] = (labelled_video, video)
SOUNDS: tuple[Maker, ...] = (spectrum, frames, masked_frames, waves, frames_as_values)
MULTIMODAL: tuple[Maker, ...] = (
    *(patches_in_text, image_in_text, sound_in_text, image_beside_text, image_to_text, *SOUNDS),
    *(text, text_without_labels, image),
)
