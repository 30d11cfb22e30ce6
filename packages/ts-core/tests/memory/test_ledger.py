"""The ledger of a device pool."""

from __future__ import annotations

import threading

import pytest

from ts_core.errors import OutOfBudgetError
from ts_core.memory.ledger import Ledger


def test_bytes_by_tag_used_and_peak() -> None:
    ledger = Ledger(100)
    slots = ledger.reserve(60, "slots")
    with ledger.reserve(30, "blocks") as blocks:
        assert blocks.nbytes == 30 and blocks.tag == "blocks"
        more = ledger.reserve(10, "slots")
        assert ledger.by_tag() == {"blocks": 30, "slots": 70}
        assert (ledger.used, ledger.free) == (100, 0)
    assert ledger.by_tag() == {"slots": 70}
    slots.release()
    more.release()
    assert (ledger.used, ledger.peak, ledger.free, ledger.by_tag()) == (0, 100, 100, {})
    ledger.reset_peak()
    assert ledger.peak == 0


def test_a_refusal_names_limit_used_asked_and_shortfall() -> None:
    ledger = Ledger(1000, name="streaming pool")
    ledger.reserve(600, "slots")
    ledger.reserve(300, "blocks")
    words = (
        r"150 bytes for 'gradients' do not fit in the streaming pool: limit 1000, used 900 "
        r"\(blocks 300, slots 600\), short by 50 bytes"
    )
    with pytest.raises(OutOfBudgetError, match=words) as caught:
        ledger.reserve(150, "gradients")
    assert isinstance(caught.value, MemoryError)
    assert (ledger.used, ledger.peak) == (900, 900)
    ledger.reserve(100, "gradients")


def test_released_once() -> None:
    ledger = Ledger(10)
    kept, gone = ledger.reserve(5, "a"), ledger.reserve(5, "a")
    gone.release()
    gone.release()
    assert ledger.used == 5 and gone.nbytes == 0
    with kept, pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), ledger.reserve(10, "b"):
        1 / 0  # noqa: B018
    assert ledger.used == 0


def test_no_limit_and_a_limit_set_later() -> None:
    ledger = Ledger()
    ledger.reserve(1 << 50, "all")
    assert ledger.free is None
    ledger.limit = 10
    assert ledger.free == 0
    with pytest.raises(OutOfBudgetError):
        ledger.reserve(1, "more")
    ledger.limit = None
    ledger.reserve(1, "more")


@pytest.mark.parametrize("size", [-1, -(1 << 40)])
def test_negative_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes={size}"):
        Ledger().reserve(size, "a")
    with pytest.raises(ValueError, match=f"limit={size}"):
        Ledger(size)


def test_a_reservation_of_nothing_fits_a_full_ledger() -> None:
    ledger = Ledger(0)
    ledger.reserve(0, "nothing").release()
    assert ledger.by_tag() == {}


def test_threads_never_exceed_the_limit_together() -> None:
    ledger = Ledger(50)
    most, refused = [0], [0]
    lock = threading.Lock()

    def work() -> None:
        for _ in range(400):
            try:
                with ledger.reserve(10, "work"), lock:
                    most[0] = max(most[0], ledger.used)
            except OutOfBudgetError:
                with lock:
                    refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used == 0 and ledger.by_tag() == {}
    assert 10 <= most[0] <= ledger.peak <= 50
