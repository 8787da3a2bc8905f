"""Architectures by task: classes of `transformers`' automatic mappings, and how a batch of each looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers.models.auto import modeling_auto

from zoo import inputs

MAPPINGS: dict[str, tuple[str, tuple[inputs.Maker, ...]]] = {
    "causal": ("CAUSAL_LM", (inputs.text, inputs.text_without_labels)),
    "masked": ("MASKED_LM", (inputs.text,)),
    "two stacks": ("SEQ_TO_SEQ_CAUSAL_LM", (inputs.text,)),
    "multimodal": ("IMAGE_TEXT_TO_TEXT", inputs.MULTIMODAL),
    "multimodal or sound": ("MULTIMODAL_LM", inputs.MULTIMODAL),
    "image and text": ("ZERO_SHOT_IMAGE_CLASSIFICATION", (inputs.contrast, inputs.contrast_without_loss)),
    "image": ("IMAGE_CLASSIFICATION", inputs.IMAGES),
    "masked image": ("MASKED_IMAGE_MODELING", inputs.IMAGES),
    "pixels": ("SEMANTIC_SEGMENTATION", inputs.IMAGES),
    "depth": ("DEPTH_ESTIMATION", inputs.IMAGES),
    "video": ("VIDEO_CLASSIFICATION", inputs.VIDEOS),
    "speech": ("SPEECH_SEQ_2_SEQ", inputs.SOUNDS),
    "ctc": ("CTC", inputs.SOUNDS),
    "sound": ("AUDIO_CLASSIFICATION", inputs.SOUNDS),
    "sequence": ("SEQUENCE_CLASSIFICATION", (inputs.labelled_text, inputs.text_without_labels)),
}
"""Kind → mapping MODEL_FOR_…_MAPPING_NAMES, and makers of batches, the richest first."""


@dataclass(frozen=True)
class Architecture:
    """model_type: key of `transformers`' mappings. name: of the class. makers: of batches, to be tried in turn."""

    kind: str
    model_type: str
    name: str
    makers: tuple[Callable[..., inputs.Batch | None], ...]


def architectures() -> Iterator[Architecture]:
    """Yield each class once, by kind."""
    seen = set()
    for kind, (mapping, makers) in MAPPINGS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for model_type, classes in names.items():
            name = classes if isinstance(classes, str) else classes[0]
            if name not in seen:
                seen.add(name)
                yield Architecture(kind, model_type, name, makers)
