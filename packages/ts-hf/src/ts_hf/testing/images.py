"""Small vision-language models and batches with images for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

START, END, IMAGE = 90, 91, 92
"""Tokens around an image, and the one that stands for each of its features."""

FIRST = 3
"""Where the image begins in a row."""


@dataclass(frozen=True)
class Images:
    """How a model takes the image of a row.

    Attributes:
        shape: of its pixels, `pixel_values` being those of all rows along the first dimension.
        tokens: IMAGE tokens that stand for it.
        types: name of the argument that marks image tokens with 1, or "".
        sizes: further arguments, one row each.
    """

    shape: tuple[int, ...]
    tokens: int = 4
    types: str = ""
    sizes: dict[str, list[int]] = field(default_factory=dict)

    def put_into(self, batch: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
        """The batch of tokens with an image in every row in place of some; not in the labels."""
        ids = batch["input_ids"].clone()
        ids[:, FIRST] = START
        ids[:, FIRST + 1 : FIRST + 1 + self.tokens] = IMAGE
        ids[:, FIRST + 1 + self.tokens] = END
        rows = len(ids)
        generator = torch.Generator().manual_seed(seed)
        first, *rest = self.shape
        more = {name: torch.tensor([row] * rows) for name, row in self.sizes.items()}
        if self.types:
            more[self.types] = (ids == IMAGE).long()
        return {
            **batch,
            "input_ids": ids,
            "labels": batch["labels"].masked_fill(ids >= START, -100),
            "pixel_values": torch.randn(rows * first, *rest, generator=generator),
            **more,
        }


_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN_TOKENS = {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": 93,
}
_QWEN_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_IMAGES = Images((16, 96), types="mm_token_type_ids", sizes={"image_grid_thw": [1, 4, 4]})


def qwen2_5_vl(text: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Qwen2_5_VLConfig with this text model."""
    vision = {**_QWEN_VISION, "depth": 2, "fullatt_block_indexes": [1], "window_size": 16}
    return {
        "text_config": {**text, "rope_parameters": _ROPE},
        "vision_config": vision,
        **_QWEN_TOKENS,
    }


def qwen3_vl(text: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Qwen3VLConfig with this text model."""
    vision = {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    return {
        "text_config": {**text, "rope_parameters": _ROPE},
        "vision_config": {**_QWEN_VISION, **vision},
        **_QWEN_TOKENS,
    }


def gemma3(text: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Gemma3Config with this text model."""
    return {
        "text_config": text,
        "vision_config": {**_TOWER, "image_size": 32},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    }


def llava(text: dict[str, Any]) -> dict[str, Any]:
    """Fields of a LlavaConfig with this text model."""
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_token_index": IMAGE,
        "image_seq_length": 4,
    }


def smolvlm(text: dict[str, Any]) -> dict[str, Any]:
    """Fields of a SmolVLMConfig with this text model."""
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": {**_TOWER, "num_hidden_layers": 4},  # a longer stack than the text's
        "image_token_id": IMAGE,
        "scale_factor": 2,
    }
