"""Every argument that crosses into compiled code is checked there: what would reach memory that is not the caller's is
an error, and the process lives on."""

from array import array

import pytest
import torch

from border import ALL_KERNELS, call, with_each
from forerun import kernels
from forerun.attention.base import Query
from forerun.attention.kernel import KernelAttention
from forerun.cache.pool import KVShape, Pool
from forerun.core.batch import Batch, Span
from forerun.core.errors import ForerunError
from forerun.kernels import KernelError, structs
from forerun.models.formats.int8 import TiledInt8
from forerun.models.formats.tiled import TiledLinear
from forerun.models.load import load_model
from forerun.models.run import parts
from forerun.models.run.base import new_attention
from forerun.sampling.compiled import CompiledSampling, penalise, restrict
from forerun.sampling.params import SamplingParams
from refusals import refused

pytestmark = ALL_KERNELS
CPU = torch.device("cpu")
TYPES = kernels.TYPES
KINDS = len(structs.KINDS)


def memory(count=4096):
    zeros = torch.zeros(count, dtype=torch.int64)
    return zeros, zeros.data_ptr()


@pytest.mark.parametrize("kind", TYPES)
def test_rows(kind):
    kept, at = memory()
    sizes, threads = [-1, 1 << 40], [0, -1, 1 << 20]
    low, high = array("q", [0, -1]), array("q", [9, 0])
    outside = [low.buffer_info()[0], high.buffer_info()[0]]
    cases = {
        "linear": ((at, at, at, None, None, 2, 3, 4, 3, 1),
                   {0: [None], 1: [None], 2: [None], 5: sizes, 6: [0, *sizes], 7: [0, *sizes], 8: [2, *sizes],
                    9: threads}),
        "linear_int8": ((at, at, at, None, None, at, at, 2, 3, 4, 3, 1),
                        {0: [None], 5: [None], 6: [None], 7: sizes, 9: [0, 1 << 17], 10: [2, *sizes], 11: threads}),
        "linear_quants": ((2, at, at, at, None, None, 2, 3, 4, 3, 1),
                          {0: [-1, 0, 1, KINDS, 1 << 40], 1: [None], 2: [None], 3: [None], 6: sizes,
                           7: [0, 4, *sizes], 8: [0, *sizes], 9: [2, *sizes], 10: threads}),
        "get_rows": ((2, at, at, at, 2, 3, 4), {0: [-1, 1, KINDS, 1 << 40], 1: [None], 2: [None, *outside],
                                                 3: [None], 4: sizes, 5: [0, *sizes], 6: [0, *sizes]}),
        "norm": ((at, at, at, None, 2, 1, 4, 1e-5, 0),
                 {0: [None], 1: [None], 2: [None], 4: sizes, 5: [0, -1], 6: [0, *sizes]}),
        "apply_activation": ((1, None, 1, at, at, 2, 4),
                 {0: [-1, 2, 3, 6, 1 << 40], 3: [None], 4: [None], 5: sizes, 6: [0, *sizes]}),
        "apply_rotary": ((at, 8, at, 2, 2, 4), {0: [None], 1: [-8], 2: [None], 3: sizes, 4: [0, -1], 5: [0, 3, -2]}),
    }  # fmt: skip
    for name, (good, bad) in cases.items():
        call(f"{name}_{kind}", *good)
        for arguments in with_each(good, bad):
            refused(KernelError, "called wrongly", call, f"{name}_{kind}", *arguments)
    assert kept.numel() == 4096


