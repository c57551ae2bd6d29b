"""transformers' own ``generate``: plain, assisted and prompt lookup."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, StoppingCriteria, StoppingCriteriaList

from forerun.engine.llm import LLM
from forerun.measure.rounds import Contender, Measured
from forerun.models.files.open import Checkpoint, resolve
from forerun.models.run.base import ModelInfo
from forerun.models.run.hf import read_module
from forerun.sampling.params import SamplingParams
from forerun_lab.peers.outside import peer_facts

PROMPT_LOOKUP_TOKENS = 10


class RoundClock(StoppingCriteria):
    """Never stops; notes when the first tokens were there, so that reading the prompt is left out of the time."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        if self.first is None:
            self.first, self.length = perf_counter(), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class TransformersContender:
    name: str
    model: Any
    info: ModelInfo
    options: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return peer_facts(f"transformers ({self.model.config._attn_implementation})")

    def promises_identity(self, temperature: float) -> bool:
        return False

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        result = Measured()
        for prompt, options in zip(prompts, params, strict=True):
            torch.manual_seed(options.seed or 0)
            ids = torch.tensor([list(prompt)], device=self.model.device)
            clock = RoundClock()
            sampling: dict[str, Any] = {"do_sample": False}
            if options.temperature > 0:
                sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=options.max_tokens if options.ignore_eos else None,
                    max_new_tokens=options.max_tokens,
                    stopping_criteria=StoppingCriteriaList([clock]),
                    pad_token_id=0,
                    **sampling,
                    **self.options,
                )
            ended = perf_counter()
            result.answers.append(output[0, len(self.info.begin(prompt)[0]) :].tolist())
            if clock.first is not None:
                result.tokens += output.shape[1] - clock.length
                result.seconds += ended - clock.first
        return result

    def close(self) -> None:
        self.options.clear()


def transformers_contenders(llm: LLM, draft: str | None) -> list[Contender]:
    """Plain, prompt lookup and, where there is a draft, assisted generation with transformers' own settings."""

    def load(name: Any) -> Any:
        path, dtype = resolve(name), info.dtype
        if path.is_file():  # GGUF, which transformers dequantizes too, but not to the last bit alike
            return read_module(Checkpoint.at(path), dtype, attention=None).to(info.device)
        kind: Any = AutoModelForCausalLM if info.encoder is None else AutoModelForSeq2SeqLM
        return kind.from_pretrained(path, dtype=dtype, use_safetensors=True, trust_remote_code=False).to(info.device)

    info, lookup = llm.model.info, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    model = load(llm.config.model)
    result: list[Contender] = [
        TransformersContender("transformers", model, info),
        TransformersContender("transformers_prompt_lookup", model, info, lookup),
    ]
    if draft is None and llm.config.model.startswith("forerun:"):
        draft = "forerun:draft"
    if draft is not None:
        result.append(TransformersContender("transformers_assisted", model, info, {"assistant_model": load(draft)}))
    return result
