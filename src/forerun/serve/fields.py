"""What request bodies are made of: texts, unions whose errors are about one member, objects without unknown fields."""

from __future__ import annotations

from functools import cache, partial
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


def _encodable(text: Any) -> Any:
    """JSON can spell half a surrogate pair, which is no text."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the text has half a surrogate pair") from None
    return text


Whole = BeforeValidator(_encodable)
Text = Annotated[str, Whole]


def _integer(value: Any) -> Any:
    """JSON has one kind of numbers: 16.0 is an integer there."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = BeforeValidator(_integer)


def _shape(value: Any) -> str | None:
    """Which member of a union is meant: errors are then about that one alone."""
    if isinstance(value, list):
        first = value[0] if value else None
        return "lists" if isinstance(first, list) else "numbers" if isinstance(first, (int, float)) else "list"
    return {str: "text", dict: "object", bool: "flag"}.get(type(value))


def one_of(what: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="wrong_kind", custom_error_message=f"must be {what}")


Object = Annotated[dict[str, Any], Tag("object")]
ObjectOrText = Annotated[Object | Annotated[Text, Tag("text")], one_of("an object or a text")]


def _absent(why: str, value: Any) -> None:
    if value is not None and value not in ("", [], {}):
        raise ValueError(why)


NOTHING = WithJsonSchema({"enum": [None, "", [], {}]})
Absent = Annotated[None, BeforeValidator(partial(_absent, "this server does not support it: leave it out")), NOTHING]
"""OpenAI's, and without a meaning here: accepted only where it asks for nothing."""
Replaced = Annotated[
    None, BeforeValidator(partial(_absent, "functions are called tools now: send tools, tool_choice and tool_calls")),
    NOTHING,
]  # fmt: skip
"""OpenAI's way to call functions before there were tools."""
IGNORED = "accepted; makes no difference"


class Body(BaseModel):
    """A JSON object without unknown fields or converted types. Null is an optional field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def _optional(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}

    @classmethod
    @cache
    def _integers(cls) -> set[str]:
        kinds = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        return {name for name, kind in kinds.items() if int in (kind, *get_args(kind))}

    @model_validator(mode="before")
    @classmethod
    def _as_json(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional, integers = cls._optional(), cls._integers()
        meant = {name: value for name, value in given.items() if value is not None or name not in optional}
        return {name: _integer(value) if name in integers else value for name, value in meant.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for name in cls._optional() & set(fields):
            about = {key: fields[name].pop(key) for key in ("title", "description", "default") if key in fields[name]}
            kinds = fields[name].get("anyOf", [fields[name]])
            if {"type": "null"} not in kinds and None not in fields[name].get("enum", []):
                fields[name] = {"anyOf": [*kinds, {"type": "null"}]}
            fields[name] |= about
        return schema
