"""The commands as a user meets them: what they print, what they refuse, and how."""

import io
import json
import re
import sys
from dataclasses import MISSING, dataclass, fields, replace
from importlib import metadata

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun import EngineConfig, SamplingParams, drafters
from forerun.cli.main import COMMANDS, GROUP, load, run
from forerun.cli.options import flags_of, speculative_config
from forerun.cli.trace import KINDS
from forerun.core.config import option
from forerun.core.errors import ConfigError
from forerun.speculate.draft import Drafter

PROMPT = "the cat sat on the mat; the cat"
CONTRACT = {
    "text": str, "token_ids": list, "prompt_tokens": int, "completion_tokens": int, "finish_reason": str,
    "metrics": dict,
}  # fmt: skip
METRICS = {
    "tokens_per_second", "rounds", "mean_acceptance_length", "draft_acceptance_rate", "alpha", "acceptance_histogram",
    "num_draft_tokens", "num_accepted_draft_tokens",
}  # fmt: skip


@pytest.fixture
def pair(tiny_target, tiny_draft):
    return ["--model", tiny_target, "--spec-model", tiny_draft, "--spec-tokens", "3", "--max-tokens", "24"]


def test_json_is_the_contract_and_the_text_is_transformers_own(forerun, pair, tiny_target):
    code, out, err = forerun("generate", PROMPT, *pair, "--json")
    answer = json.loads(out)
    assert code == 0
    assert err == ""
    assert {name: type(value) for name, value in answer.items()} == CONTRACT
    assert set(answer["metrics"]) == METRICS
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0]
    assert answer["token_ids"] == expected[ids.shape[1] :].tolist()
    assert answer["text"] == tokenizer.decode(answer["token_ids"], skip_special_tokens=True)
    assert answer["prompt_tokens"] == ids.shape[1]
    assert answer["completion_tokens"] == len(answer["token_ids"])
    metrics = answer["metrics"]
    assert 0 < metrics["num_accepted_draft_tokens"] < metrics["num_draft_tokens"]
    assert metrics["draft_acceptance_rate"] == metrics["num_accepted_draft_tokens"] / metrics["num_draft_tokens"]
    histogram = metrics["acceptance_histogram"]
    assert sum(j * count for j, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["mean_acceptance_length"] == 1 + metrics["num_accepted_draft_tokens"] / sum(histogram)


def test_without_drafts_counts_are_zero_and_rates_null(forerun, pair):
    _, out, _ = forerun("generate", PROMPT, *pair[:2], "--spec-method", "none", "--max-tokens", "5", "--json")
    metrics = json.loads(out)["metrics"]
    assert (metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]) == (0, 0)
    assert (metrics["alpha"], metrics["draft_acceptance_rate"], metrics["mean_acceptance_length"]) == (None,) * 3


def test_the_seed_decides_the_text_and_speculation_does_not(forerun, pair):
    def text(*options):
        return json.loads(forerun("generate", PROMPT, *options, "--temperature", "0.9", "--json")[1])["text"]

    assert text(*pair) == text(*pair[:2], "--max-tokens", "24") == text(*pair, "--seed", "0")
    assert text(*pair) != text(*pair, "--seed", "1")


