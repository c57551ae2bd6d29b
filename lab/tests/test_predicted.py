"""Plans beside measurements."""

import json
import sys

import pytest

from forerun.core.errors import ConfigError
from forerun_lab.bench import predicted


def as_plan(temperature, **speeds):
    chains = [{"method": method, "k": 2, "speedup": speed} for method, speed in speeds.items()]
    trees = [{"fixed": [{"method": "eagle", "tree": [2, 1], "speedup": 0.9}]}]
    about = {"environment": {"model": "m"}, "temperature": temperature, "concurrency": 1}
    return {**about, "predictions": chains, "trees": trees}


def as_bench(temperature, **speeds):
    rows = [
        {
            "method": method.split("_")[0],
            "num_speculative_tokens": None if method == "none" else 2,
            "tree": "2x1" if method.endswith("_tree") else None,
            "temperature": temperature,
            "concurrency": 1,
            "length": None if method == "none" else "fixed",
            "speedup": speed,
            "speedup_error": 0.01,
        }
        for method, speed in speeds.items()
    ]
    return {"environment": {"model": "m"}, "rows": rows}


def test_plans_stand_beside_measurements(tmp_path, capsys, monkeypatch):
    files = [
        as_plan(0.0, eagle=1.1, ngram=1.3),
        as_plan(1.0, eagle=1.01),
        as_bench(0.0, none=1.0, eagle=1.0, ngram=1.04, eagle_tree=1.3),
        as_bench(1.0, none=1.0, eagle=0.8),
    ]
    result = predicted.join(files)
    off = {(row["method"], row["tree"], row["temperature"]): row["off"] for row in result["rows"]}
    assert off == pytest.approx(
        {
            ("eagle", None, 0.0): 0.1,
            ("ngram", None, 0.0): 1.3 / 1.04 - 1,
            ("eagle", "2x1", 0.0): 0.9 / 1.3 - 1,
            ("eagle", None, 1.0): 1.01 / 0.8 - 1,
        }
    )
    cold, hot = result["groups"]
    assert (cold["chosen"], cold["best"], cold["settings"]) == ("ngram, k = 2", "eagle, 2x1", 3)
    assert cold["chosen_over_best"] == pytest.approx(1.04 / 1.3)
    assert (hot["chosen"], hot["best"], hot["chosen_over_best"]) == ("none", "none", 1.0)
    with pytest.raises(ConfigError, match="no plan for"):
        predicted.join([as_plan(0.0, ngram=1.0), as_bench(0.0, eagle=1.0)])
    with pytest.raises(ConfigError, match="at least one plan"):
        predicted.join(files[:2])
    with pytest.raises(ConfigError, match="two plans for"):
        predicted.join([files[0], *files])
    adaptive = as_bench(0.0, eagle=1.0)
    adaptive["rows"][0]["length"] = "adaptive"
    with pytest.raises(ConfigError, match="eagle was measured with 'adaptive'"):
        predicted.join([files[0], adaptive])
    paths = [tmp_path / f"{index}.json" for index in range(len(files))]
    for path, item in zip(paths, files):
        path.write_text(json.dumps(item))
    monkeypatch.setattr(sys, "argv", ["predicted", *map(str, paths), "--out", str(tmp_path / "out.json")])
    predicted.main()
    assert "4 settings" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["median_error"] == result["median_error"]
    for odd in ("[]", "{", '{"predictions": [], "environment": {}}'):
        paths[0].write_text(odd)
        with pytest.raises(SystemExit, match=r"^error: "):
            predicted.main()
