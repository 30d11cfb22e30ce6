"""TrainStreamTrainer, and other Trainers made to stream."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer

from ts_core.errors import OptionError
from ts_hf.training.streaming import TrainStreamMixin


class TrainStreamTrainer(TrainStreamMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer whose model streams.

    Everything transformers.Trainer does with schedules, data, accumulation, logging, evaluation,
    checkpoints and callbacks works as there. The model is wrapped when training or evaluation
    first needs it; from then on `trainer.optimizer` updates on the host. Gradients are clipped to
    `args.max_grad_norm` inside the optimizer, by the exact global norm, which is logged. Logs gain
    ts_vram_alloc_gb, ts_vram_peak_gb, ts_pinned_gb, ts_host_state_gb, ts_d2h_gb, ts_h2d_gb.

    Args:
        *args: as for transformers.Trainer.
        trainstream: a dict with any option of `ts_core.wrap` (but those that TrainingArguments
            has), and `chunked_loss` (True: never build the logits where the model's own loss
            allows), `loss_chunk_size` (1024 rows), `packing` (False; True: the rows of a batch
            become one without padding; an int: rows of that length). Packed batches give the loss
            and gradients of their rows one by one; evaluation packs too. `pad_to_multiple_of`
            (None; an int): batches, or the one packed row, are padded on the right to a multiple
            of so many tokens, so that few shapes come and what is prepared for a shape
            (`cuda_graphs`) is used again.
        **kwargs: as for transformers.Trainer.

    Raises:
        OptionError: an option or argument that is not accepted; no trainable parameter.
        NotAvailableError: one that is not built in this version.
        StateError: the model is already wrapped.
    """


class _ReferenceMixin:
    """For trainers that ask a reference model, maybe before training begins."""

    def compute_ref_log_probs(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base's (TRL's DPOTrainer); the model is wrapped, and so placed, first."""
        self._ensure_wrapped()
        return super().compute_ref_log_probs(*args, **kwargs)  # type: ignore[misc]


@functools.cache
def streaming_trainer(base: type[Any]) -> type[Any]:
    """A subclass of `base` whose model streams, as TrainStreamTrainer is one of transformers'.

        trainer = streaming_trainer(trl.SFTTrainer)(model, ..., trainstream={"param_offload": True})

    Args:
        base: transformers.Trainer or a subclass that leaves the training loop to it, such as TRL's
            SFTTrainer and DPOTrainer.

    Returns:
        The class; the same one for the same base. It takes the arguments of `base`, and
        `trainstream` as TrainStreamTrainer does. A base that computes its own loss does so
        (`chunked_loss` has no effect there).

    Raises:
        OptionError: `base` is no Trainer.
    """
    if not (isinstance(base, type) and issubclass(base, Trainer)):
        raise OptionError(f"{base!r} is not a subclass of transformers.Trainer.")
    if issubclass(base, TrainStreamMixin):
        return base
    fields = {"__doc__": base.__doc__, "__module__": base.__module__}
    mixins: tuple[type[Any], ...] = (TrainStreamMixin,)
    if hasattr(base, "compute_ref_log_probs"):
        mixins += (_ReferenceMixin,)
    return type(f"Streaming{base.__name__}", (*mixins, base), fields)