def test_a_dash_reads_standard_input(forerun, pair, monkeypatch):
    expected = json.loads(forerun("generate", PROMPT, *pair, "--json")[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert json.loads(forerun("generate", "-", *pair, "--json")[1])["token_ids"] == expected["token_ids"]


def test_default_output_has_the_text_the_figures_and_one_round(forerun, pair):
    expected = json.loads(forerun("generate", PROMPT, *pair, "--json")[1])
    code, out, err = forerun("generate", PROMPT, *pair)
    assert (code, err) == (0, "")
    assert out.startswith(PROMPT + expected["text"])
    assert re.search(r"\d+ tokens/s", out)
    assert f"mean acceptance length {expected['metrics']['mean_acceptance_length']:.2f}" in out
    assert (
        f"{expected['metrics']['num_accepted_draft_tokens']} of {expected['metrics']['num_draft_tokens']} drafted"
        in out
    )
    assert re.search(r"^round \d+ .*\[.\].*~.~", out, re.MULTILINE)
    assert "\x1b" not in out


def test_trace_shows_every_round_with_marks_on_a_plain_terminal(forerun, pair):
    expected = json.loads(forerun("generate", PROMPT, *pair, "--json")[1])
    _, out, _ = forerun("generate", PROMPT, *pair, "--trace")
    lines = re.findall(r"^ *(\d+) +(\S+)  (.*)$", out.split("acceptance", 1)[1], re.MULTILINE)
    lines = [line for line in lines if re.fullmatch(r"-|\d/\d", line[1])]
    assert [int(number) for number, _, _ in lines] == list(range(1, expected["metrics"]["rounds"] + 2))
    assert (
        sum(int(count[0]) for _, count, _ in lines if count != "-") == expected["metrics"]["num_accepted_draft_tokens"]
    )
    token = r"(\\n|<unk>|.)"
    marks = re.compile(rf"~{token}~|\[{token}\]|<{token}>|\+{token}\+")
    drafted = ["".join(m[2] or m[3] or m[4] or "" for m in marks.finditer(line)) for _, _, line in lines]
    text = "".join(line if count == "-" else kept for kept, (_, count, line) in zip(drafted, lines))
    assert text.replace("\\n", "\n").replace("<unk>", "") == expected["text"]
    assert all(f"{look.left}{kind}{look.right}: {look.meaning}" in out for kind, look in KINDS.items())


REFUSED = {
    "no prompt": ["generate"],
    "empty prompt": ["generate", ""],
    "unknown option": ["generate", "x", "--nope", "3"],
    "not a number": ["generate", "x", "--max-tokens", "many"],
    "no such folder": ["generate", "x", "--model", "/no/such/folder"],
    "bad JSON": ["generate", "x", "--speculative-config", "{"],
    "JSON, not an object": ["generate", "x", "--speculative-config", "[1]"],
    "given twice": ["generate", "x", "--speculative-config", '{"method": "ngram"}', "--spec-method", "suffix"],
    "unknown rule without a method": ["generate", "x", "--model", "forerun:target", "--accept", "tokens"],
    "bad bias": ["generate", "x", "--logit-bias", '{"a": 1}'],
    "a bias of more digits than Python reads": ["generate", "x", "--logit-bias", f'{{"1": {"9" * 5000}}}'],
    "JSON of too many brackets": ["generate", "x", "--speculative-config", "[" * 100_000],
    "nobody's home": ["generate", "x", "--model", "~nobody-here/model.gguf"],
    "a trace of several answers": ["generate", "x", "--n", "2", "--trace-html", "page.html"],
    "a mode of nothing": ["generate", "x", "--logprobs-mode", "raw_logprobs"],
    "tune: fewer threads than none": ["tune", "smollm2", "--out", "/tmp/x", "--threads", "-2"],
    "train: more threads than a machine has": ["train", "target", "--out", "/tmp/x", "--threads", "100000"],
    "more threads than a machine has": ["generate", "x", "--threads", "100000"],
    "json and trace": ["generate", "x", "--json", "--trace"],
    "bench: unknown method": ["bench", "--methods", "none,guess"],
    "bench: unknown peer": ["bench", "--methods", "none", "--peers", "abacus"],
    "bench: unknown prompts": ["bench", "--methods", "none", "--prompt-set", "poems"],
    "bench: not a list of numbers": ["bench", "--concurrency", "1,two"],
    "bench: nobody's option": ["bench", "--methods", "ngram", "--speculative-config", '{"tree_of": 1}'],
    "bench: sampling that is not one": ["bench", "--sampling", '{"heat": 1}'],
    "bench: sampling that has its own flag": ["bench", "--sampling", '{"temperature": 1}'],
    "bench: sampling of peers": ["bench", "--sampling", '{"top_p": 0.9}', "--peers", "transformers"],
    "bench: no method": ["bench", "--methods", ""],
    "bench: no rule": ["bench", "--accept", ","],
    "bench: nothing decoded": ["bench", "--methods", "none", "--max-tokens", "1"],
    "plan: no method": ["plan", "--methods", ""],
    "plan: no prompts": ["plan", "--methods", "ngram", "--prompts", "0"],
    "plan: nothing decoded": ["plan", "--methods", "ngram", "--max-tokens", "1"],
    "plan: no room to decode": ["plan", "--methods", "ngram", "--prompt-tokens", "9", "--max-model-len", "10"],
    "check: unknown layout": ["check", "--layout", "heap"],
    "check: lossy rule": ["check", "--accept", "lenient"],
    "train: nowhere to write": ["train", "target"],
    "train: unknown loss": ["train", "draft_model", "--out", "/tmp/x", "--loss", "none"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_one_line_and_exit_code_2(forerun, case, tiny_target):
    arguments = REFUSED[case]
    if arguments[0] in ("generate", "bench", "check", "plan") and "--model" not in arguments:
        arguments = [*arguments, *(["--model", tiny_target] if case != "unknown rule without a method" else [])]
    code, out, err = forerun(*arguments)
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"error: \S.*\n", err), err


@pytest.mark.parametrize(("words", "advice"), [
    ("generate x y", "in quotes"), ("generate -m x", "it is --model"), ("generate x --temp 0", "--temperature"),
    ("pull smollm2", "forerun fetch"), ("gnerate x", "'generate'"), ("generate \udcff --model /nowhere", "UTF-8"),
])  # fmt: skip
def test_whoever_knows_another_engine_is_told_our_name(forerun, words, advice):
    code, out, err = forerun(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert advice in err


def test_a_process_fails_without_a_traceback(forerun, warm):
    done = warm.run("generate", "x", "--top-p", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: top_p must be .*\n", done.stderr)
    missing = forerun("generate", "x", "--model", "/no/such/folder")
    assert missing == (2, "", "error: no checkpoint folder at /no/such/folder\n")


def test_a_failing_drafter_is_one_warning_and_the_text_stays(forerun, pair):
    class Broken(Drafter):
        name = "broken"

        def propose(self, sequences, budgets):
            raise RuntimeError("no idea\nat all")

    drafters.register("broken")(Broken)
    try:
        code, out, err = forerun(
            "generate", PROMPT, *pair[:2], "--max-tokens", "24", "--spec-method", "broken", "--json"
        )
    finally:
        drafters.remove("broken")
    assert code == 0
    assert re.fullmatch(r"warning: drafter failed, .*no idea at all\n", err)
    assert "no idea" in json.loads(out)["metrics"]["draft_error"]
    plain = forerun("generate", PROMPT, *pair[:2], "--max-tokens", "24", "--json")[1]
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def test_what_the_seed_does_not_repeat_is_said(forerun, pair):
    options = ["--temperature", "0.8", "--accept", "token", "--length", "adaptive", "--json"]
    _, _, err = forerun("generate", PROMPT, *pair, *options)
    assert re.fullmatch(r"warning: rule token with adaptive lengths, .*\n", err)
    assert forerun("generate", PROMPT, *pair, *options[:2], "--length", "adaptive", "--json")[2] == ""


def test_a_rule_that_is_not_lossless_says_so(forerun, pair):
    _, _, err = forerun("generate", PROMPT, *pair, "--accept", "lenient", "--json")
    assert re.fullmatch(r"warning: rule lenient is not lossless: .*\n", err)
    assert forerun("generate", PROMPT, *pair, "--accept", "token", "--json")[2] == ""


def every_command():
    """The words of each command, subcommands included."""
    names = [*COMMANDS, *sorted(metadata.entry_points(group=GROUP).names)]
    return [[name, *rest] for name in names for rest in [[], *([sub] for sub in getattr(load(name), "commands", ()))]]


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_help_is_plain_text(forerun, monkeypatch, command):
    """No source text, and a sentence for each option: a capital letter first, a full stop at its end."""
    monkeypatch.setenv("COLUMNS", "2000")
    _, shown, _ = forerun(*command, "--help")
    for source in ("``", '"""', "#", "None", "0x"):
        assert source not in shown
    result = load(command[0])
    for name in command[1:]:
        result = result.commands[name]
    texts = [result.help.split("\n")[0], *(parameter.help for parameter in result.params)]
    if command[0] not in ("fetch", "ls", "show", "rm"):
        wrong = [text for text in texts if not re.fullmatch(r"[A-Z].*[.]", text or "", re.DOTALL)]
        assert wrong == []


LONG = ["generate", "chat", "bench", "plan", "check", "serve", "batch", "train target", "train eagle"]


@pytest.mark.parametrize("command", LONG)
def test_help_cuts_no_name_in_80_columns(forerun, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = forerun(*command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "\u2026" not in out
    first, *rest = command.split()
    result = load(first)
    for name in rest:
        result = result.commands[name]
    names = {option for parameter in result.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert len(names) > 10
    assert {name for name in names if name.startswith("--") and not re.search(rf"{name}(?![\w-])", out)} == set()


def test_help_names_every_engine_option_method_and_command(forerun, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = forerun("generate", "--help")
    flags = {f"--{item.name.replace('_', '-')}" for item in fields(EngineConfig)} - {"--trace"}
    assert {flag for flag in flags if flag not in out} == {"--generation-config"}  # it names its own sampling options
    served = forerun("serve", "--help")[1]
    assert {flag for flag in flags if flag not in served} == set()
    ours = {method for method in drafters if drafters[method].__module__.startswith("forerun.")}
    assert {method for method in ours if method not in out} == set()
    code, out, err = forerun()
    assert (code, err) == (0, "")
    assert all(command in out for command in ("generate", "bench", "plan", "check", "serve", "train"))
    assert "draft_model" in forerun("train")[1]


def test_a_server_has_a_seed_for_requests_that_name_none(forerun, tiny_target, monkeypatch):
    engines = []

    async def run(app, engine, listener, *rest, **options):
        listener.close()
        engine.close()
        engines.append(engine.engine.engine)

    monkeypatch.setattr("forerun.serve.run.run", run)
    threads = str(torch.get_num_threads())
    options = ["--model", tiny_target, "--port", "0", "--threads", threads]
    assert forerun("serve", *options, "--seed", "41")[0] == 0
    hot = SamplingParams(temperature=1.0, max_tokens=20)
    jobs = [engines[0].add([5, 6, 7], params)[0] for params in (hot, replace(hot, seed=41), replace(hot, seed=42))]
    while engines[0].busy:
        engines[0].step()
    assert jobs[0].output_ids == jobs[1].output_ids != jobs[2].output_ids
    code, _, err = forerun("serve", *options, "--seed", str(2**64))
    assert (code, err) == (2, f"error: seed must be an integer from -2^63 to 2^64 - 1, not {2**64}\n")


def test_the_bundled_pair_speculates_by_default_and_other_models_from_the_text_as_far_as_it_pays():
    assert speculative_config({}, {}) == {"method": "draft_model", "length": "adaptive"}
    assert speculative_config({}, {"model": "folder"}) == {"method": "suffix", "length": "adaptive"}
    assert speculative_config({"accept": "token"}, {"model": "folder"}) == {"method": "suffix", "accept": "token"}
    for own in ({"max_order": 4}, {"prompt_lookup_max": 4}):
        assert speculative_config({"speculative_config": own}, {"model": "folder"})["method"] == "ngram"
    assert speculative_config({"method": "none"}, {"model": "folder"}) == {"method": "none"}
    assert speculative_config({"num_speculative_tokens": 2, "accept": "token"}, {}) == {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "accept": "token",
    }
    given = {"speculative_config": {"method": "ngram"}, "num_speculative_tokens": 4}
    assert speculative_config(given, {"model": "x"}) == {"method": "ngram", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="--spec-tokens"):
        speculative_config({"speculative_config": {"num_speculative_tokens": 3}, "num_speculative_tokens": 4}, {})


def test_a_method_that_nobody_named_is_reported(forerun, pair):
    options = [*pair[:2], "--max-tokens", "24"]
    lines = re.findall(r"^speculation +(.*)$", forerun("generate", PROMPT, *options)[1], re.MULTILINE)
    assert len(lines) == 1
    assert re.match(r"suffix, as no --spec-method was given(, \d+ r|: nothing was drafted in \d+ r)ounds", lines[0])
    assert "as no" not in forerun("generate", PROMPT, *options, "--spec-method", "ngram")[1]
    assert re.search(r"suffix[,:] (?!as no)", forerun("generate", PROMPT, *options, "--spec-method", "auto")[1])
    assert "speculation" not in forerun("generate", PROMPT, *options, "--spec-method", "none")[1]


def test_fewer_tokens_than_were_asked_for_are_reported(forerun, pair):
    short = ["generate", "x" * 100, *pair[:2], "--max-model-len", "120", "--ignore-eos", "--json"]
    _, out, err = forerun(*short, "--max-tokens", "30")
    assert json.loads(out)["completion_tokens"] == 20
    assert re.fullmatch(r"warning: the answer ended after 20 tokens, before max_tokens 30: .* 120 tokens\n", err)
    assert forerun(*short, "--max-tokens", "20")[2] == ""


@dataclass(kw_only=True)
class Base:
    size: int = option(1, "How large.")


@dataclass(kw_only=True)
class Changed(Base):
    size: int = 2
    names: tuple[str, ...] = option((), "Names.", commas="name")
    must: str = option(MISSING, "Needed.")


def test_help_comes_from_the_fields_also_of_a_base():
    size, names, must = flags_of(Changed)
    assert (size.help, size.default) == ("How large.", "2")
    assert (names.name, names.field, names.help, names.parse("a,b")) == ("name", "names", "Names.", ["a", "b"])
    assert (must.help, must.default) == ("Needed.", None)


HOT = ["--temperature", "0.5", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture
def generate(capsys, tiny_target, tiny_draft):
    def call(*options):
        assert run(["generate", PROMPT, "--model", tiny_target, "--spec-model", tiny_draft, *HOT, *options]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return call


@pytest.mark.parametrize("mode", [{}, {"logprobs_mode": "raw_logprobs"}, {"logprobs_mode": "processed_logprobs"}])
def test_logprobs_are_the_engines(generate, llm, mode):
    options = ["--logprobs", "3", "--prompt-logprobs", "1", *(["--logprobs-mode", *mode.values()] if mode else [])]
    answer = json.loads(generate(*options, "--json"))
    params = SamplingParams(temperature=0.5, max_tokens=6, ignore_eos=True, seed=0, logprobs=3, prompt_logprobs=1)
    (result,) = llm(**mode).generate(PROMPT, params)
    assert (answer["prompt_logprobs"][0], result.prompt_logprobs[0]) == (None, None)
    shown = [*answer["prompt_logprobs"][1:], *answer["logprobs"]]
    expected = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
    count = len(result.prompt_logprobs) - 1
    for index, (item, own) in enumerate(zip(shown, expected, strict=True)):
        token = next(iter(own))
        best = sorted(own, key=lambda each: own[each].rank)[: 1 if index < count else 3]
        assert (item["token"], item["rank"], item["text"]) == (token, own[token].rank, own[token].decoded_token)
        assert [top["token"] for top in item["top"]] == best
        values = [item["logprob"], *(top["logprob"] for top in item["top"])]
        assert values == pytest.approx([own[each].logprob for each in (token, *best)], abs=1e-5)


def test_tokens_that_cannot_come_have_a_number_in_json(generate):
    answer = json.loads(generate("--logprobs", "3", "--logprobs-mode", "processed_logprobs", "--top-k", "1", "--json"))
    for item in answer["logprobs"]:
        assert [top["logprob"] for top in item["top"]] == [0.0, -9999.0, -9999.0]
        assert item["logprob"] == 0.0


def test_several_answers(generate):
    one = json.loads(generate("--json"))
    answer = json.loads(generate("--n", "3", "--json"))
    assert not {"outputs", "logprobs", "prompt_logprobs"} & set(one)
    assert answer["outputs"][0]["token_ids"] == answer["token_ids"]
    assert len({tuple(output["token_ids"]) for output in answer["outputs"]}) == len(answer["outputs"]) == 3
    assert answer["completion_tokens"] == 18
    out = generate("--n", "3")
    assert [f"--- {i} of 3\n{PROMPT}{item['text']}" in out for i, item in enumerate(answer["outputs"], 1)] == [True] * 3
    assert "18 tokens" in out


def test_the_text_output_shows_them_too(generate):
    result = json.loads(generate("--logprobs", "1", "--prompt-logprobs", "0", "--json"))
    out = generate("--logprobs", "1", "--prompt-logprobs", "0").split("log-probabilities, ")
    assert [part.splitlines()[0] for part in out[1:]] == ["prompt", "answer"]
    prompt, answer = (part.split("\n\n")[0].splitlines()[1:] for part in out[1:])
    assert prompt[0].split() == ["'t'", "-"]
    for line, item in zip([*prompt[1:], *answer], [*result["prompt_logprobs"][1:], *result["logprobs"]], strict=True):
        assert line.startswith(f"  {item['text']!r}")
        assert f"{item['logprob']:.2f}  rank {item['rank']}" in line
        assert all(f"{top['text']!r} {top['logprob']:.2f}" in line for top in item["top"])
    assert "log-probabilities" not in generate()
