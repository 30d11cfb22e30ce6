"""What is measured: model shapes and training set-ups, by name.

Weights are random and tokens are random: step time and memory depend on shapes alone. Sizes in
bytes are decimal (24 GB = 24e9 bytes).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ts_core.errors import OptionError

GB = 10**9


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Qwen2-style decoder (RMSNorm, rotary, grouped-query attention, SwiGLU)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    rms_norm_eps: float = 1e-6

    @property
    def block_parameters(self) -> int:
        """Parameters of the decoder layers' seven matrices (no norms, no biases)."""
        head = self.hidden_size // self.num_heads
        kv = self.num_kv_heads * head
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def config(self) -> dict[str, Any]:
        """The fields of a transformers Qwen2Config."""
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": 32768,
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


QWEN_0_5B = ModelShape(896, 24, 14, 2, 4864, 151936, tied=True)
QWEN_1_5B = ModelShape(1536, 28, 12, 2, 8960, 151936, tied=True)
QWEN_3B = ModelShape(2048, 36, 16, 2, 11008, 151936, tied=True)
QWEN_14B = ModelShape(5120, 48, 40, 8, 13824, 152064, tied=False, rms_norm_eps=1e-5)
TINY = ModelShape(64, 3, 4, 2, 128, 256, tied=True)

MODES = ("lora", "full")
BASES = ("nf4", "int8", "fp8", "fp8_row", "bf16", "fp32")


