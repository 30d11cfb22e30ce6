"""Preference training (DPO): the Trainer, and the reference model's log-probabilities."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ts_hf.cli.pairs import batches, with_reference
from ts_hf.cli.rows import Rows
from ts_hf.cli.team import Team
from ts_hf.cli.trainers import FinetuneTrainer
from ts_hf.losses import causal_lm_logprobs, dpo_loss, reference_logprobs

_FILE = "reference.safetensors"


class PreferenceTrainer(FinetuneTrainer):
    """Direct preference optimization on batches of `PairCollator`.

    The loss is the mean over the pairs of a batch; the logs gain reward_accuracy, the share of
    pairs whose chosen answer has the higher reward, and reward_margin, by how much on average.

    Args:
        beta: pull towards the reference.
        label_smoothing: chance that a pair is labelled the wrong way round.
        chunk_size: positions whose logits exist at a time.
        *args, **kwargs: as for TrainStreamTrainer.
    """

    def __init__(
        self, *args: Any, beta: float, label_smoothing: float, chunk_size: int, **kwargs: Any
    ) -> None:
        self._beta, self._label_smoothing = beta, label_smoothing
        self._chunk_size = chunk_size
        # Of each batch: pairs whose chosen answer is ahead, margins and losses, and the pairs they
        # are the sums of. By model.training.
        self._sums: dict[bool, list[Tensor]] = {True: [], False: []}
        self._pairs: int | None = None  # of a batch, where not all of them count
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # a mean over pairs, not a sum over tokens

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The DPO loss of a batch.

        Raises:
            NonFiniteError: in training, when it is NaN or infinite.
        """
        logprobs = causal_lm_logprobs(
            model,
            inputs["input_ids"],
            inputs["labels"],
            inputs["attention_mask"],
            chunk_size=self._chunk_size,
        )
        chosen, rejected = logprobs.chunk(2)
        reference = inputs["reference"].to(logprobs.device).chunk(2)
        loss, good, bad = dpo_loss(
            chosen, rejected, *reference, beta=self._beta, label_smoothing=self._label_smoothing
        )
        margins = (good - bad).float()
        weight = float(len(margins)) if self._pairs is None else float(self._pairs)
        shares = torch.stack([(margins > 0).float().mean(), margins.mean(), loss.detach().float()])
        one = torch.ones(1, device=shares.device)
        self._sums[model.training].append(weight * torch.cat([shares, one]))
        if model.training:
            self._finite.watch(loss, self.state.global_step + 1)
        return (loss, {"margins": margins}) if return_outputs else loss

    def _averages_over_next_tokens(self) -> bool:
        return False

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """As TrainStreamTrainer's; of the last batch of several processes, only pairs of its own.

        accelerate fills that batch up with pairs of the beginning.
        """
        data, count = self.accelerator.gradient_state, len(inputs["input_ids"]) // 2
        if self.accelerator.num_processes > 1 and data.end_of_dataloader and data.remainder > 0:
            own = min(count, max(0, data.remainder - self.accelerator.process_index * count))
            self._pairs, kept = own, max(1, own)
            inputs = {
                name: torch.cat([value[:kept], value[count : count + kept]])
                for name, value in inputs.items()
            }
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._pairs = None

    def _take_means(self, training: bool) -> dict[str, float]:
        """Over the pairs of all processes since this was last called."""
        kept, self._sums[training] = self._sums[training], []
        if not kept:
            return {}
        total = self.accelerator.reduce(torch.stack(kept).sum(dim=0), reduction="sum")
        accuracy, margin, loss = (total[:3] / total[3]).tolist()
        return {"reward_accuracy": accuracy, "reward_margin": margin, "loss": loss}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TrainStreamTrainer's, with the rewards of the steps since the last log."""
        means = self._take_means(True) if "loss" in logs else {}
        super().log({**means, **logs}, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As TrainStreamTrainer's, with the rewards of the held-out pairs."""
        self._sums[False] = []
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        for name, value in self._take_means(False).items():
            output.metrics[f"{prefix}_{name}"] = value
        return output


def add_references(
    trainer: PreferenceTrainer,
    rows: dict[str, Rows],
    folder: Path,
    *,
    mark: str,
    batch_size: int,
    pad_id: int,
    console: Console,
    team: Team,
) -> dict[str, Rows]:
    """Rows with the reference model's log-probabilities, computed once and kept in `folder`.

    The reference is the model with its adapters off.

    Args:
        trainer: its model is wrapped if it is not yet.
        rows: by name.
        folder: of the run.
        mark: of the rows; what was kept for others is not used.
        batch_size: pairs at a time.
        pad_id: token that pads.
        console: told how long it took.
        team: the first process computes them, and the others get them.
    """
    trainer.create_optimizer()
    kept = team.lead(lambda: _computed(trainer, rows, folder, mark, batch_size, pad_id, console))
    return {name: with_reference(some, kept[name]) for name, some in rows.items()}


def _computed(
    trainer: PreferenceTrainer,
    rows: dict[str, Rows],
    folder: Path,
    mark: str,
    batch_size: int,
    pad_id: int,
    console: Console,
) -> dict[str, Tensor]:
    """By name, [N, 2] float32."""
    kept = _kept(folder / _FILE, mark)
    if kept is None or set(kept) != set(rows):
        started = time.perf_counter()
        kept = {}
        for name, some in rows.items():
            kept[name] = _reference(trainer, some, batch_size, pad_id)
        temporary = folder / f".{_FILE}.partial"
        save_file(kept, temporary, metadata={"data": mark})
        os.replace(temporary, folder / _FILE)
        count = sum(len(some) for some in rows.values())
        console.print(
            f"log-probabilities of {count} pairs under the model as it is: "
            f"{time.perf_counter() - started:.1f} s"
        )
    return kept


def _reference(trainer: PreferenceTrainer, rows: Rows, batch_size: int, pad_id: int) -> Tensor:
    """[N, 2] float32."""
    flat = reference_logprobs(
        trainer.model, batches(rows, batch_size, pad_id), chunk_size=trainer._chunk_size
    )
    found, begin = [], 0
    while begin < len(flat):  # of each batch the chosen ones, then the rejected ones
        count = min(batch_size, (len(flat) - begin) // 2)
        found.append(flat[begin : begin + 2 * count].reshape(2, count).T)
        begin += 2 * count
    return torch.cat(found).contiguous()


def _kept(file: Path, mark: str) -> dict[str, Tensor] | None:
    from safetensors import safe_open

    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            if (opened.metadata() or {}).get("data") != mark:
                return None
        return load_file(file)
    except SafetensorError:
        return None  # damaged: it is computed again
