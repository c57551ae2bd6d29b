"""The documentation: the site builds without a warning, and generated parts name all that there is."""

import importlib.util
import json
import re
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from chat_model import save_chat_model
from forerun import LLM, SamplingParams
from forerun.cli.main import COMMANDS
from forerun.models.architectures.families import ARCHITECTURES
from forerun.models.files.fetch import KNOWN
from forerun.models.formats.gguf_types import FLOATS, TYPES
from forerun.speculate.names import KEYS, LAB_KEYS, policies, rules

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
WORDS = 25_900
"""Of README and docs together."""


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return module_of(DOCS / "generate.py")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8")):
        assert (tmp_path / target).is_file(), target
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "copybutton.js" in start
    assert "pip install" in re.sub(r"<[^>]+>", "", start)
    assert (tmp_path / re.findall(r'src="([^"]*answer[^"]*svg)"', start)[0]).is_file()
    assert "<table" in start
    assert "over plain" in start
    dashes = [
        page.name for page in tmp_path.rglob("*.html") if re.search(r"\u2013[a-z]", page.read_text(encoding="utf-8"))
    ]
    assert dashes == []  # of two hyphens before an option


def test_the_picture_is_of_an_answer(tmp_path):
    """The committed one has every colour; one that is made here has the answer's text. Neither loads anything."""
    made = module_of(DOCS / "picture.py")
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with LLM(save_chat_model(tmp_path), trace=True, speculative_config=drafts) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, stop="\n\n")
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
        here = made.picture(llm, "Hello", 8)
    committed = (DOCS / "figures" / "answer.svg").read_text(encoding="utf-8")

    def letters(svg):
        return re.sub(r"\s", "", "".join(ElementTree.fromstring(svg).itertext()))

    assert re.sub(r"\s", "", answer.outputs[0].text) in letters(here)
    assert f">{made.QUESTION}".replace(" ", "") in letters(committed)
    assert "drafted tokens were accepted" in committed.replace("&#160;", " ")
    for svg in (here, committed):
        assert not re.search(r"@font-face|<image|<script|url\((?!#)", svg)


def test_generated_parts_name_all_that_there_is(generate):
    for part, names in {
        "commands": [f"## forerun {name}\n" for name in COMMANDS],
        "methods": [f"### {name}\n" for name in (*KEYS, *LAB_KEYS)]
        + [f"| `{key}` |" for keys in (*KEYS.values(), *LAB_KEYS.values()) for key in keys.split()],
        "rules": [f"| `{name}` |" for name in rules],
        "policies": [f"| `{name}` |" for name in policies],
        "architectures": [f"| `{name}` |" for name in ARCHITECTURES],
        "gguf_types": [f"| {kind} |" for kind in TYPES if kind not in FLOATS],
        "known_models": [f"| `{name}` |" for name in KNOWN],
    }.items():
        text = generate.PARTS[part]()
        assert [name for name in names if name not in text] == []


def test_every_mark_is_known_and_every_part_used(generate):
    marks = {mark for page in DOCS.rglob("*.md") for mark in generate.MARK.findall(page.read_text(encoding="utf-8"))}
    assert marks == set(generate.PARTS)


def test_where_is_it():
    rows = re.findall(r"^\| [^|]+\? \| ([^|]+) \| ([^|]+) \|$", (DOCS / "internals/where.md").read_text(), re.MULTILINE)
    assert len(rows) >= 15
    for words, places in rows:
        files = [ROOT / "src/forerun" / name for name in re.findall(r"`([\w/.]+)`", places)]
        texts = ["".join(p.read_text() for p in (f.rglob("*.py") if f.is_dir() else [f])) for f in files]
        asked = re.findall(r"`([^`]+)`", words)
        assert [word for word in asked if not any(word in text for text in texts)] == [], places
        assert [file for file, text in zip(files, texts) if not any(word in text for word in asked)] == [], words


def test_the_table_of_auto_is_what_the_files_of_results_give(generate):
    folder = ROOT / "lab" / "benchmarks"
    table = module_of(folder / "table.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.written(readme) == readme, "run python lab/benchmarks/table.py"
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert table.table() in generate.filled(page)
    for name, ending in product(table.MODELS, ("", table.OTHER)):
        run = json.loads((folder / "results" / f"{name}{ending}.json").read_text(encoding="utf-8"))
        assert {"command", "processor", "date", "threads"} <= run.keys()
        assert run["processor"] in readme
        for prompts, title in table.SETS.items():
            ratios = [
                (pair["auto"]["tokens"] - 1)
                / (pair["auto"]["seconds"] - pair["auto"]["first"])
                / (pair["plain"]["tokens"] - 1)
                * (pair["plain"]["seconds"] - pair["plain"]["first"])
                for pair in run["pairs"]
                if pair["prompt"] == prompts and pair["temperature"] == 0.0
            ]
            if ending:
                assert f"{statistics.median(ratios):.2f}" in readme.split("at T = 0 on")[1].split("\n")[0]
                continue
            line = next(line for line in readme.splitlines() if f"{table.MODELS[name].split()[0]}: {title} |" in line)
            assert f"**{statistics.median(ratios):.2f} (" in line
            assert f"| {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} |" in line


def test_readme_and_docs_are_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(readme) <= 130
    assert max(map(len, readme)) <= 120
    pages = [ROOT / "README.md", *(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= WORDS
