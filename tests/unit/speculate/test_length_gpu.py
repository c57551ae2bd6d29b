"""``adaptive`` on a simulated GPU: rows nearly free, launches dear, and at many streams drafts that lose."""

import pytest

from simulated import GPU_DRAFTS, gpu, play


@pytest.mark.parametrize("count", [1, 8, 16, 64])
@pytest.mark.parametrize("drafts", GPU_DRAFTS)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_no_200_rounds_are_slower_than_098_of_plain(drafts, count, rate):
    """A cold start is included, and the policy's own time."""
    machine = gpu(count, **GPU_DRAFTS[drafts])
    for seed in range(2):
        run = play(machine, "adaptive", count, lambda *_: rate, depth=4, length=240, requests=max(3, count), seed=seed)
        assert run.slowest() >= 0.98


def test_drafts_that_lose_at_many_streams_pay_at_one():
    speeds = {}
    for count in (1, 64):
        runs = [
            play(gpu(count, **GPU_DRAFTS["head"]), name, count, lambda *_: 0.5, depth=4)
            for name in ("adaptive", "fixed")
        ]
        speeds[count] = [run.plain_work / run.work for run in runs]
    adaptive, fixed = zip(*speeds.values())
    assert fixed[0] > 1.2
    assert fixed[1] < 0.8
    assert adaptive[0] > 0.9 * fixed[0]
    assert adaptive[1] > 0.95
