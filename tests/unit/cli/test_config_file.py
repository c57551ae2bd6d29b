"""``forerun serve --config FILE``: what the file says is what the command line would have said, and the latter wins."""

import inspect
import json
import typing

import pytest
import typer
import yaml

from forerun.cli.main import load, run


def parsed(*arguments):
    with load("serve").make_context("serve", list(map(str, arguments))) as context:
        return {name: value for name, value in context.params.items() if name != "config"}


def every_option():
    """A value for each of the command's options: as YAML, and as the command line has them."""
    content = {}
    line = []
    hints = typing.get_type_hints(load("serve").callback, include_extras=True)
    for name, item in inspect.signature(load("serve").callback).parameters.items():
        hint, option = typing.get_args(hints[name])[:2]
        kind = str(hint)
        flag = name.replace("_", "-")
        if name == "config":
            continue
        if "bool" in kind:
            content[flag] = item.default is not True
            line.append(f"--{flag}")
        elif "list" in kind:
            values = [{"method": "ngram"}, {"method": "suffix"}] if option.metavar == "JSON" else ["one", "two: 2"]
            content[flag] = values
            for value in values:
                line += [f"--{flag}", json.dumps(value) if option.metavar == "JSON" else value]
        elif option.metavar == "JSON":
            content[flag] = {"method": "draft_model", "deep": {"er": [1, 2.5, None]}}
            line += [f"--{flag}", json.dumps(content[flag])]
        elif "int" in kind or "float" in kind:
            content[flag] = 2000 if "int" in kind else 2.5
            line += [f"--{flag}", content[flag]]
        else:
            content[flag] = f"text of {name}"
            line += [f"--{flag}", content[flag]]
    return content, line


def test_every_option_can_be_in_the_file(tmp_path):
    content, line = every_option()
    assert len(content) > 50
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    from_file = parsed("--config", file)
    assert from_file == parsed(*line)
    assert from_file != parsed()
    assert {name for name, value in from_file.items() if value == parsed()[name]} == set()


def test_a_model_needs_no_option():
    assert parsed("a", "--port", "82") == parsed("--port", "82", "a") == parsed("--model", "a", "--port", "82")
    for line in (["a", "b"], ["a", "--model", "b"]):
        with pytest.raises(typer.TyperException, match="takes one model"):
            parsed(*line)


def test_the_command_line_wins(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("model: b\nport: 81\nallowed-host: [a, b]\nprefix-caching: false\nmax-queue: 5\n", encoding="utf-8")
    for line in (["--config", file, "--port", 82], ["--port", 82, "--config", file]):
        got = parsed(*line, "a", "--allowed-host", "c", "--prefix-caching")
        assert (got["port"], list(got["allowed_host"]), got["prefix_caching"], got["max_queue"]) == (82, ["c"], True, 5)
        assert got["model"] == "a"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_a_file_without_options_changes_nothing(tmp_path, text):
    file = tmp_path / "empty.yaml"
    file.write_text(text, encoding="utf-8")
    assert parsed("--config", file) == parsed()


BAD = {
    "max-num-seq: 3": "serve has no option 'max-num-seq'; did you mean max-num-seqs?",
    "zzz: 3": "serve has no option 'zzz'; its keys are host, port, ",
    "config: other.yaml": "serve has no option 'config'",
    "7: x": "serve has no option 7",
    "port: '80'": "port must be a whole number, not '80'",
    "port: 70000": "port must be at most 65535, not 70000",
    "max-queue: 0": "max-queue must be at least 1, not 0",
    "max-delay: soon": "max-delay must be a number, not 'soon'",
    "invariant: maybe": "invariant must be true or false, not 'maybe'",
    "api-key: 0123": "api-key must be text, not 83: put it in quotes",
    "api-key: [a]": "api-key must be text, not ['a']",
    "host:": "host must be text, not None",
    "allowed-host: a": "allowed-host must be a list, not 'a'",
    "allowed-host: [1]": "allowed-host must be text, not 1",
    "also-draft: [3]": "also-draft must be a mapping, not 3",
    "speculative-config: 3": "speculative-config must be a mapping, not 3",
    "speculative-config: {method: 2020-01-01}": "speculative-config must be JSON's types",
    "port: 1\nhost: x\nport: 2": "duplicate option port",
    "speculative-config: {method: a, method: b}": "duplicate option method",
    "- port": "must be a YAML mapping, with lines of the form name: value",
    "port: [1": "is not valid YAML",
    "served-model-name: 2026-13-45": "is not valid YAML",
    "!!python/object/apply:os.system ['true']": "is not valid YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, capsys, monkeypatch, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("forerun.cli.serve._check_installed", lambda command: pytest.fail("the file was taken"))
    assert run(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(file) in error
    assert BAD[text] in error


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in ("missing.yaml", "binary.yaml"):
        assert run(["serve", "--config", str(tmp_path / path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert path in error
