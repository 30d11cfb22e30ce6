"""Evaluation whose loss is a mean over tokens, however the rows are batched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ts_hf.families import base_causal_lm
from ts_hf.packing import IGNORED, PackedCollator
from ts_hf.training.targets import TokenMean, count_targets


class EvaluationMixin:
    """Overrides of transformers.Trainer's evaluation; comes before it in the bases.

    transformers weighs the mean loss of each batch by its rows, so that the result depends on how
    rows with different numbers of labels are batched. Here it is the mean over all labels that
    count, for causal models without a loss function of the user's own.
    """

    args: Any
    accelerator: Any
    model: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    _loss_shifts_labels: bool
    _token_mean: TokenMean | None = None
    _weight: tuple[Tensor, Tensor | float | None] | None = None
    _prediction_loss_only = False

    def evaluation_loop(
        self: Any,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As transformers.Trainer's, with the loss as a mean over tokens."""
        if self._averages_over_next_tokens():
            self._token_mean = TokenMean()
        try:
            output = super().evaluation_loop(  # type: ignore[misc]
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            mean = self._token_mean and self._token_mean.result(self.accelerator)
        finally:
            self._token_mean = None
        key = f"{metric_key_prefix}_loss"
        if mean is not None and key in output.metrics:
            output.metrics[key] = mean
        return output

    def prediction_step(
        self: Any,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """As transformers.Trainer's; without logits when only the loss is asked for."""
        self._prediction_loss_only = bool(prediction_loss_only)
        self._weight = None
        if self._token_mean is not None:
            inputs = self._without_repeats(inputs)
        try:
            found = super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, ignore_keys
            )
        finally:
            self._prediction_loss_only = False
        # Of the loss that is returned, to which a subclass may have added something.
        if self._token_mean is not None and self._weight is not None and found[0] is not None:
            self._token_mean.add(found[0], *self._weight)
        return found

    def _averages_over_next_tokens(self: Any) -> bool:
        """Whether a batch's loss is a mean over labels that are shifted by one."""
        own = super().compute_loss.__func__ is not Trainer.compute_loss  # type: ignore[misc]
        if own or not self._loss_shifts_labels or self.compute_loss_func is not None:
            return False
        if self.label_smoother is None:
            return True
        # transformers shifts for its own classes only.
        shifts: bool = (
            type(base_causal_lm(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        )
        return shifts

    def _without_repeats(self: Any, inputs: Any) -> Any:
        """The last batch of several processes, without the labels of rows that fill it up.

        accelerate repeats rows of the beginning there; transformers drops them from what metrics
        see. Packed batches keep them, since their rows are no longer the data's.
        """
        data = self.accelerator.gradient_state
        labels = inputs.get("labels")
        if not data.end_of_dataloader or data.remainder <= 0 or not torch.is_tensor(labels):
            return inputs
        if self.accelerator.num_processes == 1 or isinstance(self.data_collator, PackedCollator):
            return inputs
        own = data.remainder - self.accelerator.process_index * len(labels)
        labels = labels.clone()
        labels[max(own, 0) :] = IGNORED
        return {**inputs, "labels": labels}

    def _weigh(self: Any, inputs: Mapping[Any, Any], num_items: Tensor | int | None) -> None:
        """Note what the loss of a batch of an evaluation counts, which `num_items` divided."""
        count = None if self._token_mean is None else count_targets(inputs)
        if count is None:
            return
        divisor = None
        if self.model_accepts_loss_kwargs and num_items is not None:
            # With average_tokens_across_devices it is all processes' count, and the loss was
            # multiplied by their number.
            scaled = self.args.average_tokens_across_devices
            divisor = num_items / (self.accelerator.num_processes if scaled else 1)
        self._weight = (count, divisor)
