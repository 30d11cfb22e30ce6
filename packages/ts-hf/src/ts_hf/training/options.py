"""What TrainStreamTrainer takes, and what it refuses, before anything is moved or written."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from ts_core.config import WrapOptions
from ts_core.errors import NotAvailableError, OptionError
from ts_hf.packing import PackedCollator
from ts_hf.padding import PaddedCollator, check_multiple

# Names of transformers' `optim` that mean AdamW, and the moments that OffloadAdamW keeps for them
# (None: as `moment_dtype` of the options says).
ADAMW_NAMES: dict[str, str | None] = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "paged_adamw_32bit": None,
    "adamw_8bit": "int8",
    "adamw_bnb_8bit": "int8",
    "adamw_torch_8bit": "int8",
    "paged_adamw_8bit": "int8",
}
_FROM_ARGUMENTS = {
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "device": "use_cpu",
}


@dataclass(frozen=True)
class TrainerOptions:
    """The `trainstream` dict, checked: options of wrap() and those of the Trainer itself."""

    wrap: dict[str, Any] = field(default_factory=dict)
    chunked_loss: bool = True
    loss_chunk_size: int = 1024
    packing: bool | int = False
    pad_to_multiple_of: int | None = None

    @staticmethod
    def parse(given: dict[str, Any] | None) -> TrainerOptions:
        """Split and check.

        Raises:
            OptionError: not a dict, an unknown option, a value that is not accepted, or an option
                that TrainingArguments already has.
        """
        if given is not None and not isinstance(given, dict):
            raise OptionError(
                f"trainstream={given!r}: expected a dict of options, such as "
                f"{{'param_offload': True}}."
            )
        rest = dict(given or {})
        chunked = rest.pop("chunked_loss", True)
        if not isinstance(chunked, bool):
            raise OptionError(f"chunked_loss={chunked!r}: expected True or False.")
        size = rest.pop("loss_chunk_size", 1024)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"loss_chunk_size={size!r}: expected an int of at least 1.")
        packing = rest.pop("packing", False)
        if not isinstance(packing, int) or (packing is not False and packing < 1):
            raise OptionError(f"packing={packing!r}: expected False, True or a row length.")
        multiple = rest.pop("pad_to_multiple_of", None)
        if multiple is not None:
            check_multiple(multiple)
            if packing is not False and packing is not True:
                raise OptionError(
                    f"pad_to_multiple_of={multiple!r}: packing={packing!r} makes rows of that "
                    f"length already. Leave one of them out."
                )
        for name, argument in _FROM_ARGUMENTS.items():
            if name in rest:
                raise OptionError(
                    f"trainstream={{{name!r}: ...}}: TrainStreamTrainer takes this from "
                    f"TrainingArguments({argument}=...). Set it there."
                )
        WrapOptions.from_keywords(rest)
        return TrainerOptions(
            wrap=rest,
            chunked_loss=chunked,
            loss_chunk_size=size,
            packing=packing,
            pad_to_multiple_of=multiple,
        )


def by_name(trainer: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a Trainer by their names, whichever were given by position.

    Args:
        trainer: the class that is being made; the first `__init__` among its bases that names its
            parameters tells their order.

    Raises:
        TypeError: more by position than there are, or one given twice.
    """
    if not args:
        return kwargs
    for cls in trainer.__mro__:
        init = vars(cls).get("__init__")
        names = list(inspect.signature(init).parameters) if init is not None else []
        if "model" in names:
            break
    given = dict(zip(names[1:], args, strict=False))
    twice = sorted(set(given) & set(kwargs))
    if twice or len(args) >= len(names):
        raise TypeError(
            f"{trainer.__name__} got {len(args)} arguments by position, of which "
            f"{', '.join(twice) or 'the last'} cannot be placed: pass them by name."
        )
    return {**given, **kwargs}


def choose_collator(
    packing: bool | int, kwargs: dict[str, Any], pad_to_multiple_of: int | None = None
) -> None:
    """Put a PackedCollator among the Trainer's arguments, in place, if packing is asked for.

    Args:
        packing: False, True (one row) or a row length.
        kwargs: the Trainer's arguments by name.
        pad_to_multiple_of: of the one row.

    Raises:
        OptionError: the user gave a collator that does not pack, or packs otherwise.
    """
    given = kwargs.get("data_collator")
    if packing is False:
        if pad_to_multiple_of is not None and isinstance(given, PackedCollator):
            raise OptionError(
                f"pad_to_multiple_of={pad_to_multiple_of!r}: data_collator={given!r} packs. Pass "
                f"it to that collator, or give rows a length (max_len)."
            )
        return
    max_len = None if packing is True else packing
    if given is None:
        pad_id = pad_token(kwargs.get("processing_class"), kwargs.get("model"))
        kwargs["data_collator"] = PackedCollator(max_len, pad_id, pad_to_multiple_of)
    elif (
        not isinstance(given, PackedCollator)
        or given.max_len != max_len
        or pad_to_multiple_of not in (None, given.pad_to_multiple_of)
    ):
        raise OptionError(
            f"packing={packing!r} makes the batches itself, but data_collator={given!r} was given "
            f"too. Leave one of them out."
        )


def pad_token(processing_class: Any, model: Any) -> int:
    """The id of the padding token: the tokenizer's, the model's, or 0."""
    found = getattr(processing_class, "pad_token_id", None)
    if found is None:
        found = getattr(getattr(model, "config", None), "pad_token_id", None)
    return found or 0


def pad_batches(trainer: Any, multiple: int) -> None:
    """Let the trainer's batches be padded to a multiple, whatever collator makes them."""
    config = getattr(trainer.model, "config", None)
    trainer.data_collator = PaddedCollator(
        trainer.data_collator,
        multiple,
        pad_token(trainer.processing_class, trainer.model),
        getattr(config, "max_position_embeddings", None),
    )


def check_arguments(args: Any) -> None:
    """Refuse TrainingArguments that ask for what this Trainer does not do.

    Raises:
        OptionError: fp16, an optimizer that is not AdamW.
        NotAvailableError: what this version does not build yet.
    """
    if args.fp16:
        raise OptionError(
            "fp16=True scales the loss and reads gradients back, which streaming gradients rule "
            "out. Use bf16=True, or neither for fp32."
        )
    name = _optim_name(args)
    if name not in ADAMW_NAMES:
        raise OptionError(
            f"optim={name!r}: TrainStreamTrainer trains with AdamW. "
            f"Use one of {', '.join(ADAMW_NAMES)}."
        )
    if args.deepspeed or args.fsdp:
        raise OptionError(
            "deepspeed and fsdp place the weights themselves and cannot be combined with "
            "TrainStreamTrainer. Drop them, or use transformers.Trainer."
        )
    not_built = {
        "torch_compile=True": args.torch_compile,
        "auto_find_batch_size=True": args.auto_find_batch_size,
        "bf16_full_eval=True": args.bf16_full_eval,
        "fp16_full_eval=True": args.fp16_full_eval,
    }
    for what, asked in not_built.items():
        if asked:
            raise NotAvailableError(
                f"{what} is not available in this version of TrainStreamTrainer. Leave it off."
            )


def moments_of(args: Any) -> dict[str, str]:
    """The option of wrap() that `optim` asks for: 8-bit moments for the 8-bit AdamWs."""
    moments = ADAMW_NAMES.get(_optim_name(args))
    return {} if moments is None else {"moment_dtype": moments}


def _optim_name(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))
