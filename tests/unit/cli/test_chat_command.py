"""``forerun chat``: what it answers, what it remembers, its commands, and how it looks in a terminal."""

import io
import json
import random
import re
import shutil
import sys
from unittest.mock import Mock

import pyte
import pytest
from markdown_it import MarkdownIt
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

from forerun import SamplingParams
from forerun.cli.chat import COMMANDS, NOT_HERE, PAGE_SIZE, ChatCommands, Conversation, completions, read_messages
from forerun.cli.chat_session import MarkdownView, PlainView, TraceView, answer, split
from forerun.cli.editor import Words, parse, read_lines
from forerun.cli.main import load, run
from forerun.core.errors import ConfigError, ForerunError, RequestError
from forerun.models.run.native import NativeModel
from refusals import refused

LENGTH = 12


@pytest.fixture
def chat(capsys, monkeypatch, chat_model):
    """Run ``forerun chat`` without a terminal on these lines: exit code, stdout, stderr."""

    def call(text, *options, model=chat_model):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = run(
            ["chat", "--model", model, "--max-tokens", str(LENGTH), "--temperature", "0", "--min-p", "0", *options]
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def told(llm, chat_model):
    """The answer to a prompt by plain decoding."""

    def get(prompt, **options):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "seed": 0, **options})
        return llm(model=chat_model).generate(prompt, params)[0].outputs[0].text

    return get


def test_each_line_is_a_message_and_answers_are_all_of_stdout(chat, told):
    first = told("u:hello;a:")
    second = told(f"u:hello;a:{first};u:more;a:")
    code, out, err = chat("hello\n\nmore\n/exit\nnever\n")
    assert (code, out) == (0, f"{first}\n{second}\n")
    lines = err.splitlines()
    assert lines[0] == f"sampling: temperature 0.0, seed 0, max_tokens {LENGTH} (the model sets none)"
    assert len(lines) == 3
    figures = rf"{LENGTH} tokens, \d+ tokens/s · .*\(suffix.*prompt tokens read"
    assert all(re.match(figures, line) for line in lines[1:])
    assert chat("hello\nmore")[:2] == (0, out)  # the end of the input ends it too


def test_the_system_prompt_and_a_template_of_ones_own(chat, told, tmp_path):
    assert chat("hello\n", "--system", "be kind")[1] == told("s:be kind;u:hello;a:") + "\n"
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[-1]['content'] }}!", encoding="utf-8")
    assert chat("hello\n", "--chat-template", str(file))[1] == told("hello!") + "\n"


def test_a_model_without_a_template_is_one_line(chat, tiny_target):
    code, out, err = chat("hello\n", model=tiny_target)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .* has no chat template: .*--chat-template.*\n", err)


@pytest.mark.parametrize(("lines", "words"), [
    ("/nope\n", "unknown command /nope"),
    ("/set heat 1\n", "unknown sampling option 'heat'"),
    ("/set top_p 3\n", "top_p must be"),
    ("/set n 2\n", "unknown sampling option 'n'"),
    ("/undo\n", "nothing to undo"),
    ("/retry\n", "nothing to answer"),
    ("/trace maybe\n", "on or off"),
    ("/load /no/such/file\n", "cannot read"),
    ("/save\n", "one file name"),
    ("/exit now\n", "takes no argument"),
    ("\udcff\n", "half a surrogate pair"),
])  # fmt: skip
def test_without_a_terminal_what_cannot_be_done_ends_it(chat, lines, words):
    code, out, err = chat(lines)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"sampling: .*\nerror: .*\n", err)
    assert words in err


def test_a_conversation_that_fills_the_context_says_so(chat):
    code, out, err = chat("hello\n" + "x" * 60 + "\n", "--max-model-len", "64")
    assert (code, len(out.splitlines())) == (2, 1)
    assert "max_model_len 64 leaves no room" in err
    assert "context of 20 tokens full" in chat("hello\n", "--max-model-len", "20")[2]
    assert f"ended by max_tokens {LENGTH}" in chat("hello\n")[2]


def test_a_second_turn_reads_only_what_is_new(chat, listen):
    """Counted at the target: a plain round feeds one row, whatever else it is fed is prompt."""
    fed = []
    listen(NativeModel, "forward", lambda self, batch, cache: fed.append(sum(span.count for span in batch.spans)))
    message = "the cat sat on the mat. " * 8
    code, out, err = chat(f"{message}\nand then?\n", "--spec-method", "none", "--no-invariant")
    assert code == 0
    prompts = [rows for rows in fed if rows > 1]
    whole = len(f"u:{message};a:{out.splitlines()[0]};u:and then?;a:")
    assert prompts[0] == len(f"u:{message};a:")
    assert prompts[1] <= len("a;u:and then?;a:") + PAGE_SIZE < whole / 4
    assert [line.split(" · ")[-2] for line in err.splitlines()[1:]] == [
        f"{rows} of {total} prompt tokens read" for rows, total in zip(prompts, (prompts[0], whole))
    ]


