"""What a transformers.Trainer does otherwise when its model streams."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ts_core.errors import OptionError, StateError
from ts_hf.packing import PackedCollator
from ts_hf.packing_layout import PackedInputs, looks_packed
from ts_hf.training.checkpointing import CheckpointMixin
from ts_hf.training.collector import HeapSetAside
from ts_hf.training.evaluation import EvaluationMixin
from ts_hf.training.finite import FiniteGuard
from ts_hf.training.loss import ChunkedLoss
from ts_hf.training.memory_log import memory_numbers
from ts_hf.training.modes import TrainingMode
from ts_hf.training.options import (
    TrainerOptions,
    by_name,
    check_arguments,
    choose_collator,
    moments_of,
    pad_batches,
)
from ts_hf.training.schedulers import parted, rebind
from ts_hf.training.targets import WindowTargets
from ts_hf.wrapping import wrap_hf

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger("trainstream.hf")

_SESSION = "_trainstream_session"


class TrainStreamMixin(CheckpointMixin, EvaluationMixin, _Trainer):  # type: ignore[misc]
    """What makes a transformers.Trainer stream; comes before it in the bases.

    Takes the argument `trainstream` besides those of the Trainer. See TrainStreamTrainer.
    """

    def __init__(
        self, *args: Any, trainstream: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._options = TrainerOptions.parse(trainstream)
        kwargs = by_name(type(self), args, kwargs)
        arguments, model = kwargs.get("args"), kwargs.get("model")
        if isinstance(arguments, TrainingArguments):
            check_arguments(arguments)
            _one_device(arguments)
        if model is not None and hasattr(model, _SESSION):
            raise StateError(
                "the model is already wrapped. Give the Trainer the model as it was before "
                "(ts_core.unwrap brings it back); it wraps it itself."
            )
        multiple = self._options.pad_to_multiple_of
        choose_collator(self._options.packing, kwargs, multiple)
        self._streaming: Any = None  # the OffloadAdamW, once the model is wrapped
        self._unfinished = 0  # micro-batches since the last optimizer step
        self._chunked = ChunkedLoss(self._options.loss_chunk_size, self.say)
        self._packed = PackedInputs(self.say)
        self._window = WindowTargets([])
        self._masked_window_seen = False
        self._finite = FiniteGuard()
        self._mode = TrainingMode()
        self._early_events: list[str] = []
        self._per_token: tuple[nn.Module, int] | None = None  # floating point operations
        self.optimizer: Any
        super().__init__(**kwargs)
        if arguments is None:
            check_arguments(self.args)
            _one_device(self.args)
        if multiple is not None and self._options.packing is False:
            pad_batches(self, multiple)
        # A loss that is not finite raises here, so transformers need not look at each one (which
        # would make the host wait for the GPU after every micro-batch).
        self.args.logging_nan_inf_filter = False
        # The pager places the weights; accelerate is not to move the model, nor the optimizer.
        self.accelerator.device_placement = False
        self.add_callback(_StepChecks(self))
        self.heap = HeapSetAside()
        self.add_callback(self.heap)

    # -- wrapping --------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Record a decision among the session's events, and log it."""
        logger.info("%s", text)
        session = getattr(getattr(self, "model", None), _SESSION, None)
        if session is not None:
            session.log(text)
        else:
            self._early_events.append(text)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: wrapping moves what is to be on the device."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Wrap the model, with AdamW over transformers' two param groups unless one was given."""
        self._ensure_wrapped()
        return self.optimizer

    def _ensure_wrapped(self) -> None:
        if hasattr(self.model, _SESSION):
            return
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise OptionError(
                "the model has no parameter that requires a gradient, so there is nothing to "
                "train. Add adapters (peft.get_peft_model) or unfreeze parameters first."
            )
        given = getattr(self.optimizer, "optimizer", self.optimizer)
        clip = self.args.max_grad_norm
        with parted(self.lr_scheduler, given):
            _, self._streaming = wrap_hf(
                self.model,
                given if given is not None else self._make_adamw(),
                max_grad_norm=float(clip) if clip and clip > 0 else None,
                accumulation_steps=self.args.gradient_accumulation_steps,
                device=self.args.device,
                **{**(moments_of(self.args) if given is None else {}), **self._options.wrap},
            )
        self.optimizer = self._streaming
        if self.lr_scheduler is not None and not self._created_lr_scheduler:
            rebind(self.lr_scheduler, self._streaming)
        for line in self._early_events:
            getattr(self.model, _SESSION).log(line)
        self._early_events.clear()

    def _make_adamw(self) -> torch.optim.Optimizer:
        decayed = set(self.get_decay_parameter_names(self.model))
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {
                "params": [p for n, p in named if n in decayed],
                "weight_decay": self.args.weight_decay,
            },
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=self.args.learning_rate,
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
        )

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Neither DataParallel nor DistributedDataParallel: the model itself, wrapped.

        A model with nothing to train can still be evaluated, unwrapped.
        """
        if not training and any(parameter.requires_grad for parameter in model.parameters()):
            self._ensure_wrapped()
        elif not training:
            model.to(self.args.device)
        return model

    # -- a step ----------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As transformers.Trainer's; tells the optimizer how many backward passes the step has."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples and self._streaming is not None:
            passes = self._unfinished + len(samples)
            if len(samples) < num_batches:
                # The data ended within the window: transformers takes no step for it, and adds its
                # gradients to the next window.
                passes += self.args.gradient_accumulation_steps
            self._streaming.accumulation_steps = passes
        self._window = WindowTargets(samples)
        if not self.model_accepts_loss_kwargs and self._averages_over_next_tokens():
            self._window.count_over(self.accelerator)
        if self._window.total == 0 and not self._masked_window_seen:
            self._masked_window_seen = True
            self.say(
                f"step {self.state.global_step + 1}: every label is masked, so its loss and "
                f"gradients are 0 (further such steps are not reported)"
            )
        return samples, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As transformers.Trainer's; packed batches as the model needs them."""
        packed = isinstance(self.data_collator, PackedCollator) or looks_packed(inputs)
        inputs = super()._prepare_inputs(inputs)
        return self._packed(self.model, inputs) if packed else inputs

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """As transformers.Trainer's."""
        with self._mode.quick(model):
            loss: Tensor = super().training_step(model, *args, **kwargs)
        self._unfinished += 1
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As transformers.Trainer's, which counts the model's parameters anew for every batch."""
        count = super().floating_point_ops
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = inputs[name].numel() if name in inputs else 0
        if not tokens or count.__func__ is not Trainer.floating_point_ops:
            return int(count(inputs))
        if self._per_token is None or self._per_token[0] is not self.model:
            self._per_token = self.model, int(count(inputs)) // tokens
        return self._per_token[1] * tokens

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of one micro-batch, without the logits where that is possible.

        Raises:
            NonFiniteError: in training, when it is NaN or infinite.
        """
        if torch.is_tensor(num_items_in_batch):
            # With every label of a window masked, 0 / 1 rather than 0 / 0.
            num_items_in_batch = num_items_in_batch.clamp(min=1)
        counted = {key: inputs[key] for key in ("labels", "shift_labels") if key in inputs}
        if self._may_chunk(model, inputs, return_outputs):
            num_items = num_items_in_batch if self.model_accepts_loss_kwargs else None
            loss, outputs = self._chunked(model, inputs, num_items, self.accelerator.autocast)
            if num_items is not None and self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes  # as transformers' own does
        else:
            # Outputs are asked for only if they are needed: to some trainers they are extra work.
            wanted = return_outputs or (model.training and not self.model_accepts_loss_kwargs)
            found = super().compute_loss(
                model, inputs, return_outputs=wanted, num_items_in_batch=num_items_in_batch
            )
            loss, outputs = found if wanted else (found, None)
        if not model.training:
            self._weigh(counted, num_items_in_batch)
        else:
            if not self.model_accepts_loss_kwargs:
                loss = self._as_share_of_the_window(loss, outputs)
            self._finite.watch(loss, self.state.global_step + 1)
        return (loss, outputs) if return_outputs else loss

    def _as_share_of_the_window(self, loss: Tensor, outputs: Any) -> Tensor:
        """The part of a window's mean over tokens, from a micro-batch's mean over its own.

        For models that take no `num_items_in_batch`. transformers divides what is returned by the
        number of micro-batches, and so gives the same where they have equally many labels.
        """
        if not self._averages_over_next_tokens():
            return loss
        taken = self._window.take()
        if taken is None:
            return loss
        count, share = taken
        if count == 0:  # the model's mean over nothing is NaN, and so are its gradients
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
            nothing: Tensor = logits.float().sum() * 0.0
            return nothing
        part: Tensor = loss * (share * self.current_gradient_accumulation_steps)
        return part

    def _may_chunk(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> bool:
        wanted = self._options.chunked_loss and (not return_outputs or self._prediction_loss_only)
        own = (
            self.compute_loss_func is not None
            or self.label_smoother is not None
            or super().compute_loss.__func__ is not Trainer.compute_loss  # one of TRL's
        )
        return wanted and not own and self._chunked.applies(model, inputs)

    # -- clipping, logging, saving -----------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: the optimizer clips in its step, by the exact norm."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing yet: the norm is known after the optimizer's step."""

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._finite.settle()
        norm = None
        if self.control.should_log and self._streaming is not None:  # reading waits for the device
            norm = self._streaming.last_grad_norm
        super()._maybe_log_save_evaluate(tr_loss, norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As transformers.Trainer's, with the memory numbers."""
        super().log({**logs, **memory_numbers(self.model)}, *args, **kwargs)

    def before_save(self) -> None:
        """Make what is about to be saved final: no loss unchecked, no update in flight."""
        self._finite.settle()
        if self._streaming is not None:
            self._streaming.synchronize()

    def forget_unfinished_step(self) -> None:
        """Drop what an earlier train() left when it raised in the middle of a step."""
        self._unfinished = 0
        self._finite = FiniteGuard()
        if self._streaming is not None:
            self._streaming.zero_grad()

    def after_optimizer_step(self) -> None:
        """Called once per optimizer step."""
        self._unfinished = 0
        self._finite.watch_norm(self._streaming.pending_grad_norm, self.state.global_step + 1)


class _StepChecks(TrainerCallback):  # type: ignore[misc]
    """Tells the trainer that the optimizer has stepped."""

    def __init__(self, trainer: TrainStreamMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.after_optimizer_step()


def _one_device(args: TrainingArguments) -> None:
    """Keep transformers from splitting batches over every visible GPU (DataParallel)."""
    if args.n_gpu > 1:
        args._n_gpu = 1
