"""What pytest is told. ``shared_fixtures`` is imported where tests run: the process of pytest-xdist that hands them out
needs none of what takes seconds to import."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from here import LEFT_OUT

if not Path("/proc/driver/nvidia").exists():
    # Triton reads this once, when it is first imported, by a folder's conftest perhaps; without a GPU its kernels run
    # under its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

LONGEST = {
    "test_served_soak.py", "test_deployed.py", "test_agents.py", "test_packages.py", "test_kinds.py", "test_fuzz.py",
    "test_tune.py", "test_several.py",
}  # fmt: skip
"""Files that begin first, so that no process is still at one of them when the other has done everything."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the whole conformance matrix, not a pairwise part of it")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected is no garbage: a full collection visits all of it, which takes 0.7 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Tests marked ``full`` exist only with ``--full``, those marked ``elsewhere`` on other machines, which is said."""
    result = config.stash.setdefault(LEFT_OUT, Counter())
    kept, extra = [], []
    for item in items:
        elsewhere = item.get_closest_marker("elsewhere")
        if elsewhere is not None:
            result[elsewhere.args[0]] += 1
        rare = item.get_closest_marker("full") is not None and not config.getoption("--full")
        (extra if rare or elsewhere is not None else kept).append(item)
    config.hook.pytest_deselected(items=extra)
    tests = Counter(item.path for item in kept)
    items[:] = sorted(kept, key=lambda item: (item.path.name not in LONGEST, -tests[item.path]))


def pytest_sessionfinish(session):
    """A worker of pytest-xdist tells what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every worker collects, and leaves out, the same tests."""
    result = node.config.stash.setdefault(LEFT_OUT, Counter())
    for reason, count in getattr(node, "workeroutput", {}).get("left out", {}).items():
        result[reason] = max(result[reason], count)


def pytest_terminal_summary(terminalreporter, config):
    for reason, count in sorted(config.stash.get(LEFT_OUT, Counter()).items()):
        terminalreporter.write_line(f"NOT TESTED here ({count} tests): {reason}", yellow=True, bold=True)
