"""Whole numbers beyond a float64 in schemas: exactly the answers that another library calls valid."""

import json
import random

import jsonschema_rs
import pytest

from forerun import RequestError, SamplingParams, StructuredOutputsParams
from forerun.core.request import RequestState

BIG, LAST = 9007199254740993, 1098765432109876543
IDS = {"type": "integer", "enum": [BIG, LAST, 7]}


def closed(properties, *required, **more):
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False, **more}


@pytest.fixture(scope="module")
def compiler(served):
    return served.engine.grammars


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


@pytest.mark.parametrize(
    ("schema", "message"),
    [
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
    ],
)
def test_what_cannot_be_kept_is_refused(served, schema, message):
    with pytest.raises(RequestError, match=message):
        served.generate(["x = "], SamplingParams(structured_outputs={"json": json.dumps(schema)}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_numbers_with_and_without_drafts(served, temperature):
    schema = closed({"id": IDS, "at": {"type": "integer", "minimum": BIG, "maximum": LAST}}, "id", "at")
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=90, structured_outputs={"json": schema})
    answers = []
    for method in (None, *served.engine.router.drafters):
        (job,) = served.engine.add([5], params, speculate=method is not None, method=method)
        while served.engine.busy:
            served.engine.step()
        answers.append(job.text)
    assert answers == answers[:1] * len(answers)
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(answers[0]))