TEXT = """# Fruits

Here are *two*:

1. an apple

   with a second paragraph
2. a pear
- and a list

| a | b |
|---|---|
| 1 | 2 |

```python
def f():

    return 1
```
Setext
------
The end.
"""


def test_blocks_that_are_printed_for_good_are_those_of_the_whole_text():
    """Fed a character at a time, against a parse of everything."""
    blocks, rest = [], ""
    for letter in TEXT:
        complete, rest = split(rest + letter)
        if complete:
            blocks.append(complete)
    blocks.append(rest)

    def kinds(text):
        return [token.type for token in MarkdownIt().enable("table").parse(text) if token.level == 0]

    assert "".join(blocks) == TEXT
    assert [kind for block in blocks for kind in kinds(block)] == kinds(TEXT)
    assert len(blocks) == 8


def screen(width=60, **options):
    return Console(file=io.StringIO(), width=width, height=10, highlight=False, **options)


def test_markdown_is_rendered_and_control_characters_are_not_obeyed():
    console = screen(color_system=None)
    view = MarkdownView(console)
    view.INTERVAL = 0.0
    for letter in TEXT + "\nbell\a and \x1b[31mred":
        view.add("plain", letter)
    view.end()
    shown = console.file.getvalue()
    assert "Fruits" in shown
    assert "#" not in shown
    assert "    return 1" in shown
    assert "bell\u2407 and \u241b[31mred" in shown
    assert "\x1b" not in shown
    assert "\a" not in shown


def test_colours_show_what_became_of_every_token(llm, chat_model):
    model = llm({"method": "ngram"}, model=chat_model)
    prompt = model.tokenizer.encode("u:abc abc abc abc;a:")
    params = SamplingParams(temperature=0.0, max_tokens=60)
    console = screen(width=1000, color_system=None)
    job = answer(model.engine, prompt, params, lambda: TraceView(console), trace=True)
    marks = {"accepted": "[{}]", "corrected": "<{}>", "bonus": "+{}+", "plain": "{}"}
    pairs = [pair for round_ in job.trace for pair in zip(round_.origins, round_.tokens)]
    texts = [(kind, model.tokenizer.decode([token], skip_special_tokens=True)) for kind, token in pairs]
    assert {"accepted", "corrected"} <= {kind for kind, _ in pairs}
    assert console.file.getvalue() == "".join(marks[kind].format(text) for kind, text in texts if text) + "\n"


@pytest.mark.parametrize("width", [20, 33])
def test_words_are_on_one_line(width):
    """Whatever pieces they come in, shown by a terminal emulator."""
    noise = random.Random(width)
    words = ["".join(noise.choices("abcdefgh", k=noise.randint(1, 15))) for _ in range(300)]
    text = "".join(word + noise.choice([" "] * 9 + ["\n"]) for word in words)
    console = screen(width, force_terminal=True, color_system="standard")
    view, at = TraceView(console), 0
    while at < len(text):
        size = noise.randint(1, 7)
        view.add(noise.choice(["accepted", "plain"]), text[at : at + size])
        at += size
    view.end()
    shown = pyte.Screen(width, 400)
    pyte.Stream(shown).feed(console.file.getvalue().replace("\n", "\r\n"))
    assert [word for line in shown.display for word in line.split()] == words
    lines = [line.rstrip() for line in shown.display]
    assert all(not line.startswith(" ") for line in lines)


def test_an_answer_that_is_stopped_keeps_what_was_said(llm, chat_model):
    model = llm({"method": "ngram"}, model=chat_model)
    file = io.StringIO()
    asked = iter([False] * 5 + [True] * 9)
    prompt = model.tokenizer.encode("u:hello;a:")
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    job = answer(model.engine, prompt, params, lambda: PlainView(file), stopped=lambda: next(asked))
    whole = model.generate("u:hello;a:", params)[0].outputs[0].text
    assert job.finish.reason == "abort"
    assert 0 < len(job.text) < len(whole)
    assert whole.startswith(job.text)
    assert file.getvalue() == job.text + "\n"
    model.engine.check()


def talk(**options):
    return ChatCommands(Conversation(SamplingParams(temperature=0.0, seed=0), **options), {"model": "m"})


