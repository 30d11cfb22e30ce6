"""Store a model's matrices one at a time, better where it pays.

    storer = Storer("nf4", keep_precise=0.05, error_rank=16)
    for name, weight in weights: storer.measure(weight, name)
    better = storer.improved()
    for name, weight in weights: stored = storer.store(weight, name)

The first two lines are needed only if `storer.needs_measuring`. Where weights can be read again
but not kept (a checkpoint), call `store` for all, then again for those that `improved()` names:
`store` measures as it goes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ts_quant.choose import choose
from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, codec_named
from ts_quant.errors import OptionError
from ts_quant.forms import (
    JOINT_RANKS,
    Encoder,
    Form,
    plain_and_precise,
    ranks_and_outliers,
)
from ts_quant.loftq import fit_error, loftq
from ts_quant.lora_start import ErrorStart
from ts_quant.measure import squared_error
from ts_quant.outliers import worst_channels
from ts_quant.storage_report import Considered, MatrixReport, StorageReport
from ts_quant.tensor import QuantTensor

MORE_PRECISE = {"nf4": "int8", "nvfp4": "fp8"}
"""The format one step more precise, for `keep_precise`."""

AUTO_SHARE = 0.05


@dataclass(frozen=True)
class Stored:
    """One stored matrix.

    Attributes:
        weight: the QuantTensor.
        start: factors of what it lost, or None.
    """

    weight: QuantTensor
    start: ErrorStart | None


class Storer:
    """Encodes matrices and decides which deserve more bytes.

    Args:
        codec: the format.
        block_size: values per scale.
        double_quant: one-byte scales.
        keep_precise: share of extra bytes (0 to 0.5; "auto" and True mean 0.05) that may go to
            storing the matrices that lose most one step more precise.
        error_rank: rank of the fit of what was lost, for adapters to start at; 0 for none.
        error_iters: LoftQ alternations.
        outlier_channels: share of each matrix's input channels (0 to 0.1) kept in bf16, those that
            lose most. Not with joint_budget, which chooses them itself.
        joint_budget: share of extra bytes that keep-precise, outlier channels (input channels kept
            in bf16) and the rank of the start of every matrix compete for; replaces keep_precise,
            and error_rank becomes the largest rank (0: 64). Use `report.rank_pattern()` for the
            adapters.
        second_moments: E[x^2] per input channel by layer name (`error_stats`); weighs errors.

    Raises:
        OptionError: a value that is not accepted, keep_precise for a format that has no more
            precise one, or (later) a weight that the statistics do not know.
    """

    def __init__(
        self,
        codec: str,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        keep_precise: float | str | bool | None = 0,
        error_rank: int = 0,
        error_iters: int = 1,
        outlier_channels: float = 0,
        joint_budget: float | None = None,
        second_moments: Mapping[str, Tensor] | None = None,
    ) -> None:
        codec_named(codec).bytes_per_weight(
            block_size, double_quant
        )  # refuses what it does not take
        self.codec = codec
        self.block_size = block_size
        self.double_quant = double_quant
        self.share = _share(keep_precise)
        self.joint = None if joint_budget is None else _share(joint_budget)
        self.outlier_share = _outlier_share(outlier_channels)
        if self.outlier_share and self.joint is not None:
            raise OptionError(
                f"outlier_channels={outlier_channels!r} is not accepted with joint_budget="
                f"{joint_budget!r}, which chooses them itself. Leave one of the two out."
            )
        _check_int("error_rank", error_rank, 0)
        _check_int("error_iters", error_iters, 1)
        self.rank = error_rank
        self.iters = error_iters
        if second_moments is not None and not isinstance(second_moments, Mapping):
            raise OptionError(
                f"second_moments is a {type(second_moments).__name__}; expected what error_stats "
                f"returns, a tensor per layer name"
            )
        self.moments = dict(second_moments or {})
        self.report = StorageReport(codec_named(codec).stored_as)
        self._options: dict[str, list[Form]] = {}
        self._bytes: dict[str, int] = {}
        self._unadapted: set[str] = set()
        self._chosen: dict[str, Form] | None = None
        self._encode = Encoder(codec, block_size, double_quant)
        self._precise = MORE_PRECISE.get(codec)
        if self.needs_measuring and self._precise is None and self.joint is None:
            raise OptionError(
                f"keep_precise={keep_precise!r} is not accepted with {codec!r}, which has no "
                f"format one step more precise (it is for {' and '.join(MORE_PRECISE)}). Use 0."
            )

    @property
    def needs_measuring(self) -> bool:
        """Whether every matrix must be measured before the final form of any is known."""
        return self.share > 0 or bool(self.joint)

    def measure(self, weight: Tensor, name: str, *, adapted: bool | None = None) -> None:
        """Note what `weight` would lose in each form it may be stored in; keeps nothing of it.

        Args:
            weight: floating tensor.
            name: its name.
            adapted: as in `store`; False leaves starts for adapters out of the choice.
        """
        if adapted is False:
            self._unadapted.add(name)
        self._measure(weight, self._encode(weight, name), name)

    def improved(self) -> list[str]:
        """Names of measured matrices that are to be stored in another than the first form."""
        if not self.needs_measuring:
            return []
        chosen = self._decide()
        for name, row in self.report.rows.items():
            self.report.rows[name] = replace(row, reason=self._reason(name, chosen[name]))
        return [name for name, choice in chosen.items() if choice is not self._options[name][0]]

    def store(self, weight: Tensor, name: str, *, adapted: bool | None = None) -> Stored:
        """Encode a matrix in the form chosen for it.

        Args:
            weight: floating tensor, on any device; factors are fitted to matrices only.
            name: its name ("model.layers.0.mlp.up_proj.weight").
            adapted: whether an adapter of its layer can start at the factors; without one there
                are none, and the weight is stored for itself. None when that is not known yet.

        Raises:
            NonFiniteWeightError: it holds NaN or infinity.
        """
        choice = self._chosen.get(name) if self._chosen is not None else None
        if choice is None and self.needs_measuring:
            encoded = self._encode(weight, name)
            if name not in self._options:
                self._measure(weight, encoded, name)
            self._add_row(weight, name, encoded, None, "stored first, then compared")
            return Stored(encoded, None)
        codec, rank, outliers = self.codec, self.rank if self.joint is None else 0, 0
        if choice is not None and self.joint is not None:
            codec, rank, outliers = choice.codec, choice.rank, choice.outliers
        elif choice is not None and choice.codec != codec:
            codec, rank = choice.codec, 0
        if self.outlier_share and codec == self.codec and weight.dim() == 2:
            outliers = math.ceil(self.outlier_share * weight.shape[1])
        fitted = rank > 0 and weight.dim() == 2 and codec == self.codec and adapted is not False
        start = with_start = None
        if outliers:
            encoded = self._with_outliers(weight, name, outliers)
        elif not fitted:
            encoded = self._encode(weight, name, codec)
        if fitted and outliers:
            start, with_start = self._start_beside(weight, encoded, name, rank)
        elif fitted:
            encoded, start, with_start = self._loftq(weight, name, rank)
        reason = self._reason(name, choice)
        if rank and adapted is False:
            reason = "its layer has no adapter that could start at factors"
        self._add_row(weight, name, encoded, start, reason, with_start)
        return Stored(encoded, start)

    # -- inside --------------------------------------------------------------------------------

    def _moments(self, name: str) -> Tensor | None:
        if not self.moments:
            return None
        layer = name.removesuffix(".weight")
        if layer not in self.moments:
            raise OptionError(
                f"the activation statistics hold nothing for {layer!r} (they hold "
                f"{len(self.moments)} layers, the first {next(iter(self.moments))!r}). Collect "
                f"them from the same model, adapters included, with the same blocks"
            )
        return self.moments[layer]

    def _measure(self, weight: Tensor, encoded: QuantTensor, name: str) -> None:
        moments = self._moments(name)
        forms = plain_and_precise(self._encode, weight, encoded, moments, self._precise)
        if self.joint and weight.dim() == 2:
            most_rank = 0 if name in self._unadapted else self.rank or JOINT_RANKS[-1]
            forms += ranks_and_outliers(self._encode, weight, encoded, moments, most_rank)
        self._options[name] = forms
        self._bytes[name] = encoded.nbytes
        self._chosen = None

    def _with_outliers(self, weight: Tensor, name: str, count: int) -> QuantTensor:
        plain = self._encode(weight, name)
        channels = worst_channels(weight, plain, count, self._moments(name))
        return self._encode(weight, name, channels=channels)

    def _loftq(self, weight: Tensor, name: str, rank: int) -> tuple[QuantTensor, ErrorStart, float]:
        result = loftq(
            weight,
            self.codec,
            rank,
            self.iters,
            block_size=self.block_size,
            double_quant=self.double_quant,
            second_moments=self._moments(name),
            name=name,
        )
        start = _start(result.b, result.a, weight.dtype, result.rounds)
        return result.weight, start, result.error_with_factors

    def _start_beside(
        self, weight: Tensor, encoded: QuantTensor, name: str, rank: int
    ) -> tuple[ErrorStart, float]:
        """A fit of what is lost beside outlier channels (one round: the codes stay)."""
        moments = self._moments(name)
        fit = fit_error(weight, encoded, rank, moments)
        lost = squared_error(weight, encoded, moments)
        left = lost * fit.left_over(rank) / fit.total if fit.total else 0.0
        return _start(fit.b, fit.a, weight.dtype, 1), math.sqrt(left)

    def _decide(self) -> dict[str, Form]:
        if self._chosen is None:
            share = self.share if self.joint is None else self.joint
            budget = int(share * sum(self._bytes.values()))
            self._chosen = choose(self._options, budget)
        return self._chosen

    def _reason(self, name: str, choice: Form | None) -> str:
        if choice is None:
            if self.outlier_share:
                return f"{self.outlier_share:.2%} of the input channels in bf16"
            return f"rank-{self.rank} start for adapters" if self.rank else "as asked"
        options = self._options[name]
        lost = f"{self.codec} alone loses {math.sqrt(options[0].error):.2%}"
        if choice is options[0]:
            return f"{lost}: others gain more per byte"
        what = choice.codec if choice.codec != self.codec else choice.label
        return f"{lost}, {what} leaves {math.sqrt(choice.error):.2%}"

    def _add_row(
        self,
        weight: Tensor,
        name: str,
        encoded: QuantTensor,
        start: ErrorStart | None,
        reason: str,
        with_start: float | None = None,
    ) -> None:
        self.report.rows[name] = MatrixReport(
            name=name,
            shape=tuple(weight.shape),
            codec=encoded.codec,
            stored_bytes=encoded.nbytes,
            plain_bytes=weight.numel() * weight.element_size(),
            error=math.sqrt(squared_error(weight, encoded, self._moments(name))),
            rank=0 if start is None else start.a.shape[0],
            error_with_start=with_start,
            reason=reason,
            outliers=encoded.spec.outliers,
            considered=tuple(
                Considered(form.label, form.extra_bytes, math.sqrt(form.error))
                for form in self._options.get(name, ())
            ),
        )


def _start(b: Tensor, a: Tensor, dtype: torch.dtype, rounds: int) -> ErrorStart:
    return ErrorStart(b.to(dtype).cpu().contiguous(), a.to(dtype).cpu().contiguous(), rounds=rounds)


def _share(value: float | str | bool | None) -> float:
    if value is None or value is False:
        return 0.0
    if value is True or value == "auto":
        return AUTO_SHARE
    if isinstance(value, int | float) and 0 <= value <= 0.5:
        return float(value)
    raise OptionError(
        f"keep_precise={value!r} is not accepted: use 0, False, None, 'auto', True or a fraction "
        f"up to 0.5"
    )


def _outlier_share(value: float) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= 0.1:
        return float(value)
    raise OptionError(
        f"outlier_channels={value!r} is not accepted: use a share of the input channels up to 0.1"
    )


def _check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r} is not accepted: use an int of at least {least}")
