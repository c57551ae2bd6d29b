"""Structured output: masks against independent oracles, whole numbers beyond a float64 and texts that a tokenizer does
not spell by itself among them, and the same text whatever is drafted."""

import copy
import json
import random
import re
import string
from dataclasses import replace

import jsonschema_rs
import pytest
import torch
from forms import HERMES
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from running import closed
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken

from forerun import LLM, ConfigError, RequestError, SamplingParams, StructuredOutputsParams
from forerun.core.request import RequestState
from forerun.engine.grammar import GrammarCompiler
from forerun.serve.schema import ChatRequest
from forerun.serve.tools import tool_grammar
from gguf_files import write_model
from harness import until_idle
from refusals import refused

PERSON = {
    "name": {"type": "string", "maxLength": 6},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
}
SCHEMA = closed(PERSON, "name", "age", "tags")
GRAMMARS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=r"[a-z]{3,8} = \d{1,4}"),
    StructuredOutputsParams(choice=["alpha", "beta", "alphabet"]),
    StructuredOutputsParams(grammar='start: "yes" | "no" ("!")+'),
]
LANGUAGE = ("ab", "abba", "abc", "ba c", "b\u00e9", "b\u00e8b")


@pytest.fixture(scope="module")
def compiler(served):
    return served.engine.grammars


def sequence_of(served, output):
    prompt = served.tokenizer.encode("x = ")
    return RequestState(0, [*prompt, *output], len(prompt), SamplingParams(), 0)


def ids(mask):
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.flatten().nonzero()[:, 0].tolist())


def spellings(served):
    """Every token's bytes, from the tokenizer's own tables."""
    from tokenizers.pre_tokenizers import ByteLevel

    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    assert set(table) == set(ByteLevel.alphabet())
    vocabulary = served.tokenizer.get_vocab()
    special = set(served.tokenizer.all_special_ids)
    return {i: bytes(table[c] for c in token) for token, i in vocabulary.items() if i not in special}


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_masks_permit_exactly_the_language(served, compiler, data):
    """Walk a finite language by whole tokens: a token is permitted iff some sentence goes on with its bytes. Where the
    next byte is certain, the tokenizer's own spelling of the certain text is enough."""
    constraint = compiler.start(StructuredOutputsParams(choice=LANGUAGE))
    tokens = spellings(served)
    sentences = [sentence.encode() for sentence in LANGUAGE]
    eos = served.tokenizer.eos_token_id
    path = []
    committed = 0
    while True:
        done = b"".join(tokens[t] for t in path)
        expected = {t for t, b in tokens.items() if any(s.startswith(done + b) for s in sentences) and b}
        expected |= {eos} if done in sentences else set()
        sequence = sequence_of(served, path[:committed])
        mask = constraint.allowed(sequence, path[committed:])
        assert mask is not None
        permitted = ids(mask)
        following = {s[len(done) : len(done) + 1] for s in sentences if s.startswith(done)}
        if len(following) > 1:
            assert permitted == expected
        assert permitted
        assert permitted <= expected
        stray = data.draw(st.sampled_from(sorted(tokens)))
        if stray not in expected and expected != {eos}:
            assert constraint.allowed(sequence, [*path[committed:], stray]) is None
        choices = sorted(permitted - {eos})
        if not choices:
            return
        path.append(data.draw(st.sampled_from(choices)))
        committed = data.draw(st.integers(committed, len(path)))


def test_tentative_tokens_can_be_taken_back(served, compiler):
    constraint = compiler.start(StructuredOutputsParams(regex="ab|ac"))
    a, b, c = (served.tokenizer.encode(letter)[0] for letter in "abc")
    sequence = sequence_of(served, [a, b])
    sequence.tentative = 1
    assert ids(constraint.allowed(sequence, [])) == {served.tokenizer.eos_token_id}
    sequence.tokens[-1] = c
    assert ids(constraint.allowed(sequence, [])) == {served.tokenizer.eos_token_id}
    sequence.tokens.pop()
    sequence.tentative = 0
    assert {b, c} <= ids(constraint.allowed(sequence, []))


def test_forced_tokens_spell_what_is_certain(served, compiler):
    constraint = compiler.start(StructuredOutputsParams(json={"const": {"certain": [1, 2, 3]}}))
    sequence = sequence_of(served, [])
    forced = constraint.forced(sequence, 100)
    assert served.tokenizer.decode(forced, skip_special_tokens=True) == '{"certain": [1, 2, 3]}'
    assert constraint.forced(sequence, 3) == forced[:3]
    assert compiler.start(StructuredOutputsParams(regex="[a-z]+")).forced(sequence, 5) == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("expected", GRAMMARS, ids=["json", "regex", "choice", "grammar"])
