"""Where FP8 loses a real model's quality: weights, activations, kinds of layers. On a CPU.

    python packages/ts-quant/benchmarks/fp8_losses.py --gguf FILE [--rows 16] [--only TEXT]

SmolLM2-135M-Instruct in bf16 on held-out text of Python's standard library (as `ts-bench quality`,
rows of 256 tokens). Every linear layer of the blocks is computed as each line says: weights are
fp8's (blocks of 32) or exact, activations bf16 or e4m3 with one fp32 scale per token, unless the
line says otherwise. The products themselves are exact to fp32, rounded once to bf16.

"KL" is the mean Kullback-Leibler divergence of the next-token distributions from the bf16 model's,
in hundredths of a nat: what perplexity is expected to lose in percent, with far less noise than
perplexity has on so little text (some tenths of a percent). Two ways to round bf16 products differ
by the KL of the line "products in fp32", which is to be taken off the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad

import ts_quant
from ts_hf import demo_model_folder, find_decoder_layers, load_model
from ts_hf.cli.rows import prepare_rows, split_sources
from ts_quant.matmul.rows import fp8_rows

LENGTH = 256
LARGEST = 448.0
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Layers = dict[tuple[int, str], nn.Linear]
Change = Callable[[Tensor], Tensor]


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def by_row(x: Tensor) -> Tensor:
    """fp32 values of the activation as FP8 products see it."""
    codes, scale = fp8_rows(x.reshape(-1, x.shape[-1]))
    return (codes.view(torch.float8_e4m3fn).float() * scale).view(x.shape)


def by_row_power_of_two(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).div(LARGEST).clamp(min=2.0**-100)
    scale = scale.log2().ceil().exp2()
    return e4m3(x / scale) * scale


def by_128_columns(x: Tensor) -> Tensor:
    groups = pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).div(LARGEST).clamp(min=2.0**-100)
    return (e4m3(groups / scale) * scale).flatten(-2)[..., : x.shape[-1]]


def four_bits(x: Tensor) -> Tensor:
    """e4m3's precision with any exponent: no largest value, no denormals."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp(torch.round(mantissa * 16) / 16, exponent)


def loudest_exact(count: int) -> Change:
    """By row, but the largest columns of each call are left as they are."""

    def change(x: Tensor) -> Tensor:
        channels = x.reshape(-1, x.shape[-1]).float().square().sum(0).topk(count).indices
        seen = by_row(x)
        seen[..., channels] = x[..., channels].float()
        return seen

    return change


def stored(layout: str | None = None) -> Change:
    return lambda w: ts_quant.quantize(w, "fp8", layout=layout).dequantize(torch.float32)


