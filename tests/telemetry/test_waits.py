"""Waits are counted for who asks, in its tasks too, and overlapping ones once."""

import asyncio

from psrl.telemetry.waits import Waits, counting_waits, waiting


def test_waits_that_overlap_count_once():
    now = [0.0]
    waits = Waits(clock=lambda: now[0])
    first, second = waits.open(), waits.open()
    now[0] = 1.0
    first.__enter__()
    now[0] = 2.0
    second.__enter__()
    now[0] = 3.0
    first.__exit__(None, None, None)
    assert waits.seconds == 2.0
    now[0] = 4.0
    second.__exit__(None, None, None)
    now[0] = 9.0
    assert waits.seconds == 3.0


def test_a_wait_in_a_task_that_is_cancelled_counts_for_who_started_it_and_for_nobody_else():
    async def stand_in_a_queue():
        with waiting():
            await asyncio.Event().wait()

    async def play(places):
        with counting_waits() as waits:
            task = asyncio.create_task(stand_in_a_queue())
            await asyncio.wait({task}, timeout=0.05)
            task.cancel()
            await asyncio.wait({task})
        places.append(waits.seconds)

    async def both():
        waited = []
        with counting_waits() as outer:
            await play(waited)
        with waiting():
            return waited[0], outer.seconds

    waited, outer = asyncio.run(both())
    assert 0.04 < waited < 5.0
    assert outer == 0.0