def test_commands_change_options_and_history(tmp_path):
    commands = talk(system="be kind")
    state = commands.conversation
    state.say("user", "one")
    state.say("assistant", "two")
    commands.run("/set temperature 0.7")
    commands.run("/set stop END")
    commands.run('/set logit-bias {"5": -1.5}')
    assert (state.params.temperature, state.params.stop, state.params.logit_bias) == (0.7, ("END",), {5: -1.5})
    refused(ConfigError, "top_k", commands.run, "/set top_k many")
    shown = commands.run("/show").text
    assert "temperature 0.7" in shown
    assert "be kind" in shown
    assert "model" in shown
    commands.run("/set temperature")
    commands.run("/set stop")
    assert (state.params.temperature, state.params.stop) == (0.7, ())  # the model's, or ours

    file = tmp_path / "a talk.json"
    assert "3 messages" in commands.run(f"/save '{file}'").text
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    commands.run("/undo")
    assert state.turns == []
    commands.run("/system")
    assert state.messages() == []
    commands.run(f'/load "{file}"')
    assert state.messages() == read_messages(file)
    commands.run("/system be brief\nvery brief")
    assert state.messages()[0] == {"role": "system", "content": "be brief\nvery brief"}
    commands.run("/trace on")
    assert state.trace
    commands.run("/reset")
    assert [message["role"] for message in state.messages()] == ["system"]
    assert commands.run("/exit").end
    listed = commands.run("/help").text
    assert all(f"/{name} {usage}".rstrip() in listed for name, (usage, _) in COMMANDS.items())


def test_retry_takes_the_next_seed_where_one_matters(chat, told):
    commands = talk()
    commands.conversation.say("user", "one")
    commands.conversation.say("assistant", "two")
    reply = commands.run("/retry")
    assert (reply.ask, commands.conversation.params.seed, len(commands.conversation.turns)) == (True, 0, 1)
    assert "temperature 0" in reply.text
    commands.conversation.params = SamplingParams(temperature=0.9, seed=-1)
    assert (commands.run("/retry").text, commands.conversation.params.seed) == ("", -1)
    for seed, after in ((-2, 2**64 - 1), (2**64 - 1, 0)):  # -1 would draw a fresh one
        commands.conversation.params = SamplingParams(temperature=0.9, seed=seed)
        assert commands.run("/retry").text == f"seed is {after}"
    hot = {"temperature": 0.9}
    expected = [told("u:hello;a:", **hot), told("u:hello;a:", **hot, seed=1)]
    assert chat("hello\n/retry\n", "--temperature", "0.9")[1].splitlines() == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("line", ["/save ~nobody-here/talk", "/save FOLDER/talk", f"/set seed {'9' * 5000}"])
def test_a_command_that_cannot_be_done_changes_nothing(tmp_path, line):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\udcff"}]  # no UTF-8, from a terminal
    commands = talk(turns=[*turns])
    commands.conversation.params = SamplingParams(temperature=0.7, seed=2**64 - 1)
    refused(ConfigError, None, commands.run, line.replace("FOLDER", str(tmp_path)))
    assert (commands.conversation.turns, commands.conversation.params.seed) == (turns, 2**64 - 1)


BAD = ["{", "{}", "[" * 100_000, "9" * 5000, '[{"role": "user"}]', '[{"role": "user", "content": "x"}]']