@dataclass(frozen=True)
class Scenario:
    """One training set-up.

    Attributes:
        name: how it is asked for.
        shape: the model.
        mode: "lora" (adapters on all seven projections) or "full" (every parameter).
        base: how the weights are kept: a quantized format, "bf16" or "fp32".
        batch, tokens: rows and tokens per row of one step.
        limit_bytes: device memory the process may use; None for no cap. Caps only a CUDA device.
        lora_rank: rank of the adapters; alpha is twice that.
        needs_gpu: too large to be of use on a CPU.
        max_grad_norm: clip the global gradient norm to this; None does not clip.
        documents: equal documents that each row is packed of; attention stays within each.
        note: one line for people.
    """

    name: str
    shape: ModelShape
    mode: str
    base: str
    batch: int
    tokens: int
    limit_bytes: int | None
    lora_rank: int = 16
    needs_gpu: bool = True
    note: str = ""
    max_grad_norm: float | None = None
    documents: int = 1

    def __post_init__(self) -> None:
        _accept("mode", self.mode, MODES)
        _accept("base", self.base, BASES)
        for field in ("batch", "tokens", "lora_rank", "documents"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{field}: {value!r} is not accepted; use an int >= 1.")
        if self.tokens < 2:
            raise OptionError("tokens: 1 is not accepted; predicting a next token takes two.")
        if self.tokens % self.documents or self.tokens < 2 * self.documents:
            raise OptionError(
                f"documents: {self.documents} is not accepted; rows of {self.tokens} tokens do not "
                f"divide into so many documents of two tokens or more."
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise OptionError(f"max_grad_norm: {self.max_grad_norm} is not accepted; use > 0.")
        if self.limit_bytes is not None and self.limit_bytes <= 0:
            raise OptionError(f"limit_bytes: {self.limit_bytes} is not accepted; use None or > 0.")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a record or for another process."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Scenario:
        """The inverse of `to_dict`."""
        return Scenario(**{**data, "shape": ModelShape(**data["shape"])})


def _accept(option: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise OptionError(f"{option}: {value!r} is not accepted; use one of {', '.join(accepted)}.")


def _lora_14b(base: str, batch: int, tokens: int, limit_gb: float, documents: int = 1) -> Scenario:
    packed = "" if documents == 1 else f", each packed of {documents} documents"
    return Scenario(
        name=f"lora-14b-{base}-{'packed-' if packed else ''}{batch}x{tokens}-{limit_gb:g}g",
        shape=QWEN_14B,
        mode="lora",
        base=base,
        batch=batch,
        tokens=tokens,
        limit_bytes=int(limit_gb * GB),
        note=f"LoRA r=16 on a {base} base of Qwen2.5-14B's shape, {batch} x {tokens}{packed}, "
        f"{limit_gb:g} GB cap",
        documents=documents,
    )


def _full(
    size: str,
    shape: ModelShape,
    batch: int,
    tokens: int,
    limit_gb: int | None,
    clip: float | None = None,
) -> Scenario:
    clipping = "" if clip is None else f", gradient norm clipped to {clip}"
    cap = "nocap" if limit_gb is None else f"{limit_gb}g"
    return Scenario(
        name=f"full-{size}-{batch}x{tokens}-{cap}" + ("" if clip is None else "-clip"),
        shape=shape,
        mode="full",
        base="fp32",
        batch=batch,
        tokens=tokens,
        limit_bytes=None if limit_gb is None else limit_gb * GB,
        note=f"full fine-tune of Qwen2.5-{size.upper()}'s shape in fp32 (bf16 autocast), "
        f"{batch} x {tokens}, {'no' if limit_gb is None else f'{limit_gb} GB'} cap{clipping}",
        max_grad_norm=clip,
    )


_ALL = [
    Scenario("tiny", TINY, "lora", "nf4", 1, 32, None, 4, False, "LoRA on a toy, for tests"),
    Scenario("tiny-full", TINY, "full", "fp32", 2, 16, None, 4, False, "full, on a toy"),
    _lora_14b("nf4", 1, 512, 24),
    _lora_14b("nf4", 1, 512, 12.5),
    _lora_14b("nf4", 1, 512, 12),
    _lora_14b("nf4", 1, 2048, 24),
    _lora_14b("nf4", 1, 2048, 12),
    _lora_14b("nf4", 2, 2048, 24),
    _lora_14b("nf4", 2, 2048, 24, documents=4),
    _lora_14b("nf4", 2, 2048, 12, documents=4),
    _lora_14b("fp8", 1, 2048, 24),
    _lora_14b("fp8_row", 1, 2048, 24),
    *(_lora_14b("bf16", 1, 512, limit_gb) for limit_gb in (24, 16, 12, 9)),
    _full("0.5b", QWEN_0_5B, 4, 512, None),
    Scenario(
        "lora-0.5b-bf16-4x512-nocap",
        QWEN_0_5B,
        "lora",
        "bf16",
        4,
        512,
        None,
        note="LoRA r=16 on a bf16 base of Qwen2.5-0.5B's shape, 4 x 512, no cap",
    ),
    _full("1.5b", QWEN_1_5B, 4, 512, 24),
    _full("1.5b", QWEN_1_5B, 4, 512, 24, clip=1.0),
    _full("1.5b", QWEN_1_5B, 4, 512, 8),
    _full("1.5b", QWEN_1_5B, 4, 512, 8, clip=1.0),
    _full("1.5b", QWEN_1_5B, 4, 512, None),
    _full("3b", QWEN_3B, 8, 1024, 24),
    _full("3b", QWEN_3B, 8, 1024, None),
]
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}


def get_scenario(name: str) -> Scenario:
    """The scenario called `name`.

    Raises:
        OptionError: there is none; the message lists all names.
    """
    if name not in SCENARIOS:
        raise OptionError(f"scenario: {name!r} is not accepted; use one of {', '.join(SCENARIOS)}.")
    return SCENARIOS[name]


def toy_of(scenario: Scenario) -> Scenario:
    """The scenario on a toy model, without its cap: for trying out a list of runs on a CPU."""
    return dataclasses.replace(
        scenario,
        name=f"toy {scenario.name}",
        shape=TINY,
        tokens=8 * scenario.documents,
        limit_bytes=None,
        lora_rank=4,
        needs_gpu=False,
    )