class Model:
    """The model, its held-out rows, and the bf16 model's distributions on them."""

    def __init__(self, gguf: Path | None, rows: int) -> None:
        from transformers import AutoTokenizer

        folder = str(demo_model_folder(gguf))
        documents = split_sources(["stdlib"], None, 0.1)
        sizes = {"seq_length": LENGTH, "share": LENGTH}
        tokenizer = AutoTokenizer.from_pretrained(folder)
        held = prepare_rows(documents[1], tokenizer, wanted=rows, what="held out", **sizes)
        self.held = torch.stack([item["input_ids"] for item in held.items])
        train = prepare_rows(documents[0], tokenizer, wanted=8, **sizes)
        self.train = torch.stack([item["input_ids"] for item in train.items])
        self.model: Any = load_model(folder, quantize=None, dtype=torch.bfloat16).eval()
        self.layers: Layers = {
            (index, name.split(".")[-1]): module
            for index, block in enumerate(find_decoder_layers(self.model))
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        }
        self.weights = {key: layer.weight.detach().clone() for key, layer in self.layers.items()}
        self._exact: list[Tensor] = []

    @torch.no_grad()
    def moments(self, tokens: Tensor) -> dict[tuple[int, str], Tensor]:
        """E[x^2] of every layer's input channels."""
        found: dict[tuple[int, str], Tensor] = {}
        for key, layer in self.layers.items():

            def forward(x: Tensor, key: tuple[int, str] = key) -> Tensor:
                found[key] = found.get(key, 0) + x.float().square().mean((0, 1))
                return linear(x, self.weights[key])

            layer.forward = forward  # type: ignore[method-assign]
        for part in tokens.split(4):
            self.model(input_ids=part)
        return found

    def use(
        self, weight: Change | None, activation: Change | None, only: str | None = None
    ) -> None:
        """Compute every layer (of one kind) with changed weights and activations."""
        for key, layer in self.layers.items():
            w, change = self.weights[key].float(), activation
            if only is not None and key[1] != only:
                change = None
            elif weight is not None:
                w = weight(w.bfloat16()).float()

            def forward(x: Tensor, w: Tensor = w, change: Change | None = change) -> Tensor:
                return linear(x.float() if change is None else change(x), w).bfloat16()

            layer.forward = forward  # type: ignore[method-assign]

    def use_outliers(self, share: float, moments: dict[tuple[int, str], Tensor]) -> None:
        """As stored with that share of the input channels in bf16."""
        for key, layer in self.layers.items():
            w = self.weights[key]
            count = math.ceil(share * w.shape[1])
            channels = ts_quant.worst_channels(w, ts_quant.quantize(w, "fp8"), count, moments[key])
            q = ts_quant.quantize(w, "fp8", outlier_channels=channels)
            ts_quant.configure_matmul(q, tensor_cores=True)
            layer.forward = lambda x, q=q: linear(x, q)  # type: ignore[method-assign]

    @torch.no_grad()
    def measure(self, keep: bool = False) -> tuple[float, float]:
        """Perplexity, and KL from what was measured with `keep`."""
        loss = divergence = 0.0
        for index, part in enumerate(self.held.split(4)):
            logits = self.model(input_ids=part, use_cache=False).logits[:, :-1].float()
            found = logits.log_softmax(-1).flatten(0, 1)
            loss += float(cross_entropy(found, part[:, 1:].flatten(), reduction="sum"))
            if keep:
                self._exact.append(found.half())
            exact = self._exact[index].float()
            divergence += float((exact.exp() * (exact - found)).sum())
        tokens = self.held.numel() - self.held.shape[0]
        return math.exp(loss / tokens), divergence / tokens


def cases(model: Model) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is measured: a name, and what sets the model up for it."""
    blocks = stored()
    plain: list[tuple[str, Change | None, Change | None]] = [
        ("products in fp32", None, None),
        ("weights fp8, activations bf16", blocks, None),
        ("weights fp8 with fp32 scales per row, activations bf16", stored("row"), None),
        ("weights fp8, activations e4m3 (FP8 products)", blocks, by_row),
        ("weights exact, activations e4m3", None, by_row),
        ("weights exact, activations e4m3, scales powers of two", None, by_row_power_of_two),
        ("weights exact, activations e4m3, scales per 128 columns", None, by_128_columns),
        ("weights exact, activations of 4 bits with any exponent", None, four_bits),
        ("weights exact, activations e4m3 but 16 columns", None, loudest_exact(16)),
    ]
    for name, weight, activation in plain:
        yield name, lambda w=weight, a=activation: model.use(w, a)  # type: ignore[misc]
    for kind in KINDS:
        yield f"only {kind}, activations e4m3", lambda k=kind: model.use(None, by_row, k)  # type: ignore[misc]
        yield f"only {kind}, weights fp8", lambda k=kind: model.use(blocks, None, k)  # type: ignore[misc]
    random = torch.randint(0, 49152, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    for source, tokens in (("training text", model.train), ("random tokens", random)):
        for share in (64, 32, 16):
            name = f"FP8 products, 1/{share} of the channels in bf16, chosen with {source}"
            yield (
                name,
                lambda t=tokens, s=share: model.use_outliers(1 / s, model.moments(t)),  # type: ignore[misc]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="the demo model's file, if it is not installed")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--only", default="", help="only lines that contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(arguments.gguf, arguments.rows)
    first, _ = model.measure(keep=True)
    print(f"{'bf16':<75}{first:9.4f}", flush=True)
    with ts_quant.emulate_tensor_cores():
        for name, prepare in cases(model):
            if arguments.only in name:
                prepare()
                perplexity, divergence = model.measure()
                change = f"{perplexity / first - 1:+.2%}"
                print(
                    f"{name:<75}{perplexity:9.4f}{change:>8}  KL {100 * divergence:.2f}", flush=True
                )


if __name__ == "__main__":
    main()
