"""What a replica's answers say to one front, gathered."""

import asyncio

import pytest

from forerun.scale import replica as outboxes
from forerun.scale.replica import Outbox, Started

SAID = Started("weights")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(outboxes, "LINGER", 0.05)


class Loop(asyncio.SelectorEventLoop):
    """Its clock jumps to what is due next, so that nothing takes time and nothing is late on a busy machine."""

    def __init__(self):
        super().__init__()
        self.now, select = 0.0, self._selector.select

        def jump(timeout):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


def run(task):
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(task)


def test_what_several_answers_say_is_taken_together():
    async def gather():
        outbox = Outbox()

        async def answer(number):
            outbox.begin()
            for _ in range(3):
                await round_ended.wait()
                outbox.put(number, SAID)
            outbox.put(number, None)
            outbox.end()

        async def listen():
            while entries := await outbox.take():
                heard.append(entries)

        heard = []
        round_ended = asyncio.Event()
        tasks = [asyncio.create_task(answer(number)) for number in range(4)]
        listener = asyncio.create_task(listen())
        await asyncio.sleep(0.01)
        assert heard == []
        round_ended.set()
        await asyncio.gather(*tasks)
        await listener
        return heard

    heard = run(gather())
    assert len(heard) == 1
    for number in range(4):
        assert [said for whose, said in heard[0] if whose == number] == [SAID, SAID, SAID, None]


def test_a_listener_stays_for_the_next_answer_and_for_a_slow_one():
    async def wait():
        outbox = Outbox()
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0.03)
        outbox.begin()  # before it has lingered for long enough
        await asyncio.sleep(0.12)  # and says nothing for longer than that
        assert not taking.done()
        outbox.put(7, SAID)
        heard = [await taking]
        outbox.put(7, None)
        outbox.end()
        return [*heard, await outbox.take(), await outbox.take()]

    assert run(wait()) == [[(7, SAID)], [(7, None)], []]


def test_an_answer_that_begins_as_the_listener_leaves_keeps_it():
    """In the very turn of the event loop in which its time is up."""

    async def race():
        outbox = Outbox()
        loop = asyncio.get_running_loop()
        taking = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        loop.call_later(0.06, outbox.begin)  # behind the listener's own timer; both are due when the loop goes on
        loop.now += 0.1
        await asyncio.sleep(0.05)
        stayed = not taking.done()
        taking.cancel()
        return stayed

    assert run(race())
