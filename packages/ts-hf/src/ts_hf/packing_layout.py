"""How a given model has to be shown packed rows, found out by trying rather than by its name.

A model is run once on a row of a few tokens, [b a b a' b]. If every b has the logits of b alone,
then no attention (nor state) crosses from one sequence to the next, and positions restart as they
should. How much of a difference is rounding is measured beside it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import OptionError
from ts_hf.families import base_causal_lm

_A, _OTHER_A, _B = 5, 4, 6  # tokens of the pieces of the row that is tried


@dataclass(frozen=True)
class Layout:
    """What to change of a packed batch before a model sees it.

    Attributes:
        first_position: position id of a sequence's first token.
        one_row: all rows of a batch are joined to one (flash attention recognizes no other).
        own_masks: masks given whole keep the sequences apart, where the model makes its own
            without regard to position ids.
    """

    first_position: int = 0
    one_row: bool = False
    own_masks: bool = False


def looks_packed(inputs: Mapping[Any, Any]) -> bool:
    """Whether a batch, still in host memory, has rows whose positions restart from 0.

    Args:
        inputs: as from any collator; DataCollatorWithFlattening makes such batches, too.
    """
    positions = inputs.get("position_ids")
    if not torch.is_tensor(positions) or positions.dim() != 2 or positions.is_cuda:
        return False
    if inputs.get("attention_mask") is not None or "cu_seq_lens_q" in inputs:
        return False  # the sequences are told apart by that
    starts = (positions == 0).sum(dim=-1)
    return bool((positions[:, 0] == 0).all() and (starts > 1).any())


class PackedInputs:
    """Packed batches as the model needs them.

    Args:
        say: called with one line of plain words when a batch is changed for the model's sake.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._layouts: weakref.WeakKeyDictionary[nn.Module, Layout] = weakref.WeakKeyDictionary()

    def __call__(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch for `model`; the model is tried at its first batch.

        Args:
            model: a causal language model.
            inputs: input_ids, labels and position_ids [R, T] as from PackedCollator, on the
                model's device.

        Raises:
            OptionError: the model mixes packed sequences whatever it is told.
        """
        if model not in self._layouts:
            layout = find_layout(model)
            self._layouts[model] = layout
            if layout != Layout():
                self._say(f"packing: {type(base_causal_lm(model)).__name__} is given {layout}")
        return arrange(model, inputs, self._layouts[model])


def find_layout(model: nn.Module) -> Layout:
    """The first layout in which `model` keeps packed sequences apart.

    The model is run a few times, without gradients, in eval mode, on 27 tokens; its mode is kept.

    Args:
        model: a causal language model, in a PEFT wrapper or not.

    Raises:
        OptionError: there is none; the message says what was found.
    """
    inner: Any = base_causal_lm(model)
    name = type(inner).__name__
    remedy = "Train it without packing."
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise OptionError(f"packing: {name} takes no position_ids. {remedy}")
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        raise OptionError(
            f"packing: prompt learning puts its tokens before a row, not before each sequence of "
            f"it. {remedy}"
        )
    found: list[str] = []
    training = model.training
    model.eval()
    try:
        probe = _Probe(model)
        for layout in _candidates(inner):
            try:
                problem = probe.why_not(layout)
            except (TypeError, ValueError, AttributeError, KeyError) as error:
                problem = (
                    f"it raises {type(error).__name__}: {error}"  # takes no masks of this form
                )
            if problem is None:
                return layout
            found.append(f"with {layout} {problem}")
    finally:
        model.train(training)
    raise OptionError(f"packing: {name} mixes packed sequences: {'; '.join(found)}. {remedy}")


def arrange(model: nn.Module, inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """`inputs`, a packed batch, in `layout`."""
    changed = {**inputs, "use_cache": False}
    if layout.one_row:
        for key in ("input_ids", "labels", "position_ids"):
            if key in changed:
                changed[key] = changed[key].reshape(1, -1)
    if layout.own_masks:
        changed["attention_mask"] = _masks(model, changed["position_ids"])
    if layout.first_position:
        changed["position_ids"] = changed["position_ids"] + layout.first_position
    return changed


def _candidates(inner: Any) -> Iterator[Layout]:
    flash = "flash" in (getattr(inner.config, "_attn_implementation", None) or "eager")
    firsts = (0, *_first_positions_by_padding(inner))
    for masks in (False,) if flash else (False, True):  # flash attention takes no such masks
        for first in firsts:
            yield Layout(first_position=first, one_row=flash, own_masks=masks)


def _first_positions_by_padding(inner: nn.Module) -> set[int]:
    """Learned positions may count from the padding id's successor (RoBERTa's do)."""
    return {
        module.padding_idx + 1
        for name, module in inner.named_modules()
        if isinstance(module, nn.Embedding)
        and "position" in name
        and module.padding_idx is not None
    }


class _Probe:
    """Runs the row [b a b a' b], where causal attention shows the first b nothing else."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        inner: Any = base_causal_lm(model)
        embeddings = inner.get_input_embeddings()
        device = embeddings.weight.device
        # Distinct tokens, so that a crossing shows; 2 and up, since 0 and 1 often mean padding.
        ids = torch.arange(_A + _OTHER_A + _B, device=device)
        a, other, b = (2 + ids % max(embeddings.weight.shape[0] - 2, 1)).split((_A, _OTHER_A, _B))
        pieces = (b, a, b, other, b)
        self._row = torch.cat(pieces)[None]
        self._positions = torch.cat([torch.arange(len(p), device=device) for p in pieces])[None]
        self._alone = self._logits({"input_ids": b[None]})
        first, *others = self._of_b(self._logits({"input_ids": self._row}))
        self._mixed = max(_gap(other, self._alone) for other in others)
        # To the first b only the shape of the row is new: what that changes is rounding.
        # A sum in another order shows in a few units of fp32's last digit, and in at most one of
        # the 16-bit types', which are rounded once at its end.
        eps = torch.finfo(self._alone.dtype).eps
        units = 4 if eps < 1e-5 else 1
        self._rounding = 3 * _gap(first, self._alone) + units * eps * self._alone.abs().max().item()

    def why_not(self, layout: Layout) -> str | None:
        """None if the model keeps the sequences apart in `layout`, else what it does."""
        inputs = {"input_ids": self._row, "position_ids": self._positions}
        found = self._of_b(self._logits(arrange(self._model, inputs, layout)))
        gap = max(_gap(logits, self._alone) for logits in found)
        if gap <= self._rounding:
            return None
        return f"a sequence's logits are off by {gap:.2g} (by {self._mixed:.2g} unpacked)"

    @torch.no_grad()
    def _logits(self, inputs: dict[str, Any]) -> Tensor:
        logits: Tensor = self._model(**{**inputs, "use_cache": False}).logits
        return logits[0]

    def _of_b(self, logits: Tensor) -> list[Tensor]:
        starts = (0, _B + _A, 2 * _B + _A + _OTHER_A)
        return [logits[start : start + _B] for start in starts]


def _gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def _masks(model: nn.Module, position_ids: Tensor) -> Any:
    """What transformers' masks would be if the model told them of the positions.

    Returns:
        A mask [R, 1, T, T] as the model's attention takes it, or a dict of masks by layer type.
    """
    from transformers.masking_utils import create_masks_for_generate

    inner: Any = base_causal_lm(model)
    dtype = inner.get_input_embeddings().weight.dtype
    return create_masks_for_generate(
        config=inner.config,
        inputs_embeds=position_ids.new_empty((*position_ids.shape, 1), dtype=dtype),
        attention_mask=None,
        past_key_values=None,
        position_ids=position_ids,
    )