def test_the_same_text_with_and_without_drafts(served, expected, temperature):
    """Penalties, top-k and bias beside the grammar; a stop inside an accepted block; every loaded drafter."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=90, structured_outputs=expected, **more)
        for seed, more in enumerate([{}, {"top_k": 20}, {"frequency_penalty": 0.7, "top_p": 0.9}])
    ]
    prompt = served.tokenizer.encode("data = ")
    answers = {}
    for method in (None, *served.engine.router.drafters):
        jobs = [served.engine.add(prompt, p, speculate=method is not None, method=method)[0] for p in params]
        until_idle(served.engine)
        answers[method] = [(job.text, job.output_ids) for job in jobs]
        if method == "pattern" and "json" in expected.key[0]:
            assert all(job.metrics.draft_acceptance_rate > 0.5 for job in jobs)
    assert all(result == answers[None] for result in answers.values())
    for text, _ in answers[None]:
        matches(expected, text)


def matches(expected, text):
    if expected.json is not None:
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 6
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"red", "green", "blue"}
    elif expected.regex is not None:
        assert re.fullmatch(expected.regex, text)
    elif expected.choice is not None:
        assert text in expected.choice
    else:
        assert re.fullmatch("yes|no!+", text)


@pytest.mark.parametrize("accept", ["token", "block", "recursive", "traversal"])
def test_rules_that_compare_p_and_q_keep_the_grammar(model_folder, accept):
    options = {"method": "draft_model", "model": str(model_folder), "num_speculative_tokens": 3, "accept": accept}
    llm = LLM(str(model_folder), speculative_config=options, max_num_seqs=4)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=90, structured_outputs=expected)
        for seed, expected in enumerate(GRAMMARS)
    ]
    for expected, answer in zip(GRAMMARS, llm.generate(["data = "] * len(params), params)):
        assert answer.outputs[0].finish_reason == "stop"
        matches(expected, answer.outputs[0].text)


@pytest.mark.parametrize("schema", [True, "true", {"type": ["object", "number"]}])
def test_a_schema_that_is_true_permits_any_value(served, compiler, schema):
    """Each value is followed to its end; a mask that permits what is not JSON does not."""
    constraint = compiler.start(StructuredOutputsParams(json=schema))
    eos = served.tokenizer.eos_token_id
    values = [{"a": [1, None, {"b": "c"}]}, -2.5, "text", [], ["x", False], True, None]
    for value in values:
        taken = schema in (True, "true") or isinstance(value, (dict, float))
        path = [*served.tokenizer.encode(json.dumps(value)), eos]
        sequence = sequence_of(served, [])
        followed = 0
        while followed < len(path):
            mask = constraint.allowed(sequence, path[:followed])
            if mask is None or path[followed] not in ids(mask):
                break
            followed += 1
        assert (followed == len(path)) == taken, (value, followed)
    brace = served.tokenizer.encode("}")[0]
    assert brace not in ids(constraint.allowed(sequence_of(served, []), []))


def test_end_of_text_is_all_that_follows_the_end(served):
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, structured_outputs={"choice": ["yes"]})
    output = served.generate(["x = "], params)[0].outputs[0]
    assert output.text == "yes"
    assert len(output.token_ids) == 12
    assert set(output.token_ids[-8:]) == {served.tokenizer.eos_token_id}


@pytest.mark.parametrize(("expected", "message"), [
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"json": "{"}, "EOF"),
    ({"json": False}, "no answer can match the schema false"),
    ({"json": " false\n"}, "no answer can match the schema false"),
    ({"json": {"type": "array", "minItems": 3, "maxItems": 1}}, "Unsatisfiable"),
    ({"json": {"uniqueItems": True}}, "Unimplemented keys"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "NoExtension"),
    ({"grammar": "start: missing"}, "unknown name"),
    ({"grammar": "start: @missing", "schemas": {"a": {}}}, "missing"),
    ({"grammar": "start: @a", "schemas": {"a": {"type": "nonsense"}}}, "Invalid type: nonsense"),
])  # fmt: skip
def test_a_grammar_that_cannot_be_kept_is_refused(served, expected, message):
    refused(RequestError, message, served.generate, ["x = "], SamplingParams(structured_outputs=expected))


@pytest.mark.parametrize("expected", [
    {},
    {"json_object": False},
    {"regex": "a", "choice": ["b"]},
    {"json": False, "choice": ["b"]},
    {"choice": []},
    {"choice": [""]},
    {"json": 5},
    {"json": 0},
    {"xml": "a"},
    {"schemas": {"a": {}}},
    {"choice": ["a"], "schemas": {"a": {}}},
    {"grammar": "start: @a", "schemas": [{}]},
])  # fmt: skip
def test_wrong_options(expected):
    refused(ConfigError, "structured_outputs", SamplingParams, structured_outputs=expected)


def words(count, seed):
    source = random.Random(seed)
    return ["".join(source.choices(string.ascii_lowercase, k=8)) for _ in range(count)]


def test_what_is_kept_stays_within_its_bytes(served):
    """By the lengths of the texts alone, whatever their number and order; the latest stay."""
    memory = 60 << 20
    info = served.engine.model.info
    small = GrammarCompiler(served.tokenizer, info.vocab_size, info.eos_ids, longest=20000, memory=memory)
    source = random.Random(0)
    asked = []
    for turn in range(40):
        expected = StructuredOutputsParams(choice=words(source.choice([1, 10, 300, 1200]), turn % 12))
        small.compile(expected)
        asked.append(expected.key)
        latest = list(dict.fromkeys(reversed(asked)))
        kept, held = [], 0
        for key in latest:
            size = len(key[1])
            held += 1024 * (2000 + size // 2) + 1536 * (8192 + size // 2) + 128 * size
            if held > memory:
                break
            kept.append(key)
        assert [*small._cache] == kept[::-1]
        assert small.cached_bytes == sum(cost for _, cost in small._cache.values()) <= memory
    assert 1 < len(small._cache) < 6
    with pytest.raises(RequestError, match="bytes exceed max_grammar_bytes 20000"):
        small.compile(StructuredOutputsParams(choice=words(3000, 0)))
    none = GrammarCompiler(served.tokenizer, info.vocab_size, info.eos_ids, memory=0)
    assert none.start(GRAMMARS[2]).allowed(sequence_of(served, []), []) is not None
    assert (none.cached_bytes, len(none._cache)) == (0, 0)


def test_requests_that_wait_hold_no_matcher(served, compiler):
    waiting = [compiler.start(GRAMMARS[0]) for _ in range(3)]
    assert not any({"_start", "_matcher"} & set(vars(constraint)) for constraint in waiting)
    waiting[0].allowed(sequence_of(served, []), [])
    assert "_matcher" in vars(waiting[0])


@pytest.mark.parametrize("text", ["start: r0\n{rules}", "start: R0\n{upper}", "root ::= r0\n{gbnf}"])
def test_rules_without_end_are_refused(compiler, text):
    """llguidance descends from rule to rule on the stack: some thousands end the process."""

    def chain(count, form, last):
        return "\n".join([*(form.format(i, i + 1) for i in range(count)), last.format(count)])

    def grammar(count):
        forms = {
            "rules": chain(count, "r{}: r{}", 'r{}: "a"'),
            "upper": chain(count, "R{}: R{}", 'R{}: "a"'),
            "gbnf": chain(count, "r{} ::= r{}", 'r{} ::= "a"'),
        }
        return StructuredOutputsParams(grammar=text.format(**forms))

    refused(RequestError, "more than 1000 rules", compiler.compile, grammar(999))
    compiler.compile(grammar(100))


def test_a_lexer_that_is_full_is_made_anew(served, monkeypatch):
    """The same texts as with all the states that it could want, drafts or not; other requests go on."""
    requested = StructuredOutputsParams(regex=r"(\p{L}|\d| ){1,2000}=")
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured_outputs=requested, ignore_eos=True)
        for seed in range(4)
    ]
    prompts = ["x = "] * len(params)

    def texts(**options):
        return [output.outputs[0].token_ids for output in served.generate(prompts, params, **options)]

    expected = texts(speculate=False)
    made = []
    compile_anew = GrammarCompiler._compile

    def few(self, kind, text, cost):
        made.append(kind)
        return compile_anew(self, kind, text, replace(cost, states=1500))

    monkeypatch.setattr(GrammarCompiler, "_compile", few)
    for options in ({"speculate": False}, {}):
        served.engine.grammars._drop(requested.key)
        made.clear()
        assert texts(**options) == expected
        assert len(made) > 1
    served.engine.grammars._drop(requested.key)
    tight = [StructuredOutputsParams(regex=r"(\p{L}|\d| ){1,2000}=?"), requested]
    monkeypatch.setattr(
        GrammarCompiler,
        "_compile",
        lambda self, kind, text, cost: compile_anew(
            self, kind, text, replace(cost, states=330 if text.endswith("?") else cost.states)
        ),
    )
    both = [replace(params[0], structured_outputs=each) for each in tight]
    ended = served.generate(prompts[:2], both, speculate=False)
    assert ended[0].outputs[0].finish_reason == "error"
    assert "too many states" in str(ended[0].outputs[0].stop_reason)
    assert ended[1].outputs[0].token_ids == expected[0]
    served.engine.grammars._drop(tight[0].key)


def test_a_matcher_that_breaks_ends_its_request_only(served, monkeypatch):
    """Grammars have limits that only a text can reach; then the text ends with the reason."""
    good = SamplingParams(max_tokens=6, seed=1)
    expected = served.generate(["x = "], good)[0].outputs[0].token_ids
    start = GrammarCompiler.start

    def broken(self, requested):
        constraint = start(self, requested)
        constraint._matcher.consume_tokens([5] * 3)
        return constraint

    monkeypatch.setattr(GrammarCompiler, "start", broken)
    bad = SamplingParams(max_tokens=6, seed=1, structured_outputs={"choice": ["yes"]})
    answers = served.generate(["x = "] * 2, [bad, good])
    assert answers[0].outputs[0].finish_reason == "error"
    assert str(answers[0].outputs[0].stop_reason).startswith("the grammar: ")
    assert answers[1].outputs[0].token_ids == expected


BIG, LAST = 9007199254740993, 1098765432109876543
IDS = {"type": "integer", "enum": [BIG, LAST, 7]}


def permits(served, compiler, expected, text):
    """Whether a grammar permits this text, and its end behind it."""
    constraint = compiler.start(expected)
    path = [*served.tokenizer.encode(text), served.tokenizer.eos_token_id]
    sequence = RequestState(0, [1], 1, SamplingParams(), 0)
    return constraint.allowed(sequence, path) is not None


CASES = [
    ({"const": BIG}, [BIG, BIG - 1, BIG + 1, str(BIG)]),
    ({"enum": [BIG, "a", None, 2]}, [BIG, "a", None, 2, BIG + 1, "b"]),
    ({"enum": [BIG, "a", True, 1.5], "type": ["integer", "boolean"]}, [BIG, "a", True, 1.5, False]),
    ({"const": {"a": [BIG, {"b": -LAST}], "c": "\u00e9\n"}}, [{"a": [BIG, {"b": -LAST}], "c": "\u00e9\n"}]),
    ({"type": "integer", "minimum": BIG, "maximum": BIG + 12}, [BIG - 1, BIG, BIG + 12, BIG + 13, -BIG]),
    ({"type": ["integer", "null"], "exclusiveMinimum": LAST}, [LAST, LAST + 1, 10 * LAST, None, 10**30, 0, -1]),
    ({"type": "integer", "minimum": -LAST, "exclusiveMaximum": BIG}, [-LAST - 1, -LAST, -1, 0, BIG - 1, BIG]),
    ({"type": "integer", "maximum": -LAST}, [-LAST + 1, -LAST, -(10**30), 0]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [-1, 0, BIG, 2**63 - 1]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**63), 2**63 - 1, BIG, 0]),
    ({"const": 2**64 - 1}, [2**64 - 1, 2**64]),
    (closed({"id": IDS, "b": {"type": "boolean"}}, "id", "b"),
     [{"id": BIG, "b": True}, {"id": BIG}, {"id": BIG - 1, "b": True}]),
    (closed({"a": {"const": 1}, "id": IDS, "b": {"const": 2}}, "id"),
     [{"id": LAST}, {"a": 1, "id": LAST}, {"id": 7, "b": 2}, {"a": 1, "id": BIG, "b": 2}, {"a": 1}, {},
      {"id": LAST + 1}]),
    (closed({"a": IDS, "b": IDS, "c": {}}),
     [{}, {"a": 7}, {"b": BIG}, {"a": 7, "c": [1]}, {"b": 7, "c": "x"}, {"a": 8}]),
    ({"type": "array", "items": IDS, "minItems": 1, "maxItems": 2}, [[], [BIG], [BIG, LAST], [BIG, 7, 7], [BIG + 2]]),
    ({"type": "array", "items": IDS}, [[], [BIG], [BIG, LAST, 7, 7], [8]]),
    ({"type": "array", "items": IDS, "maxItems": 1}, [[], [BIG], [BIG, LAST]]),
    ({"anyOf": [IDS, {"type": "array", "items": {"type": "string"}}]}, [BIG, ["a"], ["b", "c"], [BIG], 8]),
    ({"$ref": "#/$defs/node", "$defs": {"id": IDS, "name": {"enum": ["x", "y"]}, "node": closed(
        {"id": {"$ref": "#/$defs/id"}, "name": {"$ref": "#/$defs/name"}, "next": {"$ref": "#/$defs/node"}}, "id")}},
     [{"id": BIG}, {"id": BIG, "name": "x", "next": {"id": LAST, "next": {"id": 7}}}, {"id": 8},
      {"id": 7, "name": "z"}]),
    (closed({"default": {"const": BIG}, "any": {}}, "default"), [{"default": BIG}, {"default": BIG - 1}]),
    (closed({"n": {"type": "integer", "default": BIG}}), [{"n": 3}, {}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "values"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("way", ["json", "text", "tools"])
def test_what_is_valid_is_permitted_and_nothing_else(served, compiler, schema, values, way):
    expected = StructuredOutputsParams(json=json.dumps(schema) if way == "text" else schema)
    if way == "tools":
        expected = StructuredOutputsParams(grammar="start: @a", schemas={"a": schema})
    valid = [jsonschema_rs.validator_for(schema).is_valid(value) for value in values]
    result = [permits(served, compiler, expected, json.dumps(value, ensure_ascii=False)) for value in values]
    assert result == valid
    assert any(valid)


def test_ranges_are_those_of_python(served, compiler):
    source = random.Random(0)
    for _ in range(60):
        size = source.choice([10, 10**3, 10**17, 10**19, 10**24])
        low, high = sorted(source.randint(-size, size) for _ in range(2))
        schema = {"type": "integer", "minimum": low, "maximum": high}
        both = {"anyOf": [schema, {"const": BIG}]}
        near = {end + step for end in (low, high, 0, 10 ** len(str(abs(low)))) for step in (-1, 0, 1)}
        near |= {source.randint(-2 * size, 2 * size) for _ in range(5)}
        for value in near:
            expected = low <= value <= high or value == BIG
            saturated = abs(value) >= 2**63
            result = permits(served, compiler, StructuredOutputsParams(json=both), str(value))
            assert result == expected or (saturated and not result), (low, high, value)


@pytest.mark.parametrize(("schema", "message"), [
    ({"allOf": [{"const": BIG}]}, "not kept in a schema of allOf"),
    ({"type": "integer", "minimum": BIG, "multipleOf": 3}, "not kept beside multipleOf"),
    ({"type": "number", "minimum": BIG}, "not kept in a schema of type, minimum"),
    ({"type": "integer", "minimum": BIG, "maximum": 3}, "no integer is at least"),
    ({"enum": [BIG], "type": "string"}, "no value of the enum has its type"),
    ({"properties": {"a": IDS}, "patternProperties": {"b": {}}}, "not kept beside patternProperties"),
    ({"properties": {"a": IDS}, "additionalProperties": IDS}, "additionalProperties that are a schema"),
    ({"properties": {"a": IDS}, "required": ["b"]}, "required properties without a schema"),
    ({"properties": {"a": IDS, "b": {"$ref": "#"}}}, "must name one of the root's"),
    ({"properties": [IDS]}, "must be of another type than list"),
    ({"properties": {"a": IDS, "b": 5}}, "is no schema"),
    ({"enum": BIG}, "must be of another type than int"),
    (BIG, "must be an object"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(served, schema, message):
    with pytest.raises(RequestError, match=message):
        served.generate(["x = "], SamplingParams(structured_outputs={"json": json.dumps(schema)}))


def told(llm, prompt, params):
    """The text, and why it ends, which are the same whatever drafts."""
    answers = []
    for method in (None, *llm.engine.router.drafters):
        (job,) = llm.engine.add(prompt, params, speculate=method is not None, method=method)
        until_idle(llm.engine)
        answers.append((job.text, job.output_ids, job.finish.reason))
    assert len(answers) == 4
    assert answers == answers[:1] * 4
    return answers[0][0], answers[0][2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_numbers_with_and_without_drafts(served, temperature):
    schema = closed({"id": IDS, "at": {"type": "integer", "minimum": BIG, "maximum": LAST}}, "id", "at")
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=90, structured_outputs={"json": schema})
    text, _ = told(served, [5], params)
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text))


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPOKEN = ["<tool_call>", "<think>", "[MARK]"]
TOKENS = [*SPECIAL, *SPOKEN, *sorted(ByteLevel.alphabet()), "th", "Ã©"]
TEXTS = [*SPECIAL, *SPOKEN, "re\u0301sume\u0301", "\u1112\u1161\u11ab", "\u212b", "<|im_<|im_end|>end|>", "\u00e9"]


def shapes(text):
    """Structured outputs that need the text, and every answer that meets them."""
    schema = closed({text: {"const": text}}, text)
    return [
        ({"choice": [f"a{text}b"]}, [f"a{text}b"]),
        ({"choice": [f"a{text}b", f"a{text}c", "b"]}, [f"a{text}b", f"a{text}c", "b"]),
        ({"json": {"enum": [text, f"{text}!"]}}, [json.dumps(end, ensure_ascii=False) for end in (text, f"{text}!")]),
        ({"json": schema}, [json.dumps({text: text}, ensure_ascii=False)]),
    ]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A random model whose tokenizer is like Qwen's: NFC, added tokens special and not. A draft model's trees."""
    kinds = [3] * len(SPECIAL) + [4] * len(SPOKEN) + [1] * (len(TOKENS) - len(SPECIAL) - len(SPOKEN))
    vocabulary = {"pre": "qwen2", "tokens": TOKENS, "token_type": kinds, "merges": ["t h", "Ã ©"], "eos_token_id": 2}
    changes = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | {"llama.context_length": 512}
    path = tmp_path_factory.mktemp("spelled") / "model.gguf"
    path = str(write_model(path, changes, extra={"token_embd.weight": (len(TOKENS), 32)}))
    drafters = [
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "draft_model", "model": path, "tree": [3, 2, 1]},
        {"method": "pattern"},
    ]
    return LLM(path, speculative_config=drafters, max_num_seqs=4)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_must_come_comes_whatever_drafts(llm, text, temperature):
    for expected, good in shapes(text):
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=80, skip_special_tokens=False, structured_outputs=expected
        )
        text, reason = told(llm, llm.tokenizer.encode("the text: "), params)
        assert text in good
        assert reason == "stop"