def test_sampling():
    kept, at = memory()
    made, to = memory()
    sizes, threads = [-1, 1 << 40], [0, 1 << 20]
    low, high = array("q", [-1]), array("q", [9])
    outside = [low.buffer_info()[0], high.buffer_info()[0]]
    cases = {
        "gumbel": ((1, at, to, 4), {1: [None], 2: [None], 3: [0, *sizes]}),
        "gumbel_max": ((at, 2, 4, at, at, at, to, to, None, 1),
                       {0: [None], 1: sizes, 2: [0, *sizes], 3: [None], 4: [None], 5: [None], 6: [None], 7: [None],
                        9: threads}),
        "inverse_cdf": ((at, 2, 4, at, to), {0: [None], 1: sizes, 2: [0, *sizes], 3: [None], 4: [None]}),
        "acceptance": ((at, 2, 4, at, 1, at, at, at, at, 1.0, to, to, to, to, to),
                  {0: [None], 1: [0, *sizes], 2: [0, *sizes], 3: [None], 4: sizes, 5: [None, *outside],
                   6: [None, *outside], 7: [None], 8: [None], 10: [None], 11: [None], 12: [None], 13: [None],
                   14: [None]}),
        "prompt_lookup": ((at, 4, at, 3, 2, to, to),
                          {0: [None], 1: [0, *sizes], 2: [None, outside[0]], 3: [-1, 65], 4: sizes, 5: [None],
                           6: [None]}),
        "top_logprobs": ((at, 2, 4, 1, at, 3, at, 1, to, to),
                 {0: [None], 1: [0, *sizes], 2: [0, *sizes], 3: sizes, 4: [None, *outside], 5: [0, -1],
                  6: [None, *outside], 7: [0], 8: [None], 9: [None]}),
        "filter_rows": ((to, 2, 4, at, at, at, 1), {0: [None], 1: sizes, 2: [0, *sizes], 3: [None], 4: [None],
                                                      5: [None], 6: threads}),
        "apply_penalties": ((to, 4, at, 1, 0, 1.0, 0.0, 0.0),
                            {0: [None], 1: [0, *sizes], 2: [None, outside[0]], 3: sizes, 4: sizes}),
        "overlaps": ((at, 2, 4, 1, at, at, at, to, 1),
                     {0: [None], 1: [0, *sizes], 2: [0, *sizes], 3: sizes, 4: [None, *outside], 5: [None],
                      6: [None, *outside], 7: [None], 8: threads}),
        "set_prefetch": ((0, 6, 2), {0: [-1, len(structs.KINDS)], 1: [-1, 0, 33],
                                          2: [-1, 4 if kernels.library().tiles else 3]}),
        "use_huge_pages": ((at, 8), {0: [None], 1: [-1]}),
        "stop_threads": ((), {}),
        "softcap": ((to, 4, 2.0), {0: [None], 1: [0, *sizes]}),
    }  # fmt: skip
    assert set(cases) == set(kernels.SIGNATURES)
    for name, (good, bad) in cases.items():
        call(name, *good)
        for arguments in with_each(good, bad):
            refused(KernelError, None, call, name, *arguments)
    assert kept.numel() == made.numel() == 4096
    assert not kept.any()


def test_structs_that_differ_switch_the_kernels_off(monkeypatch, caplog):
    monkeypatch.setattr(structs, "LAYOUT", structs.LAYOUT.replace("base before", "before base"))
    assert kernels.library.__wrapped__() is None
    assert "structs.h and structs.py differ" in caplog.text


class Attending:
    """One good call of attention over two pages of four entries, field by field."""

    def __init__(self):
        self.kept, at = memory()
        self.rows = 2
        self.span = structs.SpanStruct(0, 2, 3, 3, 0, -1)
        self.tables, self.paths, self.entries = [1, 0], [0, 4, 0, 5], [0, 1, 2, 3, 4]
        self.pool = structs.PoolStruct(2, 4, 1, 4, 4, 16, 16, 4, 16, 16, 4)
        self.heads = structs.Heads(2, 0, 0, 8, 4, 4, 0, 0, 0)
        self.plan = structs.Plan(at, 1, at, 2, at, 0, at, 0)
        self.at = at

    def run(self, kind="float32", *, stores=True):
        lists = [array("q", numbers) for numbers in (self.span, self.tables, self.paths, self.entries, self.pool)]
        lists.append(array("q", self.heads))
        spans, tables, paths, entries, pool, heads = (numbers.buffer_info()[0] for numbers in lists)
        plan = array("q", self.plan._replace(spans=spans, tables=tables, paths=paths, entries=entries))
        sides = [self.at if stores else None] * 2
        where = pool, heads, plan.buffer_info()[0]
        call(f"attend_{kind}", self.at, *sides, *[self.at] * 3, *where, self.rows, 0.5, 0.0, 1)


