"""Prompts with text after the cursor, against transformers' ids of the strings that each family documents."""

import copy
from itertools import chain

import pytest
from tokenizers import processors
from transformers import CodeLlamaTokenizer

from forerun import LLM, BeamSearchParams, SamplingParams
from forerun.core.errors import ModelError, RequestError
from forerun.models.text.gguf_tokenizer import make_tokenizer
from forerun.models.text.infill import FAMILIES, Hole, Infill, ending
from gguf_files import TOKENS, VOCABULARY
from refusals import refused
from tiny import byte_tokenizer, save_checkpoint, tiny_llama

BEFORE, AFTER = "def area(width):\n    return ", " * width\n\n\nprint(area(3))\n"
CODE = (BEFORE + "width" + AFTER) * 8
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>")
GEMMA = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
SEED = ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")
MISTRAL = ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")
GRANITE = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>", "<filename>")


def tokenizer(special, *, bos=False):
    """Byte-level BPE that learnt a little code, with special tokens."""
    made = byte_tokenizer([CODE], 330, ["<|endoftext|>", "<s>", *special], bos_token="<s>")
    if bos:
        start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        made.backend_tokenizer.post_processor = start
    return made


@pytest.mark.parametrize(("special", "bos", "documented"), [
    (QWEN, False, f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
    (GEMMA, True, f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
    (STARCODER, False, f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"),
    (GRANITE, False, f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"),
    (DEEPSEEK, True, f"<｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{AFTER}<｜fim▁end｜>"),
    (SEED, False, f"<[fim-suffix]>{AFTER}<[fim-prefix]>{BEFORE}<[fim-middle]>"),
    (MISTRAL, True, f"[SUFFIX]{AFTER}[PREFIX]{BEFORE}"),
])  # fmt: skip
def test_the_documented_prompt_of_each_family(special, bos, documented):
    made = tokenizer(special, bos=bos)
    assert Infill(made).prompt(Hole(BEFORE, AFTER)) == made.encode(documented)
    head, tail = documented.split(BEFORE)
    parts = [made.encode(text)[bos * bool(number) :] for number, text in enumerate((head + BEFORE, "wi", tail))]
    assert Infill(made).prompt(Hole(BEFORE, AFTER, begun="wi")) == [*chain(*parts)]


FILES = [("a.py", "import b\n"), ("src/b.py", "width = 3")]


@pytest.mark.parametrize(("special", "documented"), [
    (QWEN, "<|repo_name|>ferry\n<|file_sep|>a.py\nimport b\n<|file_sep|>src/b.py\nwidth = 3\n"
     f"<|file_sep|>main.py\n<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
    (STARCODER, "<repo_name>ferry<file_sep>a.py\nimport b\n<file_sep>src/b.py\nwidth = 3\n"
     f"<file_sep><fim_prefix>main.py\n{BEFORE}<fim_suffix>{AFTER}<fim_middle>"),
    (GEMMA, "<|file_separator|>a.py\nimport b\n<|file_separator|>src/b.py\nwidth = 3\n"
     f"<|file_separator|>main.py\n<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
    (DEEPSEEK, "# a.py\nimport b\n\n# src/b.py\nwidth = 3\n"
     f"<｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{AFTER}<｜fim▁end｜>"),
])  # fmt: skip
def test_other_files_come_before(special, documented):
    made = tokenizer(special)
    hole = Hole(BEFORE, AFTER, files=FILES, repository="ferry", path="main.py")
    assert made.decode(Infill(made).prompt(hole)) == documented


def test_files_give_way():
    made = tokenizer(QWEN)
    infill, whole = Infill(made), Hole(BEFORE, AFTER, files=FILES, repository="ferry", path="main.py")
    length = len(infill.prompt(whole))
    assert infill.prompt(whole, room=length) == infill.prompt(whole)
    last = infill.prompt(Hole(BEFORE, AFTER, files=FILES[1:], repository="ferry", path="main.py"))
    assert infill.prompt(whole, room=length - 1) == last
    alone = infill.prompt(Hole(BEFORE, AFTER, repository="ferry", path="main.py"))
    assert infill.prompt(whole, room=1) == alone


def code_llama(**options):
    """transformers' own class, with a vocabulary that has some words of the code."""
    words = ["def", "▁def", "re", "ret", "▁w", "wi", "▁wi"]
    names = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *sorted({*CODE} - {" "}), *words]
    merges = [("r", "e"), ("re", "t"), ("▁", "w"), ("w", "i"), ("▁w", "i"), ("d", "e"), ("de", "f"), ("▁", "def")]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*names, "de"]))}
    return CodeLlamaTokenizer(vocab=vocab, merges=merges, **options)


@pytest.mark.parametrize("after", [AFTER, "width\n", "", " * width"])
def test_code_llamas_suffix_has_no_space_of_its_own(after):
    """As Meta's code encodes it: the prefix with the space that begins every text, the suffix without."""
    made, bare = code_llama(), code_llama(add_prefix_space=False)
    names = ["<s>", "▁<PRE>", *made.tokenize(BEFORE), "▁<SUF>", *bare.tokenize(after), "▁<MID>"]
    infill = Infill(made)
    assert made.convert_ids_to_tokens(infill.prompt(Hole(BEFORE, after))) == names
    begun = infill.prompt(Hole(BEFORE, after, begun="width"))
    rest = names.index("▁<SUF>")
    assert made.convert_ids_to_tokens(begun) == [*names[:rest], *bare.tokenize("width"), *names[rest:]]
    assert made.convert_tokens_to_ids("▁<EOT>") in infill.ends


def test_names_of_tokens_in_the_text_are_text():
    made = tokenizer(QWEN)
    before, after = "MIDDLE = '<|fim_middle|>'\n", "END = '<|endoftext|>'"
    ids = Infill(made).prompt(Hole(before, after))
    special = {made.convert_tokens_to_ids(name) for name in QWEN} | {0}
    assert [made.convert_ids_to_tokens(token) for token in ids if token in special] == list(QWEN[:3])
    assert made.decode(ids) == f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"


def test_what_ends_an_answer():
    made = tokenizer(QWEN)
    assert {made.convert_ids_to_tokens(token) for token in Infill(made).ends} == {*QWEN, "<|endoftext|>"}


def test_a_model_without_such_tokens():
    infill = Infill(tokenizer(["<repo_name>", "<file_sep>"]))
    message = "no tokens to fill in the middle: remove suffix, or use a model of Qwen"
    refused(RequestError, message, infill.prompt, Hole(BEFORE, AFTER))


def gguf_tokenizer(extra, keys):
    ids = {f"tokenizer.ggml.{key}_token_id": index for key, index in keys.items()}
    kinds = [*VOCABULARY["tokenizer.ggml.token_type"], *[1] * len(extra)]
    return make_tokenizer(
        VOCABULARY | {"tokenizer.ggml.tokens": [*TOKENS, *extra], "tokenizer.ggml.token_type": kinds} | ids, "a.gguf"
    )


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
@pytest.mark.parametrize("names", [("(pre)", "(suf)", "(mid)"), ("▁<PRE>", "▁<SUF>", "▁<MID>")])
def test_a_gguf_file_names_the_tokens(keys, names):
    """By keys of llama.cpp, old and new; the tokens themselves may be of any name, and normal ones."""
    start = len(TOKENS)
    made = gguf_tokenizer(names, dict(zip(keys, range(start, start + 3))))
    plain = make_tokenizer(VOCABULARY, "a.gguf")
    expected = [start, *plain.encode("the"), start + 1, *plain.encode("12"), start + 2]
    for each in (made, copy.deepcopy(made)):  # the server tokenizes in threads of its own
        assert Infill(each).prompt(Hole("the", "12")) == expected


def test_a_gguf_file_with_tokens_beyond_its_vocabulary():
    refused(ModelError, "fim_pre_token_id", gguf_tokenizer, [], {"fim_pre": 10_000})


def test_every_family_is_found():
    assert {name.partition(",")[0] for name in FAMILIES} >= {
        "Qwen2.5-Coder", "CodeLlama", "StarCoder 2", "DeepSeek-Coder", "Codestral",
    }  # fmt: skip


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A random model with Qwen's tokens."""
    folder = tmp_path_factory.mktemp("coder")
    made = tokenizer(QWEN)
    tiny_llama(vocab_size=len(made), eos_token_id=0).save_pretrained(folder)
    made.save_pretrained(folder)
    return LLM(str(folder), speculative_config={"method": "ngram"})


PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


def test_llm_fills_in(coder):
    made = coder.get_tokenizer()
    ids = made.encode(f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>")
    (expected,) = coder.generate([ids], PARAMS)
    (filled,) = coder.generate({"prompt": BEFORE, "suffix": AFTER}, PARAMS)
    assert filled.prompt_token_ids == ids
    assert filled.prompt == BEFORE
    assert filled.outputs[0].token_ids == expected.outputs[0].token_ids
    extra = [{"filename": "a.py", "text": "import b\n"}]
    (beside,) = coder.generate([{"prompt": BEFORE, "suffix": AFTER, "input_extra": extra}], PARAMS)
    assert made.decode(beside.prompt_token_ids) == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nimport b\n<|file_sep|>file\n" + made.decode(ids)
    )


def test_special_tokens_end_the_answer(coder):
    end = coder.get_tokenizer().convert_tokens_to_ids("<|file_sep|>")
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={end: 1e9})
    (filled,) = coder.generate({"prompt": BEFORE, "suffix": AFTER}, params)
    assert (filled.outputs[0].text, filled.outputs[0].finish_reason) == ("", "stop")


