"""How fast a machine is, as plain data: what the planner predicts step times with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ts_core.errors import DataError


@dataclass(frozen=True)
class HardwareProfile:
    """Rates of one machine, measured by `profile_hardware()` or assumed.

    Attributes:
        device: the accelerator's name.
        h2d, d2h: bytes per second from and to page-locked host memory, one direction busy.
        duplex: bytes per second of both directions together, both busy.
        host_copy: bytes per second that host threads copy.
        host_adamw: fp32 values per second that host threads update.
        matmul_bf16, matmul_fp32: floating-point operations per second of a large product.
        threads: host threads that the host rates hold for.
        page_locked: whether the host's side of the link was page-locked memory.
        measured: whether this machine was measured; otherwise typical values.
        note: where the measurement is kept, or why it is not.
    """

    device: str
    h2d: float
    d2h: float
    duplex: float
    host_copy: float
    host_adamw: float
    matmul_bf16: float
    matmul_fp32: float
    threads: int = 0
    page_locked: bool = False
    measured: bool = False
    note: str = ""

    def summary(self) -> str:
        """The rates in a few lines of text."""
        origin = "measured" if self.measured else "assumed, not measured"
        memory = "page-locked" if self.page_locked else "pageable"
        return "\n".join(
            [
                f"{self.device} ({origin})",
                f"  host to device  {self.h2d / 1e9:8.1f} GB/s ({memory} memory)",
                f"  device to host  {self.d2h / 1e9:8.1f} GB/s",
                f"  both at once    {self.duplex / 1e9:8.1f} GB/s",
                f"  host copy       {self.host_copy / 1e9:8.1f} GB/s",
                f"  host AdamW      {self.host_adamw / 1e9:8.2f} G parameters/s "
                f"({self.threads or 'all'} threads)",
                f"  matmul bf16     {self.matmul_bf16 / 1e9:8.1f} GFLOP/s",
                f"  matmul fp32     {self.matmul_fp32 / 1e9:8.1f} GFLOP/s",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a file."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Any) -> HardwareProfile:
        """From `to_dict()`'s result.

        Raises:
            DataError: fields are missing or not of their type.
        """
        if not isinstance(values, dict):
            raise DataError(f"a hardware profile is a table of fields, not {type(values).__name__}")
        for field in fields(HardwareProfile):
            value = values.get(field.name)
            if field.type == "float":
                good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            else:
                good = type(value).__name__ == field.type
            if not good:
                raise DataError(f"a hardware profile's {field.name!r} is {value!r}")
        return HardwareProfile(
            **{field.name: values[field.name] for field in fields(HardwareProfile)}
        )


# For a machine that is not at hand, or profile=False. A desktop GPU on PCIe 4 x16 beside 8 cores;
# on the host device copies and updates share one memory.
TYPICAL_GPU = HardwareProfile("a typical GPU", 24e9, 24e9, 38e9, 20e9, 1.2e9, 120e12, 40e12)
TYPICAL_HOST = HardwareProfile("a typical CPU", 8e9, 8e9, 10e9, 10e9, 0.6e9, 0.2e12, 0.4e12)