BAD_SPANS = [
    {"first": -1}, {"first": 1}, {"first": 1 << 62}, {"rows": -1}, {"rows": 3}, {"rows": 1 << 62}, {"base": -1},
    {"base": 4}, {"before": -1}, {"before": 7}, {"before": 1 << 62}, {"table": -1}, {"table": 1}, {"table": 1 << 62},
    {"paths": 0}, {"paths": 1 << 62},
]  # fmt: skip
BAD_POOLS = [
    {"pages": 0}, {"pages": 1}, {"page_size": 0}, {"page_size": -4}, {"page_size": 2}, {"kv_heads": 0},
    {"kv_heads": 3}, {"width": 0}, {"width": 3}, {"width": 1026}, {"width": -4},
    {"value_width": 0}, {"value_width": 6}, {"value_width": 3}, {"key_page": -1}, {"value_slot": -1},
]  # fmt: skip
BAD_HEADS = [
    {"heads": 0}, {"heads": -1}, {"window": -1}, {"sink_tokens": -1}, {"sink_tokens": 129}, {"q_stride": -1},
    {"k_stride": -1}, {"v_stride": -1},
]  # fmt: skip
BIASED = [{"reach": 4}, {"reach": 0}, {"reach": -1}]


@pytest.mark.parametrize("kind", TYPES)
def test_attention_refuses_what_it_would_misread(kind):
    Attending().run(kind)
    for field, changes in (("span", BAD_SPANS), ("pool", BAD_POOLS), ("heads", BAD_HEADS)):
        for change in changes:
            case = Attending()
            setattr(case, field, getattr(case, field)._replace(**change))
            refused(KernelError, None, case.run, kind)
    for change in ({"reach": 5}, *BIASED):
        case = Attending()
        case.heads = case.heads._replace(bias=case.at, **change)
        if change in BIASED:
            refused(KernelError, "rows or entries are out of range", case.run, kind)
        else:
            case.run(kind)
    for tables in ([2, 0], [1, -1], [1 << 40, 0]):
        case = Attending()
        case.tables = tables
        refused(KernelError, "page lies outside", case.run, kind)
    for change in ({"num_spans": 0}, {"num_spans": -1}, {"num_tables": 1}, {"num_tables": -1}):
        case = Attending()
        case.plan = case.plan._replace(**change)
        refused(KernelError, None, case.run, kind)
    for rows in (0, -1, 1):
        case = Attending()
        case.rows = rows
        refused(KernelError, None, case.run, kind)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_that_are_not_stored_see_what_is_there(kind):
    """Attention across: no keys and values, and paths of no nodes."""

    def case():
        made = Attending()
        made.span = made.span._replace(paths=0, base=8, before=8)
        made.plan = made.plan._replace(num_paths=4, num_entries=0)
        made.paths = [0, 0, 0, 0]
        return made

    case().run(kind, stores=False)
    bad = [case(), case(), Attending()]
    bad[0].span = bad[0].span._replace(base=0, before=0)
    bad[1].paths = [0, 0, 0, 1]
    for made in bad:
        refused(KernelError, "path is out of range", made.run, kind, stores=False)
    beyond = case()
    beyond.span = beyond.span._replace(base=9, before=9)
    refused(KernelError, "page table is too short", beyond.run, kind, stores=False)
    stored = case()
    stored.span = stored.span._replace(base=6, before=6)
    refused(KernelError, "path is out of range", stored.run, kind)


def test_paths_stay_inside_their_sequence():
    def case(paths, entries, num_paths=4, num_entries=5):
        made = Attending()
        made.span = made.span._replace(paths=0)
        made.plan = made.plan._replace(num_paths=num_paths, num_entries=num_entries)
        made.paths, made.entries = paths, entries
        return made

    case([0, 4, 0, 5], [0, 1, 2, 3, 4]).run()
    for paths in (
        [-1, 4, 0, 5],
        [0, 0, 0, 5],
        [0, 6, 0, 5],
        [5, 1, 0, 5],
        [0, 4, 1, 5],
        [0, -3, 0, 5],
        [0, 1 << 62] * 2,
    ):
        refused(KernelError, "path is out of range", case(paths, [0, 1, 2, 3, 4]).run)
    for entry in (-1, 5, 1 << 40):
        refused(KernelError, "entry of a path", case([0, 4, 0, 5], [0, 1, 2, 3, entry]).run)
    refused(KernelError, "path is out of range", case([0, 4, 0, 5], [0, 1, 2, 3, 4], num_paths=3).run)


@pytest.fixture(scope="module")
def model(tiny_target):
    return load_model(tiny_target)


