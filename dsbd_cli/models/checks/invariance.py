"""Check, on the model just loaded and on this machine, that a node's logits do not depend on its company.

Libraries choose kernels by shape, and kernels sum in different orders. Which ones do so differs from processor to
processor, so the loaded model itself is tested: one short text is run in several companies (other rows and other
nodes), and the bits are compared.

Letters: R rows, n nodes of a forward, S slots, V vocabulary, A tokens of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsbd_cli.engine.core.slots import PREFIX_STEP
from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.models.forest_model import BaseForestModel
from dsbd_cli.models.transformers_backend.seq2seq import Seq2SeqForestModel, sample_encoder_input
from dsbd_cli.models.verdicts import Verdict
from dsbd_cli.ops.interface import host_reads

PROMPT = 161  # tokens: five steps of prompt slots and one that is left over
WIDTH_STEP = 32  # the width of a prompt's forward is a multiple of this
LONGER = 480  # tokens of the prompt that the beginning is copied from
# tokens of the source of the text, where it has one, and of the rows before and after it
ENCODER_LENGTHS = (77, 150, 90)
ANSWER = 40  # tokens after the prompt; all are compared, because in bfloat16 rounding hides most differences
SLOTS = 512
PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm")  # torch's own


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings of the text when it is run: other rows and other nodes.

    Attributes:
        rows: R. row: the row that holds the text; the others hold other tokens and have other lengths.
        others: number of further nodes in each forward. ahead: how many of them come before the text's own nodes.
        spread: the answer's tokens lie in order anywhere in `spread` times as many slots as they need.
        at_once: how many of the answer's tokens share the last forward.
        joined: how many of them join the common prefix before that, which recurrent layers take into their states.
        copied: how many of the prompt's tokens are copied from the last row, where other tokens than the text's follow.
        slots: S.
    """

    rows: int = 1
    row: int = 0
    others: int = 3
    ahead: int = 0
    spread: int = 1
    at_once: int = 1
    joined: int = 0
    copied: int = 0
    slots: int = 256

    def __str__(self) -> str:
        beside = "" if self.rows == 1 else " and another row"
        return f"beside {self.others + self.at_once - 1} other nodes{beside}"


COMPANIES = (
    Surroundings(others=0),
    Surroundings(others=32, ahead=32, spread=5, joined=17, slots=SLOTS),
    Surroundings(others=1, spread=3, at_once=3, joined=37, slots=352),
    Surroundings(rows=3, row=1, others=19, ahead=7, spread=4, at_once=2, slots=448),
    # six tokens: with two threads MKL's float32 products compute those past the last four in another way
    Surroundings(rows=2, row=1, others=0, at_once=3),
)


class HalfProducts(TorchDispatchMode):
    """A mode that notices products in half precision by torch's own operators, which choose a kernel by the number of
    rows.

    In float32 a comparison of a few companies shows that choice. In half precision rounding nearly always hides it, so
    that no comparison would.

    Attributes:
        found: whether there was such a product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS and out.dtype in (torch.bfloat16, torch.float16):
            self.found = True
        return out


@torch.inference_mode()
def check(model: BaseForestModel) -> Verdict:
    """Check whether all layers attend by our function and the text's logits have the same bits alone and in all
    COMPANIES.

    A comparison of bits alone is not enough, because a sum in another order changes a short text only now and then. The
    cache's memory is freed.
    """
    if _size(model) < 1:
        return Verdict(f"it has positions for {model.max_positions} tokens only, too few for the check")
    try:
        with HalfProducts() as products:
            alone = _logits(model, Surroundings())
        if not model.by_parts:
            return Verdict("some of its layers do not attend by our function")
        if products.found and model.device.type == "cpu":
            return Verdict("some of its half-precision products are torch's own, which go by the number of rows")
        for company in COMPANIES:
            # a prompt alone is read by the same forward each time, so that once is enough, but for recurrent layers,
            # whose states have moved on
            logits = _logits(model, company, read=company.rows > 1 or model.recurrent_bytes(0) > 0)
            if not torch.equal(logits, alone):
                moved = (logits.double() - alone.double()).abs().max().item()
                return Verdict(f"logits moved by up to {moved:.1g} {company}")
        return Verdict(None, _copies(model, alone) if model.copies_prefixes else None)
    finally:
        model.release()


def _copies(model: BaseForestModel, alone: Tensor) -> bool | None:
    """Return whether the text's logits [A, V] stay the same with a beginning of its prompt copied; None where it is too
    short."""
    count = _size(model) // PREFIX_STEP * PREFIX_STEP
    return torch.equal(_logits(model, Surroundings(rows=2, copied=count)), alone) if count else None


@torch.inference_mode()
def shift_by_splitting(model: BaseForestModel) -> float:
    """Return how far the logits of the text's last token move where layers split their keys: root mean square, relative
    to the spread. The cache's memory is freed."""
    try:
        plain, parted = (_logits(model, Surroundings(), by_parts=by_parts)[-1].double() for by_parts in (False, True))
    finally:
        model.release()
    return float((parted - plain).square().mean().sqrt() / plain.std())


