"""gpt-oss (Harmony, https://cookbook.openai.com/articles/openai-harmony): messages, of which some are to a function."""

from __future__ import annotations

import re

from forerun.engine.schemas import free_text, quoted
from forerun.serve.tools.base import Brackets, ParsedCall, Piece, ToolParser, length_without_marker
from forerun.serve.tools.grammar import CallGrammar, ToolFormat, formats

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
MESSAGE_ENDS = (END, "<|call|>", "<|return|>", START)
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
HEADER_STARTS = (START, CHANNEL, "assistant", " to=")


class HarmonyParser(ToolParser):
    """Parses gpt-oss's messages, each with a header that names a channel and perhaps a recipient.

    The channel ``analysis`` is reasoning, and a message to one of the ``functions`` is a call. Any other is text.
    """

    _channel = ""
    """The channel of the message that is being read, or ``call`` or ``dropped``."""

    def _read_text(self) -> bool:
        """Reads a message's header."""
        buffer = self._buffer
        if not any(buffer.startswith(start) or start.startswith(buffer) for start in HEADER_STARTS):
            self._channel, self._state = "final", self._read_message  # text without a header
            return True
        header, marker, message = buffer.partition(MESSAGE)
        if not marker:
            if self._last:  # a header that was cut off, unless it is text
                self._channel, self._buffer = "final", ""
                if not any(start in buffer for start in HEADER_STARTS):
                    self._emit(buffer, ends=True)
            return False
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        self._channel, self._buffer = channel[1] if channel is not None else "final", message
        self._state = self._read_message
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        if name in self.functions:
            self._channel = "call" if self.parallel or not self.calls else "dropped"
            self._state = self._read_call
        if self._channel == "call":
            self.calls.append(ParsedCall(len(self.calls), name))
        return True

    def _read_call(self) -> bool:
        """Reads the beginning of a call's arguments."""
        begins = self._buffer.lstrip()
        if begins or self._last:
            self._brackets = Brackets()
            self._state = self._read_json if begins.startswith("{") else self._read_message
        return bool(begins) or self._last

    def _read_json(self) -> bool:
        """Reads a call's arguments, whose strings may hold markers."""
        end = self._brackets.end(self._buffer)
        self._emit(self._buffer[:end], ends=end is not None)
        self._buffer = self._buffer[end:] if end is not None else ""
        if end is not None:
            self._channel, self._state = "dropped", self._read_message
        return end is not None

    def _read_message(self) -> bool:
        buffer = self._buffer
        found = [(start, marker) for marker in MESSAGE_ENDS if (start := buffer.find(marker)) >= 0]
        unfinished = len(buffer) if self._last else length_without_marker(buffer, MESSAGE_ENDS)
        end, marker = min(found, default=(unfinished, ""))
        self._emit(buffer[:end], ends=bool(found) or self._last)
        self._buffer = buffer[end:] if marker == START else buffer[end + len(marker) :]
        if found:
            self._state = self._read_text
        return bool(found)

    def _emit(self, text: str, *, ends: bool) -> None:
        """Emits ``text`` of the present message, which ``ends`` with it or goes on."""
        if self._channel == "call":
            call = self.calls[-1]
            begins = not call.arguments and not call.complete
            if ends and not call.arguments:
                text = text or "{}"
            call.arguments += text
            call.complete = call.complete or (ends and call.arguments.endswith("}"))
            if text:
                self._pieces.append(Piece(text, call, begins))
        elif text and self._channel == "analysis":
            self._pieces.append(Piece(text, reasoning=True))
        elif text and not self.calls_only and self._channel != "dropped":
            self._pieces.append(Piece(text))


@formats.register("harmony")
class HarmonyFormat(ToolFormat):
    """gpt-oss makes one call at a time. Its reasoning is a message of its own, before that of the call."""

    markers = (CHANNEL, MESSAGE, *MESSAGE_ENDS, "<|constrain|>")
    in_template = re.compile(r"<\|channel\|>")
    parser = HarmonyParser
    grammar_has_reasoning = True

    def calls(self, grammar: CallGrammar) -> str:
        channel, message, constrain = map(grammar.marker, (CHANNEL, MESSAGE, "<|constrain|>"))

        def header(name: str) -> str:
            to = f" to=functions.{name}"
            first, last = f"{channel} {quoted('commentary' + to)}", f"{quoted(to)} {channel} {quoted('commentary')}"
            return f'({first} | {last}) (" " {constrain}? "json")? {message}'

        return grammar.functions(header)

    def answer(self, grammar: CallGrammar, text: str) -> str:
        channel, message, end, start = map(grammar.marker, (CHANNEL, MESSAGE, END, START))
        if END in grammar.special:
            grammar.rules["thought"] = f"/(?s:.*)/ {end}"
        else:
            grammar.rules["thought"] = "THOUGHT"
            grammar.rules["THOUGHT"] = f"{free_text({}, END)} {end}"
        reasoning = f'({channel} "analysis" {message} thought {start} "assistant")?'
        return f'{reasoning} ({channel} "final" {message} {text} | calls)' if text else f"{reasoning} calls"