def test_spans_that_are_none(model):
    """Such as a self-test laid out for a context of two tokens."""
    for span in (Span(0, -3, [1, 2]), Span(0, 0, [1], stored=-1), Span(0, 2, [1, 2], [-1])):
        attention = new_attention(model, max_seqs=2, max_len=32)
        refused(ValueError, r"negative|parents", model.forward, Batch([span]), attention)
        assert not attention.pool.block_tables
    for parents in ([0, -1], [1, 0], [-1, 5]):
        with pytest.raises((ValueError, IndexError)):
            model.forward(Batch([Span(0, 2, [1, 2], parents)]), new_attention(model, max_seqs=2, max_len=32))


def test_attention_over_tensors_that_do_not_fit():
    pool = Pool([KVShape(2, 16, 16)], 4, 8, torch.float32, CPU)
    attention = KernelAttention(pool)
    metadata = attention.begin(Batch([Span(0, 0, [1] * 3)]))

    def run(q=(3, 4, 16), k=(3, 2, 16), v=(3, 2, 16), dtype=torch.float32):
        sides = torch.randn(q), torch.randn(k), torch.randn(v).to(dtype)
        return attention.run(Query(0, *sides, 0.25), metadata)

    assert run().shape == (3, 64)
    for bad in ({"q": (2, 4, 16)}, {"k": (2, 2, 16)}, {"k": (3, 4, 16)}, {"v": (3, 2, 8)}, {"q": (3, 4, 8)},
                {"dtype": torch.bfloat16}):  # fmt: skip
        refused(ValueError, r"attention over|entries have", run, **bad)
    refused(ForerunError, None, run, q=(3, 3, 16))


def test_layers_over_tensors_that_do_not_fit():
    for weight in (torch.randn(4), torch.randn(0, 4), torch.randn(2, 3, 4)):
        refused(ValueError, "weights", TiledLinear, weight, None)
    refused(ValueError, "bias", TiledLinear, torch.randn(4, 4), torch.randn(3))
    refused(TypeError, "float64", TiledLinear, torch.randn(4, 4).double(), None)
    refused(ValueError, "inputs", TiledInt8, torch.zeros(1, (1 << 16) + 1), None, "int8")
    refused(TypeError, "float64", TiledInt8(torch.randn(4, 4), None, "int8"), torch.randn(2, 4).double())
    refused(ValueError, "8 numbers", parts.KernelNorm(torch.randn(8), 1e-5), torch.randn(2, 7))
    refused(ValueError, "2 width", parts.KernelGate("silu", torch.float32), torch.randn(2, 7))
    wide = torch.randn(2, 16)[:, ::2]
    assert torch.equal(
        parts.KernelGate("silu", torch.float32)(wide), parts.KernelGate("silu", torch.float32)(wide.contiguous())
    )


def test_sampling_over_lists_that_do_not_fit():
    sampler, scores = CompiledSampling(torch.arange(8, dtype=torch.int32)), torch.randn(2, 8)
    q = torch.rand(8)
    ids, logs = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    wrong = [
        lambda: CompiledSampling(torch.arange(8)),
        lambda: sampler.noise([1], 9),
        lambda: sampler.choose(torch.randn(2, 9), [1, 2], False),
        lambda: sampler.choose(scores.double(), [1, 2], False),
        lambda: sampler.choose(scores, [1], False),
        lambda: sampler.weigh(scores, [True], [0], [0], [0], [False]),
        lambda: sampler.weigh(scores, [True, True], [0, 1], [0], [0], [False]),
        lambda: sampler.weigh(scores, [True, True], [2], [0], [0], [False]),
        lambda: sampler.weigh(scores, [True, True], [0], [8], [0], [False]),
        lambda: sampler.rank(scores, [2], [0], ids, logs),
        lambda: sampler.rank(scores, [0], [2], ids, logs),
        lambda: sampler.rank(scores, [0], [0, 1], ids, logs),
        lambda: sampler.rank(scores, [0], [0], ids, logs[:1]),
        lambda: sampler.draw(scores, [0.5]),
        lambda: sampler.overlaps(scores, [0], [8], [None]),
        lambda: sampler.overlaps(scores, [-1], [0], [None]),
        lambda: sampler.overlaps(scores, [0], [0], [q[:7]]),
        lambda: restrict(scores, [1.0], [0.0, 1.0], [0]),
        lambda: penalise(scores.double()[0], [1], 0, SamplingParams()),
        lambda: penalise(scores[0], [-1], 0, SamplingParams()),
    ]
    for attempt in wrong:
        refused(ValueError, r"\w", attempt)
