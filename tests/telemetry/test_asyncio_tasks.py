"""Loops in real event loops: tasks that only ask again and again, and tasks that may come to an end."""

import asyncio
import sys
import threading
import time

import pytest

from doctor.monitor.telemetry.stacks.asyncio_tasks import event_loop_in
from doctor.monitor.telemetry.stacks.endless_loops import endless_loop

pytestmark = pytest.mark.real_time


class Tasks:
    """Work of an event loop that goes on until it is told to stop."""

    def __init__(self):
        self.stop = False

    async def asks(self):
        """Ask again and again."""
        while not self.stop:
            await asyncio.sleep(0.01)

    async def asks_twice(self):
        """Do so in tasks."""
        await asyncio.gather(self.asks(), self.asks())

    async def serves(self):
        """Get data while another task asks."""
        server = await asyncio.start_server(self.answers, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        watching = asyncio.create_task(self.asks())
        while not self.stop and await reader.read(1):
            self.got = True
        await watching
        writer.close()
        server.close()

    async def answers(self, reader, writer):
        """Send a little now and then."""
        while not self.stop:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    async def steps(self):
        """Do something in each turn."""
        while not self.stop:
            await self.step()

    async def step(self):
        """Do something unknown."""
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.01)

    def runs(self):
        """Run an event loop again and again."""
        while not self.stop:
            asyncio.run(asyncio.sleep(0.05))


def loops_of(work, looks=60):
    tasks = Tasks()
    thread = threading.Thread(target=lambda: asyncio.run(getattr(tasks, work)()), daemon=True)
    thread.start()
    time.sleep(0.3)
    found = []
    for _ in range(looks):
        frame = sys._current_frames()[thread.ident]
        assert event_loop_in(frame) is not None
        found.append(endless_loop(frame))
        time.sleep(0.01)
    tasks.stop = True
    thread.join(10)
    return found


@pytest.mark.parametrize("work", ["asks", "asks_twice"])
def test_tasks_that_only_ask(work):
    found = [one for one in loops_of(work) if one is not None]
    assert len({one.key for one in found}) == 1
    assert len(found) > 50
    assert all(one.pauses for one in found)


@pytest.mark.parametrize("work", ["serves", "steps"])
def test_tasks_one_of_which_may_come_to_an_end(work):
    found = loops_of(work)
    assert found.count(None) > 50


def test_a_loop_around_an_event_loop():
    tasks = Tasks()
    thread = threading.Thread(target=tasks.runs, daemon=True)
    thread.start()
    time.sleep(0.3)
    found = []
    for _ in range(40):
        found.append(endless_loop(sys._current_frames()[thread.ident]))
        time.sleep(0.01)
    tasks.stop = True
    thread.join(10)
    assert None not in found
    assert len({one.key for one in found}) == 1


def test_a_thread_without_an_event_loop():
    assert event_loop_in(sys._getframe()) is None
