"""A run's documents as the rows, batches and steps that its settings ask for."""

from __future__ import annotations

import math
import sys
from typing import Any

from ts_core.errors import DataError, OptionError
from ts_hf.cli.packed import BinCollator, pack_rows
from ts_hf.cli.pairs import PairCollator, prepare_pairs
from ts_hf.cli.problems import Problems
from ts_hf.cli.rows import PadCollator, Rows, prepare_rows
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.sources import Document


def make_rows(
    config: FinetuneConfig,
    documents: tuple[list[Document], list[Document]],
    tokenizer: Any,
    processes: int = 1,
) -> tuple[Rows, Rows]:
    """(rows to train on, held-out rows), for all `processes` together.

    Raises:
        DataError: too little data; records that the chat template refuses, by file and line.
        OptionError: packing of pairs.
    """
    length, problems = config.seq_length, Problems()
    wanted = config.steps * rows_per_step(config, processes)
    if config.epochs is not None:
        wanted = sys.maxsize
    if config.method == "dpo":
        if config.packing:
            raise OptionError("packing=true: pairs (method=dpo) are not packed. Leave it out.")
        pairs = (
            prepare_pairs(
                documents[0], tokenizer, seq_length=length, wanted=wanted, problems=problems
            ),
            prepare_pairs(
                documents[1],
                tokenizer,
                seq_length=length,
                wanted=config.eval_rows,
                what="held out",
                problems=problems,
            ),
        )
        problems.raise_any()
        return pairs
    train = prepare_rows(
        documents[0],
        tokenizer,
        seq_length=length,
        wanted=wanted,
        share=4 * length,
        assistant_only=config.assistant_only,
        full_rows=config.packing,
        problems=problems,
    )
    held_out = prepare_rows(
        documents[1],
        tokenizer,
        seq_length=length,
        wanted=config.eval_rows,
        share=length,
        assistant_only=config.assistant_only,
        what="held out",
        problems=problems,
    )
    problems.raise_any()
    if config.packing:
        return pack_rows(train, length), pack_rows(held_out, length)
    return train, held_out


def told_rows(config: FinetuneConfig, train: Rows, held_out: Rows, processes: int = 1) -> list[str]:
    """How much of the data a run reads, and what was noticed about it, in words."""
    what = "pairs" if config.method == "dpo" else "rows"
    told = [
        f"{train.counted()} {what} to train on ({train.tokens:,} tokens), {held_out.counted()} "
        f"held out ({held_out.tokens:,} tokens)"
    ]
    if train.of is not None:
        told.append(
            f"only as much is read as {config.steps} steps of {step_in_words(config, processes)} "
            "need; epochs=1 reads all of it"
        )
    return [*told, *train.notes]


def check_lengths(config: FinetuneConfig, model_config: Any) -> None:
    """Refuse rows longer than the model's positions.

    Raises:
        OptionError: seq_length is more than those.
    """
    most = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and config.seq_length > most:
        raise OptionError(
            f"seq_length={config.seq_length} is more than the model's {most} positions. Use at "
            f"most that."
        )


def check_tokens(train: Rows, held_out: Rows, model_config: Any) -> None:
    """Refuse a tokenizer that is not the model's.

    Raises:
        DataError: a token is beyond the vocabulary.
    """
    highest = max(train.highest_token(), held_out.highest_token())
    known = model_config.get_text_config(decoder=True).vocab_size
    if highest >= known:
        raise DataError(
            f"the tokenizer gives token {highest}, but the model knows {known} tokens. Tokenizer "
            f"and model do not belong together."
        )


def make_collator(config: FinetuneConfig, pad_id: int) -> Any:
    """What makes batches of the rows."""
    if config.method == "dpo":
        return PairCollator(pad_id)
    return BinCollator(config.seq_length, pad_id) if config.packing else PadCollator(pad_id)


def planned_steps(config: FinetuneConfig, rows: int, processes: int = 1) -> int:
    """Optimizer steps of a run on so many rows."""
    if config.epochs is None:
        return config.steps
    return max(1, math.ceil(config.epochs * rows / rows_per_step(config, processes) - 1e-9))


def rows_per_step(config: FinetuneConfig, processes: int = 1) -> int:
    """Rows of one optimizer step, of all processes."""
    return config.batch_size * config.accumulation * processes


def step_in_words(config: FinetuneConfig, processes: int = 1) -> str:
    """What one optimizer step takes: "1 row", "8 pairs"."""
    count = rows_per_step(config, processes)
    noun = "pair" if config.method == "dpo" else "row"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
