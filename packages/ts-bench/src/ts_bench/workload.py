"""The parts that engines share: a model with random weights, adapters, tokens, a plain step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ts_bench.scenarios import Scenario

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-4
WEIGHT_STD = 0.02
TOKEN_SEED = 1234
# Batches drawn ahead, so that drawing is not timed; steps go through them in turn.
BATCHES = 8

MakeLinear = Callable[[nn.Linear], nn.Module]
Inputs = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Inputs], Tensor]


def config_of(scenario: Scenario) -> Any:
    """The transformers config of the scenario's model."""
    from transformers import Qwen2Config

    return Qwen2Config(**scenario.shape.config())


def build_model(
    scenario: Scenario,
    device: torch.device,
    dtype: torch.dtype,
    make_linear: MakeLinear | None = None,
) -> nn.Module:
    """The scenario's model with random weights, built on `device` one layer at a time.

    Args:
        scenario: gives the shape.
        device: where the weights end; nothing of size is ever on another device.
        dtype: of every weight.
        make_linear: turns each `nn.Linear` of the decoder layers, given without values (on the
            meta device), into the module that takes its place. The device never holds more than
            one such weight in full precision.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(scenario)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    core: Any = model.get_submodule("model")
    if make_linear is not None:
        for parent in list(core.layers.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, make_linear(child))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                value = random_parameter(parameter.shape, name, device, dtype, is_norm(module))
                module._parameters[name] = nn.Parameter(value)
    # Its one buffer is computed from the config, so build it anew.
    core.rotary_emb = type(core.rotary_emb)(config=config).to(device)
    if scenario.shape.tied:
        model.get_submodule("lm_head")._parameters["weight"] = core.embed_tokens.weight
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise RuntimeError(f"no values for {left}: this transformers builds the model differently")
    return model.train()


def is_norm(module: nn.Module) -> bool:
    """Whether a module scales by its weight, so that ones are its neutral start."""
    return "norm" in type(module).__name__.lower()


def random_parameter(
    shape: Sequence[int], name: str, device: torch.device, dtype: torch.dtype, ones: bool = False
) -> Tensor:
    """Values for one parameter: ones for norms, zeros for biases, else normal (std 0.02)."""
    if ones:
        return torch.ones(shape, device=device, dtype=dtype)
    if name == "bias":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, WEIGHT_STD)


def add_adapters(model: nn.Module, scenario: Scenario) -> nn.Module:
    """PEFT LoRA on all seven projections, no dropout; adapter weights in fp32."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=scenario.lora_rank,
        lora_alpha=2 * scenario.lora_rank,
        lora_dropout=0.0,
        target_modules=PROJECTIONS,
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def token_batches(scenario: Scenario, device: torch.device) -> Iterator[Tensor]:
    """Random token ids [batch, tokens] on `device`, the same for every engine, without end."""
    generator = torch.Generator().manual_seed(TOKEN_SEED)
    shape = (scenario.batch, scenario.tokens)
    batches = [
        torch.randint(scenario.shape.vocab_size, shape, generator=generator).to(device)
        for _ in range(BATCHES)
    ]
    while True:
        yield from batches


def input_batches(scenario: Scenario, device: torch.device) -> Iterator[Inputs]:
    """What the model is called with, step by step: `input_ids` and `labels`, without end.

    Rows that are packed of documents come with `position_ids` that start again at each, which is
    how transformers knows where one ends, and nothing predicts the first token of a document.
    """
    length = scenario.tokens // scenario.documents
    batches = token_batches(scenario, device)
    made = []
    for _ in range(BATCHES):
        ids = next(batches)
        inputs = {"input_ids": ids, "labels": ids}
        if scenario.documents > 1:
            positions = torch.arange(length, device=device).repeat(scenario.documents)
            inputs["position_ids"] = positions.expand(scenario.batch, -1).contiguous()
            inputs["labels"] = ids.clone()
            inputs["labels"][:, ::length] = -100
        made.append(inputs)
    return itertools.cycle(made)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's own loss of predicting each next token of a batch."""
    loss: Tensor = model(**inputs).loss
    return loss


class TrainStep:
    """A plain training step: bf16 autocast, a loss, its backward, clipping if asked, AdamW.

    Args:
        model: the model that is trained.
        optimizer: over the trained parameters.
        scenario: gives the batches.
        device: where model inputs go.
        details: what `details()` returns, or a function for it.
        loss: of a model on a batch, computed under autocast.
        clips: whether the optimizer clips by itself; else torch's function does, where the
            scenario asks for it.
        transferred: tells bytes copied between host and device so far, by direction ("h2d",
            "d2h"); None where nothing counts them.
        settled: asked once after each step of the warm-up, whether the engine has stopped changing
            how it runs; None for one that never changes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scenario: Scenario,
        device: torch.device,
        details: dict[str, Any] | Callable[[], dict[str, Any]],
        loss: LossFunction | None = None,
        clips: bool = False,
        transferred: Callable[[], dict[str, int]] | None = None,
        settled: Callable[[], bool] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.transferred = transferred
        self.settled = settled
        self._batches = input_batches(scenario, device)
        self._details = details
        self._loss = loss or own_loss
        self._max_grad_norm = None if clips else scenario.max_grad_norm

    def __call__(self) -> Tensor:
        inputs = next(self._batches)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(self.model, inputs)
        loss.backward()
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trainable(self.model), self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def use(self, scenario: Scenario) -> None:
        """Go on with batches of another scenario, whose model is the same."""
        self._batches = input_batches(scenario, self.device)

    def details(self) -> dict[str, Any]:
        """What a reader of the record should know about the set-up."""
        return dict(self._details() if callable(self._details) else self._details)


def adamw(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """torch's AdamW, fused: the fastest that torch has on either device."""
    return torch.optim.AdamW(trainable(model), lr=LEARNING_RATE, fused=True)


def recompute_activations(model: nn.Module) -> None:
    """Turn on transformers' gradient checkpointing, in the form it recommends."""
    enable: Any = model.get_submodule("").gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def expected_first_loss(scenario: Scenario) -> float:
    """Cross-entropy of a model that knows nothing, in nats: ln(vocabulary)."""
    return math.log(scenario.shape.vocab_size)
