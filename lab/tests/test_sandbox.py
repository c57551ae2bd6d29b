"""Programs that a model wrote: what they may not do, and that only their end passes."""

from pathlib import Path

import pytest

from forerun_lab.sandbox import LIMITS, run


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("import math\nassert math.gcd(6, 4) == 2", True),
        ("open('note', 'w').write('x')", True),
        ("import sys\nprint('x' * 100)\nsys.stdout.flush()", True),
        ("assert False", False),
        ("raise SystemExit(0)", False),
        ("import os\nos._exit(0)", False),
        ("def broken(:", False),
        (f"x = bytearray({2 * LIMITS['RLIMIT_AS']})", False),
        (f"open('big', 'wb').write(bytes({2 * LIMITS['RLIMIT_FSIZE']}))", False),
        ("import numpy", False),
    ],
)
def test_only_a_program_that_comes_to_its_end_within_the_limits_passes(program, passed):
    assert run(program).passed is passed


def test_a_program_that_sleeps_is_ended():
    assert not run("import time\ntime.sleep(600)", seconds=1.0).passed


def test_a_program_runs_in_a_folder_of_its_own_which_goes(tmp_path):
    index = "import os, pathlib\nassert os.getcwd() == os.environ['HOME'] != {!r}\nassert not os.listdir()"
    assert run(index.format(str(Path.cwd()))).passed
    assert run("import os\nassert 'PYTHONPATH' not in os.environ and 'FORERUN_CACHE' not in os.environ").passed


def test_where_the_kernel_allows_it_there_is_no_network():
    program = "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']"
    result = run(program)
    assert result.passed or not result.offline
