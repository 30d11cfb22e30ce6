"""`trainstream plan`: does a training fit, where would blocks live, and how fast would it be."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ts_core.config import check_option, parse_bytes
from ts_core.errors import OptionError

if TYPE_CHECKING:
    from ts_core.planning.outcome import Outcome


def run(args: argparse.Namespace) -> int:
    """Plan as the arguments say and print the answer; 0 when it fits, else 1."""
    from ts_core.planning.render import render, show

    outcome = outcome_for(args)
    if args.plot:
        from ts_core.planning.plot import draw

        draw(outcome, args.plot)
    if args.json:
        print(json.dumps(_plain(outcome), indent=2))
    else:
        show(render(outcome))
        if args.plot:
            print(f"drawn in {args.plot}")
    return 0 if outcome.fits else 1


def outcome_for(args: argparse.Namespace) -> Outcome:
    """Plan as the arguments say.

    Raises:
        OptionError: one that is not accepted, under the command's name for it.
    """
    import torch

    from ts_core.planning.estimate import Training, check_training
    from ts_core.planning.outcome import plan_training

    rank = None if args.full else args.lora
    check_training(args.batch, args.seq, rank)
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
    kind = args.dtype or ("float32" if args.full else "bfloat16")
    training = Training(
        args.batch, args.seq, rank, dtypes[kind], args.moments, args.dtype is not None
    )
    check_option("vram_headroom", args.headroom, "--headroom")
    if args.optimizer_mode in ("gpu", "hybrid") and args.moments != "float32":
        raise OptionError(
            f"--optimizer-mode {args.optimizer_mode} keeps fp32 moments. Use --optimizer-mode cpu "
            f"with --moments {args.moments}, or leave --moments out."
        )
    options: dict[str, Any] = {
        "vram_headroom": args.headroom,
        "optimizer_mode": args.optimizer_mode,
    }
    for name in ("recompute", "activation_offload", "param_offload"):
        if getattr(args, name) != "auto":
            options[name] = _share(name, getattr(args, name))
            check_option(name, options[name], f"--{name.replace('_', '-')}")
    if args.disk_offload is not None:
        check_option("disk_offload", args.disk_offload, "--disk-offload")
        options["disk_offload"] = args.disk_offload
    return plan_training(
        args.model, training, _machine(args), args.quantize, options, args.trust_remote_code
    )


def _machine(args: argparse.Namespace) -> Any:
    import torch

    from ts_core.memory.ram import ram_available_bytes
    from ts_core.planning.outcome import machine_with_ram
    from ts_core.schedule import MachineProfile, profile_hardware
    from ts_core.schedule.rates import TYPICAL_GPU

    here = torch.cuda.is_available()
    vram = parse_bytes("--vram", args.vram)
    if vram is None:
        if not here:
            raise OptionError(
                "there is no GPU here to plan for. Say how much memory it has: --vram 24GiB."
            )
        vram = int(torch.cuda.mem_get_info()[0])
    ram = parse_bytes("--ram", args.ram) or ram_available_bytes()
    rates = profile_hardware() if here else TYPICAL_GPU
    return machine_with_ram(MachineProfile(vram, page_lock_bytes=0, rates=rates), ram)


def _share(name: str, text: str) -> bool | float:
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return float(text)
    except ValueError:
        option = name.replace("_", "-")
        raise OptionError(
            f"--{option} {text} is not accepted. Use auto, true, false or a fraction from 0 to 1."
        ) from None


def _plain(outcome: Any) -> dict[str, Any]:
    plan = asdict(outcome.plan)
    training = asdict(outcome.training)
    training["dtype"] = str(outcome.training.dtype).removeprefix("torch.")
    return {
        "model": outcome.model,
        "fits": outcome.fits,
        "training": training,
        "parameters": outcome.described.parameters,
        "quantize": outcome.codec,
        "blocks": len(outcome.described.profile.pageable),
        "loading_bytes": outcome.loading_bytes,
        "rates": None if outcome.machine.rates is None else outcome.machine.rates.to_dict(),
        "plan": plan,
        "notes": list(outcome.notes),
        "remedies": list(outcome.remedies),
    }
