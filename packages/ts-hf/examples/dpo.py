"""Direct preference optimization of a model that streams, as a plain loop.

    python dpo.py MODEL pairs.jsonl --output adapter --quantize nf4 --vram-limit 8GiB

`pairs.jsonl` has one object per line with `prompt`, `chosen` and `rejected`. The reference is the
model without its adapters (Rafailov et al., 2023); its log-probabilities are computed once, before
training, so that a step costs two sequences' forward and backward and no more.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

import ts_hf


def read_pairs(path: Path, tokenizer: Any, max_length: int) -> list[dict[str, Tensor]]:
    """Each pair's tokens, with the prompt's labels masked: chosen, rejected and their labels."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = tokenizer(row["prompt"])["input_ids"]
            pair: dict[str, Tensor] = {}
            for side in ("chosen", "rejected"):
                answer = tokenizer(row[side], add_special_tokens=False)["input_ids"]
                ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id][:max_length])
                labels = ids.clone()
                labels[: len(prompt)] = -100
                pair[side], pair[f"{side}_labels"] = ids, labels
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise SystemExit(f"{path}:{number}: no pair of texts ({error!r})") from error
        pairs.append(pair)
    if not pairs:
        raise SystemExit(f"{path} has no pairs")
    return pairs


def collate(pairs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All chosen sequences, then all rejected ones, as one batch [2B, T]."""
    ids = [pair[side] for side in ("chosen", "rejected") for pair in pairs]
    labels = [pair[f"{side}_labels"] for side in ("chosen", "rejected") for pair in pairs]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def batches(count: int, size: int, steps: int) -> Iterator[list[int]]:
    """Indices of `steps` batches, in a new order each time round."""
    order: list[int] = []
    for _ in range(steps):
        while len(order) < size:
            order += random.sample(range(count), count)
        yield [order.pop() for _ in range(size)]


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Train; returns each step's loss, accuracy and margin."""
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pairs = read_pairs(options.pairs, tokenizer, options.max_length)

    dtype = getattr(torch, options.dtype)
    model = ts_hf.load_model(options.model, quantize=options.quantize, dtype=dtype)
    lora = LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model, optimizer = ts_hf.wrap_hf(
        model,
        lr=options.lr,
        max_grad_norm=1.0,
        device=options.device,
        vram_limit=options.vram_limit,
        param_offload=options.param_offload,
    )
    size = options.batch_size
    in_order = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    reference = ts_hf.reference_logprobs(model, map(collate, in_order))
    # [chosen of a batch, rejected of it], batch after batch -> [pair, side]
    sides = [part.reshape(2, -1).T for part in reference.split([2 * len(b) for b in in_order])]
    references = torch.cat(sides)

    device = model.get_input_embeddings().weight.device
    history: list[dict[str, float]] = []
    model.train()
    for step, picked in enumerate(batches(len(pairs), size, options.steps), 1):
        batch = {k: v.to(device) for k, v in collate([pairs[i] for i in picked]).items()}
        policy_chosen, policy_rejected = ts_hf.causal_lm_logprobs(model, **batch).split(size)
        reference_chosen, reference_rejected = references[picked].T.to(device)
        loss, chosen, rejected = ts_hf.dpo_loss(
            policy_chosen,
            policy_rejected,
            reference_chosen,
            reference_rejected,
            beta=options.beta,
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        margins = chosen - rejected
        history.append(
            {
                "loss": loss.item(),
                "accuracy": (margins > 0).float().mean().item(),
                "margin": margins.mean().item(),
            }
        )
        if step % options.log_every == 0:
            print(step, *(f"{name} {value:.4f}" for name, value in history[-1].items()))
    ts_hf.save_adapter(model, options.output)
    return history


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    """The command line."""
    parser = argparse.ArgumentParser(description="DPO with LoRA on a model that streams.")
    parser.add_argument("model", help="a folder or a hub id")
    parser.add_argument("pairs", type=Path, help="JSON lines with prompt, chosen and rejected")
    parser.add_argument("--output", type=Path, default=Path("adapter"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--vram-limit", help="plan for and keep to this much, such as 12GiB")
    parser.add_argument("--param-offload", type=float, help="share of layers that stream")
    parser.add_argument("--device", help="cuda, or cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.param_offload is None:
        options.param_offload = "auto"
    return train(options)


if __name__ == "__main__":
    main()
