"""What `ts-bench quality` compares: formats and their options."""

from __future__ import annotations

from dataclasses import dataclass

from ts_core.errors import OptionError

BASELINE = "bf16"


@dataclass(frozen=True)
class Case:
    """One way to store the frozen weights.

    Attributes:
        name: what it is called in tables.
        codec: the format, or None for full precision.
        options: of `ts_core.quantize_model`.
        uses_data: whether activation statistics from a little training text weigh the errors.
        products: whether products run in the format's own arithmetic (FP8) wherever they can,
            which quantizes activations too; needs bf16. On a CPU they are emulated.
    """

    name: str
    codec: str | None
    options: tuple[tuple[str, int | float | bool], ...] = ()
    uses_data: bool = False
    products: bool = False

    @property
    def starts_adapters(self) -> bool:
        """Whether adapters start at what quantization lost."""
        return bool(dict(self.options).get("error_rank"))


def _case(
    name: str, codec: str | None, uses_data: bool = False, products: bool = False, **options: float
) -> Case:
    return Case(name, codec, tuple(options.items()), uses_data, products)


_FEW = 1 / 64
"""Share of the input channels that "outliers" keeps in bf16: 3 % more bytes for fp8."""


_ALL = (
    _case(BASELINE, None),
    _case("int8", "int8"),
    _case("int8 double-quant", "int8", double_quant=True),
    _case("fp8", "fp8"),
    _case("fp8 products", "fp8", products=True),
    _case("fp8 outliers data", "fp8", True, outlier_channels=_FEW),
    _case("fp8 outliers data products", "fp8", True, products=True, outlier_channels=_FEW),
    _case("nf4", "nf4"),
    _case("nf4 double-quant", "nf4", double_quant=True),
    _case("nf4 keep-precise", "nf4", keep_precise=0.05),
    _case("nf4 keep-precise data", "nf4", True, keep_precise=0.05),
    _case("nf4 loftq", "nf4", error_rank=16),
    _case("nf4 loftq x5", "nf4", error_rank=16, error_iters=5),
    _case("nf4 loftq data", "nf4", True, error_rank=16),
    _case("nf4 all", "nf4", True, error_rank=16, keep_precise=0.05, double_quant=True),
    _case("nf4 joint data", "nf4", True, joint_budget=0.1, error_rank=16),
    _case("nvfp4", "nvfp4"),
    _case("nvfp4 keep-precise", "nvfp4", keep_precise=0.05),
    _case("nvfp4 loftq data", "nvfp4", True, error_rank=16),
    _case("mxfp4", "mxfp4"),
)

CASES: dict[str, Case] = {case.name: case for case in _ALL}


def named(names: list[str] | None, dtype: str = "bfloat16") -> list[Case]:
    """The cases called so, the baseline first.

    Args:
        names: None for all that can be measured in that dtype.
        dtype: what is computed in.

    Raises:
        OptionError: an unknown name, or one that needs another dtype.
    """
    if names is None:
        return [case for case in CASES.values() if dtype == "bfloat16" or not case.products]
    for name in names:
        if name not in CASES:
            raise OptionError(f"cases: {name!r} is unknown; choose from {', '.join(CASES)}.")
        if CASES[name].products and dtype != "bfloat16":
            raise OptionError(f"cases: {name!r} needs bfloat16, not {dtype}. Use --dtype bfloat16.")
    return [CASES[name] for name in dict.fromkeys([BASELINE, *names])]
