"""``python docs/picture.py``: a coloured answer of SmolLM2 (``forerun fetch smollm2``) as ``figures/answer.svg``."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from forerun import LLM, SamplingParams
from forerun.cli import trace
from forerun.cli.chat_session import TraceView
from forerun.engine.auto import choose

QUESTION = "What does a compiler do?"
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Rich's SVG asks another server for its font."""


def picture(llm: LLM, question: str, max_tokens: int) -> str:
    """A chat model's answer as an SVG: the tokens in the colours of ``forerun chat --trace``, and what they mean."""
    console = Console(
        record=True, width=76, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="\n\n")
    (answer,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    console.print(f"> {question}\n", style="bold")
    view = TraceView(console)
    told = [part for made in answer.outputs[0].trace or [] for part in trace.parts(made, llm.tokenizer)]
    left = len(answer.outputs[0].text)  # the stop text is behind it
    for kind, text in told:
        if kind != trace.REJECTED:
            view.add(kind, text[:left])
            left -= len(text[:left])
    view.end()
    console.print()
    console.print(trace.legend(plain=False))
    metrics = answer.metrics
    drafted = f"{metrics.num_accepted_draft_tokens} of {metrics.num_draft_tokens} drafted tokens were accepted"
    console.print(f"\n{drafted}; {metrics.tokens_per_round:.2f} tokens a round", style="dim")
    svg = console.export_svg(title=f"forerun chat: {Path(llm.model.info.name).name}", unique_id="answer")
    return FONT.sub("", svg)


if __name__ == "__main__":
    fixed = {**choose("smollm2"), "length": "fixed"}  # what is drafted does not depend on the clock
    with LLM("smollm2", trace=True, speculative_config=fixed) as llm:
        (Path(__file__).parent / "figures" / "answer.svg").write_text(picture(llm, QUESTION, 120), encoding="utf-8")
