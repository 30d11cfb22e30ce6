"""Checks of the numbers that `_native` hands to the compiled core."""

from __future__ import annotations

import operator


def integer(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an integer") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name}={number}: beyond 64 bits")
    return number


def address(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an address as an integer") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}={number}: expected an address, 0 to 2**64 - 1")
    return number


def seed(seed: int) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed is {seed!r}; expected an integer") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed={number}: expected 0 to 2**64 - 1")
    return number
