"""Tasks in HumanEval's form."""

import json

TASKS = [
    {"task_id": "T/0", "prompt": 'def one(x):\n    """ One more. """\n',
     "test": "def check(candidate):\n    assert candidate(2) == 3\n", "entry_point": "one"},
    {"task_id": "T/1", "prompt": 'import math\n\n\ndef helper():\n    return 4\n\n\ndef two(x):\n    """ Twice. """\n',
     "test": "def check(candidate):\n    assert candidate(2) == helper()\n", "entry_point": "two"},
]  # fmt: skip


def save_tasks(file):
    file.write_text("\n".join(map(json.dumps, TASKS)), encoding="utf-8")
    return file