@pytest.mark.parametrize("committed", [1, 3, 5])
def test_a_committed_token_that_is_not_permitted_is_an_error_at_once(llm, committed):
    """An answer that goes on behind tokens which its grammar does not permit, as after another replica's loss."""
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["abcd"]})
    x = llm.tokenizer.encode("x")
    (job,) = llm.engine.add([5], params, committed=[*llm.tokenizer.encode("abcd")[: committed - 1], *x])
    until_idle(llm.engine)
    assert job.finish.reason == "error"
    assert str(job.finish.stopped_by).startswith("the grammar: ")
    assert len(job.output_ids) == committed


@pytest.mark.parametrize("several", [False, True])
def test_markers_of_calls_are_the_special_tokens_that_they_are_called(llm, several):
    tool = {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}}}}
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "parallel_tool_calls": several}
    body = ChatRequest.model_validate({**given, "tool_choice": "required"})
    markers = ["<tool_call>", "</tool_call>"]
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in markers], special_tokens=True)
    begin, end = tokenizer.convert_tokens_to_ids(markers)
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [eos])
    for special in (dict(zip(markers, (begin, end))), {}):
        shape = tool_grammar(body, HERMES, special)
        assert isinstance(shape, StructuredOutputsParams)
        forced = compiler.start(shape).forced(RequestState(0, [5], 1, SamplingParams(), 0), 200)
        assert tokenizer.decode(forced).startswith('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
        assert (forced[0] == begin, end in forced) == (bool(special), bool(special))
        assert (forced[-1] == eos) == (not several)


@pytest.mark.parametrize("least", [6, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_ends_where_the_grammar_does(llm, least, temperature):
    """As long as the grammar permits more, the end is banned; behind its last text nothing else may come."""
    for expected, longest in (({"choice": ["yes", "no"]}, 3), ({"regex": "a{1,9}"}, 9), ({"json": {"const": True}}, 4)):
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=30, min_tokens=least, structured_outputs=expected
        )
        text, reason = told(llm, [5], params)
        assert reason == "stop"
        assert len(text) >= min(least, longest) or text == "no"