def _logits(model: BaseForestModel, company: Surroundings, *, by_parts: bool = True, read: bool = True) -> Tensor:
    """Return the logits [A, V] of the tokens of the answer in one company.

    by_parts: run forwards with `prompt_slots`. read: read the prompt; otherwise it is still in its slots from the last
    company of one row.
    """
    if read:
        model.release()
        model.reserve(company.rows, SLOTS)
        if isinstance(model, Seq2SeqForestModel):
            _encode(model, company)
    generator = torch.Generator().manual_seed(21)
    prompt = _size(model)
    size = prompt + ANSWER
    text = torch.randint(0, model.vocab_size, (company.rows, size), generator=generator)
    text = text.roll(company.row, 0)  # the first text drawn is the same in every company
    lengths = torch.tensor([max(1, prompt - 5 * abs(row - company.row)) for row in range(company.rows)])
    if company.copied:
        _copied_prompt(model, text, company.copied)
    elif read:
        _prompt(model, text, lengths)
    chosen = torch.randperm(ANSWER * company.spread, generator=generator)[:ANSWER].sort().values
    places = lengths.unsqueeze(1) + chosen
    split = ANSWER - company.at_once
    first = _answer(model, company, text, lengths, places, 0, split, by_parts)
    if company.joined:
        source, places = places, places.clone()
        places[:, : company.joined] = lengths.unsqueeze(1) + torch.arange(company.joined)
        device = model.device
        model.move(source.to(device), places.to(device), (lengths + company.joined).to(device))
    return torch.cat((first, _answer(model, company, text, lengths, places, split, ANSWER, by_parts)))


def _size(model: BaseForestModel) -> int:
    """Return the number of tokens of the prompt, fewer where the model has no room for them."""
    limit = model.max_positions
    return PROMPT if limit is None else min(PROMPT, limit - ANSWER)


def _encode(model: Seq2SeqForestModel, company: Surroundings) -> None:
    """Encode the text's own source, and sources of other lengths for its neighbours, all in one call."""
    limit = model.max_encoder_input or max(ENCODER_LENGTHS)
    lengths = [(row - company.row) % len(ENCODER_LENGTHS) for row in range(company.rows)]  # 0 of the text
    encoder_inputs = [sample_encoder_input(model, min(ENCODER_LENGTHS[-seed], limit), seed) for seed in lengths]
    model.encode(range(company.rows), encoder_inputs)


def _copied_prompt(model: BaseForestModel, text: Tensor, copied: int) -> None:
    """Read two prompts that begin alike. The second, as long as the model takes, is read whole. Its beginning is copied
    to the first, which is read from there on."""
    limit = min(LONGER, model.max_positions or LONGER)
    lengths = torch.tensor([_size(model), limit])
    other = text[1].repeat(3)[: limit - copied]
    longer = torch.stack((text[0].repeat(3)[:limit], torch.cat((text[0, :copied], other))))
    _prompt(model, longer[1:], lengths[1:], rows=torch.tensor([1]))
    model.copy_prefixes([(1, 0, copied)])
    model.clear(0, copied)
    _prompt(model, longer[:1], lengths[:1], first=copied)


def _prompt(
    model: BaseForestModel, text: Tensor, lengths: Tensor, *, rows: Tensor | None = None, first: int = 0
) -> None:
    """Read the tokens first .. lengths [R] of texts [R, n] in one forward, whose width is a multiple of WIDTH_STEP."""
    width = -(-(int(lengths.max()) - first) // WIDTH_STEP) * WIDTH_STEP
    steps = torch.arange(first, first + width)
    index = torch.arange(first + width)
    real = steps < lengths.unsqueeze(1)
    tokens = torch.nn.functional.pad(text, (0, max(0, first + width - text.shape[1])))[:, first : first + width]
    seen = torch.where(real.unsqueeze(2), index <= steps.unsqueeze(1), index == 0)
    model.forward(
        ForestInput(
            tokens=torch.where(real, tokens, 0),
            positions=torch.where(real, steps, 0),
            slots=torch.where(real, steps, SLOTS - 1),
            mask=seen,
            slot_positions=index.expand(len(text), -1),
            rows=torch.arange(len(text)) if rows is None else rows,
            prompt_slots=(first,) * len(text),
            chain=True,
        ).to(model.device),
        logits=False,
    )


def _answer(
    model: BaseForestModel,
    company: Surroundings,
    text: Tensor,
    lengths: Tensor,
    places: Tensor,
    first: int,
    last: int,
    by_parts: bool,
) -> Tensor:
    """Return the logits [last - first, V] of the answer's tokens first .. last, which see the prompt and the answer so
    far."""
    rows, before = company.rows, company.ahead
    own = torch.arange(first, last).expand(rows, -1)
    depth = lengths.unsqueeze(1) + own
    # the other nodes take the free slots after the answer and see nothing of it
    free = places[:, -1:] + 1 + torch.arange(company.others)
    other_tokens = (text[:, :1] + 7 * torch.arange(company.others)) % model.vocab_size

    def join(mine: Tensor, other: Tensor) -> Tensor:
        return torch.cat((other[:, :before], mine, other[:, before:]), 1)

    slots = join(places[:, first:last], free)
    index = torch.arange(company.slots)
    prompt = (index < lengths.unsqueeze(1)).unsqueeze(1)  # [R, 1, S]
    answer = (index == places.unsqueeze(2)).unsqueeze(1)  # [R, 1, A, S]
    so_far = torch.arange(ANSWER) <= own.unsqueeze(2)  # [R, m, A]
    mine = (answer & so_far.unsqueeze(3)).any(2) | prompt
    other = (index == free.unsqueeze(2)) | prompt
    slot_positions = index.expand(rows, -1).clone()
    slot_positions.scatter_(1, places, lengths.unsqueeze(1) + torch.arange(ANSWER))
    prompt_slots = tuple(lengths.tolist()) if host_reads(model.device) else (0,) * rows
    logits = model.forward(
        ForestInput(
            tokens=join(text.gather(1, depth), other_tokens),
            positions=join(depth, lengths.unsqueeze(1).expand(-1, company.others)),
            slots=slots,
            mask=join(mine, other),
            slot_positions=slot_positions,
            prompt_slots=prompt_slots if by_parts else None,
            prompt=lengths if by_parts else None,
            suffix=company.slots,
        ).to(model.device)
    )
    assert logits is not None
    return logits[company.row, before : before + last - first].clone()