@pytest.mark.parametrize("content", [*BAD, '[{"role": "assistant", "content": "x"}]'], ids=lambda text: text[:40])
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, content):
    file = tmp_path / "file.json"
    file.write_text(content, encoding="utf-8")
    commands = talk(system="be kind", turns=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    refused(ForerunError, r"file\.json", commands.run, f"/load {file}")
    assert len(commands.conversation.messages()) == 3


def test_a_failed_answer_leaves_the_messages_as_they_were(chat, monkeypatch):
    monkeypatch.setattr("forerun.cli.chat_session.answer", Mock(side_effect=RequestError("no")))
    seen = []
    made = Conversation.__init__
    monkeypatch.setattr(Conversation, "__init__", lambda self, *a, **n: (made(self, *a, **n), seen.append(self))[0])
    assert chat("hello\n")[0] == 2
    assert seen[0].turns == []


@pytest.mark.parametrize(("lines", "message"), [
    (["one"], "one"),
    (["one\\", "two\\", "three"], "one\ntwo\nthree"),
    (['"""one', "two", "", 'three"""'], "one\ntwo\n\nthree"),
    (['"""', "one \\", '"""'], "one \\"),
    (['"""one"""'], "one"),
    (["one", "/two"], "one"),
    (['"""/exit"""'], "/exit"),
    ([" /exit"], " /exit"),
    (["/usr/bin\n/exit"], "/usr/bin\n/exit"),
])  # fmt: skip
def test_messages_of_several_lines(lines, message):
    left = iter(lines)
    assert parse(read_lines(lambda prompt: next(left))) == (message, False)
    assert list(left) == lines[1:] * (lines[0] == "one")


@pytest.mark.parametrize("text", ["/exit", "/exit\n", "/system be brief\nvery brief", "/nope"])
def test_commands_are_told_from_messages(text):
    assert parse(text) == (text, True)


def test_the_flags_are_those_of_generate():
    def flags(command):
        return {option for parameter in load(command).params for option in parameter.opts}

    missing = {f"--{name.replace('_', '-')}" for name in NOT_HERE if name != "bad_words_ids"}
    missing |= {"--beams", "--early-stopping", "--length-penalty"}
    missing |= {"prompt", "--json", "--trace-html", "--logprobs-mode"}
    assert flags("generate") - flags("chat") == missing
    assert flags("chat") - flags("generate") == {"--system", "--chat-template", "--generation-config"}
    assert flags("chat") - flags("run") == {"--model", "--trace"}
    assert flags("run") - flags("chat") == {"model", "question"}


@pytest.mark.parametrize(("before", "completed"), [
    ("/s", {"/set", "/show", "/save", "/system"}),
    ("/set temp", {"temperature"}),
    ("/trace ", {"on", "off"}),
    ("/r", {"/reset", "/retry", "/regenerate"}),
    ("say /s", set()),
    ("hello", set()),
])  # fmt: skip
def test_commands_are_completed(before, completed):
    words = Words(completions()).get_completions(Document(before), CompleteEvent())
    assert {word.text for word in words} == completed


def test_other_names_of_commands():
    commands = talk()
    commands.conversation.say("user", "one")
    assert commands.run("/regenerate").ask
    commands.run("/clear")
    assert commands.conversation.turns == []
    assert commands.run("/bye").end
    assert commands.run("/?").text == commands.run("/help").text
    refused(ConfigError, "/bye takes no argument", commands.run, "/bye now")


@pytest.mark.parametrize(("written", "options", "source"), [
    ({}, {"temperature": 0.7, "min_p": 0.05}, "the model sets none"),
    ({"temperature": 0.9, "top_k": 5, "do_sample": True}, {"temperature": 0.9, "top_k": 5}, "the model's own"),
    ({"top_p": 0.5, "repetition_penalty": 1.3}, {"temperature": 1.0, "top_p": 0.5, "repetition_penalty": 1.3},
     "the model's own"),
])  # fmt: skip
def test_the_models_own_sampling_settings(capsys, monkeypatch, told, chat_model, tmp_path, written, options, source):
    model = tmp_path / "model"
    shutil.copytree(chat_model, model)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **written}))

    def ask(*flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        assert run(["chat", "--model", str(model), "--max-tokens", str(LENGTH), *flags]) == 0
        return capsys.readouterr()

    said, answers = ask(), set()
    assert said.err.splitlines()[0].endswith(f"({source})")
    for flags, changes in [
        ((), {}),
        (("--temperature", "0.3"), {"temperature": 0.3}),
        (("--top-k", "3"), {"top_k": 3}),
    ]:
        printed = ask(*flags).out
        assert printed == told("u:hello;a:", **options | changes) + "\n"
        answers.add(printed)
    assert ask("--generation-config", "vllm").out == told("u:hello;a:", temperature=1.0) + "\n"
    assert len(answers) > 1


def test_a_conversation_may_fill_the_context(capsys, monkeypatch, chat_model):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run(["chat", "--model", chat_model, "--ignore-eos", "--max-model-len", "300"]) == 0
    assert "290 tokens" in capsys.readouterr().err  # behind u:hello;a:


@pytest.mark.parametrize(("question", "piped", "message"), [
    (["two", "words"], "", "two words"),
    ([], "piped\n", "piped\n"),
    (["Sum up:"], "/exit\n", "Sum up:\n\n/exit\n"),
])  # fmt: skip
def test_run_answers_one_question(capsys, monkeypatch, told, chat_model, question, piped, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    flags = ["--max-tokens", str(LENGTH), "--temperature", "0", "--min-p", "0", "--system", "be kind"]
    assert run(["run", chat_model, *question, *flags]) == 0
    assert capsys.readouterr().out == told(f"s:be kind;u:{message};a:") + "\n"


def test_run_without_a_question_is_one_line(capsys, monkeypatch, chat_model):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert run(["run", chat_model]) == 2
    assert re.fullmatch(r"error: no question: .*\n", capsys.readouterr().err)


def test_a_wrong_generation_config_is_one_line(chat):
    code, out, err = chat("hello\n", "--generation-config", "other")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: --generation-config must be auto or vllm.*\n", err)
