"""A stop: work that may be abandoned is abandoned when the grace ends, the rest is finished, and the reason is
printed."""

import asyncio
import os
import signal

import pytest

from verl.driver.stopping import RESERVE_S, StopRequest


class Said:
    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


async def stopped(work_s, *, why_not, inside=True):
    """Return (True if the work was done, the printed lines). SIGTERM arrives during the work, and the grace ends soon
    after."""
    said, done = Said(), []
    stop = StopRequest(said, RESERVE_S + 0.05, lambda: 0.0)

    async def work():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(work_s)
        done.append(True)

    stop.listen()
    try:
        if inside:
            assert await stop.unless_given_up(work(), ", it is left", lambda: why_not) == bool(done)
        else:
            await work()  # as the update of a supervised step
    finally:
        stop.close()
    assert stop.requested == "SIGTERM"
    return bool(done), said.lines


@pytest.mark.timeout(60)
def test_what_is_said_is_what_is_done():
    kept, lines = asyncio.run(stopped(60.0, why_not=""))
    assert not kept and len(lines) == 1 and "if it takes longer than 0 s" in lines[0] and ", it is left" in lines[0]
    for inside, why in ((True, "no room"), (False, "it is about to end")):
        kept, lines = asyncio.run(stopped(0.3, why_not="no room", inside=inside))
        assert kept and f"finishing this step, however long it takes ({why}), then saving" in lines[0], inside
        over = f"run.grace_s=2.05 is over: the step is finished and saved first ({why})"
        assert len(lines) == 2 and lines[1] == over and "it is left" not in lines[0], inside