def test_an_answer_of_one_line(coder):
    newline = coder.get_tokenizer().encode("\n")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True, logit_bias={newline[0]: 12.0})
    for prompt in ({"prompt": BEFORE, "suffix": AFTER}, {"prompt": BEFORE}):
        (whole,) = coder.generate(prompt, params)
        (line,) = coder.generate({**prompt, "stop_at": "line"}, params)
        assert "\n" in whole.outputs[0].text
        assert line.outputs[0].text == whole.outputs[0].text.partition("\n")[0]


@pytest.mark.parametrize(("before", "least"), [
    ("def f():\n    ", 4), ("def f():", 1), ("class A:\n    def f(self):", 5), ("", 1), ("x = 1\n", 1),
    ("\t\tx = (", 3),
])  # fmt: skip
def test_a_block_is_indented_as_its_cursor(before, least):
    assert ending(SamplingParams(), "block", before).min_indent == least


@pytest.mark.parametrize(("prompt", "message"), [
    ({"prompt": "a", "suffix": 3}, "suffix must be a string, not 3"),
    ({"prompt": ["a"], "suffix": "b"}, "prompt must be a string"),
    ({"prompt_token_ids": [5], "suffix": "b"}, "has no 'prompt_token_ids': remove it"),
    ({"prompt": "a", "suffix": "b", "stop_at": "word"}, "stop_at must be 'line' or 'block', not 'word'"),
    ({"prompt_token_ids": [5], "stop_at": "line"}, "suffix and stop_at go with 'prompt', a string"),
    ({"prompt": "a", "input_extra": "b"}, "input_extra must be a list"),
    ({"prompt": "a", "input_extra": [{"name": "b"}]}, "each of input_extra has a 'text'"),
])  # fmt: skip
def test_mistakes(coder, prompt, message):
    refused(RequestError, message, coder.generate, prompt, PARAMS)


def test_beams_do_not_fill_in(coder):
    search = BeamSearchParams(beam_width=2, max_tokens=4)
    refused(RequestError, "remove suffix", coder.beam_search, {"prompt": "a", "suffix": "b"}, search)


def test_a_model_without_such_tokens_says_so(tmp_path):
    model = LLM(save_checkpoint(tiny_llama(), tmp_path), speculative_config=None)
    refused(RequestError, "no tokens to fill in the middle", model.generate, {"prompt": "a", "suffix": "b"}, PARAMS)
