"""Check, on the model just loaded and on this machine, that a node's logits do not depend on its company.

Libraries choose kernels by shape, and kernels sum in different orders. Which ones do so differs from processor to
processor, so the loaded model is asked: one short text is run in several companies, and the bits are compared.

Letters: R rows, n nodes of a forward, S slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsbd_cli.engine.core.protocols import ForestInput
from dsbd_cli.engine.models.selftest import CheckableModel

__all__ = ["Company", "is_invariant"]

PROMPT = 97  # tokens: three steps of settled slots and one that is left over
WIDTH = 128  # of the prompt's forward
ANSWER = (0, 1, 2, 3, 4)  # tokens after the prompt, the last one is looked at
SLOTS = 320


@dataclass(frozen=True, slots=True)
class Company:
    """What else is there when the text is run.

    Attributes:
        rows: R. row: which of them holds the text; the others hold other tokens and have other lengths.
        others: further nodes in each forward, which stand before and after the text's own.
        gap: slots between two tokens of the answer.
        at_once: how many of the answer's tokens share the last forward.
        slots: S.
    """

    rows: int = 1
    row: int = 0
    others: int = 3
    gap: int = 1
    at_once: int = 1
    slots: int = 192


COMPANIES = (
    Company(others=0),
    Company(others=35, gap=7, slots=256),
    Company(others=1, at_once=3, slots=160),
    Company(rows=3, row=1, gap=2),
    Company(rows=2, others=19, gap=5, at_once=2, slots=SLOTS),
)


@torch.inference_mode()
def is_invariant(model: CheckableModel) -> bool:
    """Whether the text's logits have the same bits alone and in all COMPANIES. Leaves the cache released."""
    try:
        alone = _logits(model, Company())
        return all(torch.equal(_logits(model, company), alone) for company in COMPANIES)
    finally:
        model.release()


def _logits(model: CheckableModel, company: Company) -> Tensor:
    """[V] logits of the last token of the answer."""
    model.release()
    model.reserve(company.rows, SLOTS)
    generator = torch.Generator().manual_seed(21)
    size = PROMPT + len(ANSWER)
    text = torch.randint(0, model.vocab_size, (company.rows, size), generator=generator)
    text = text.roll(company.row, 0)  # the first text drawn is the same in every company
    lengths = torch.tensor([PROMPT - 5 * abs(row - company.row) for row in range(company.rows)])
    _prompt(model, text, lengths)
    places = lengths.unsqueeze(1) + company.others // 2 + company.gap * torch.arange(len(ANSWER))
    split = len(ANSWER) - company.at_once
    for first, last in ((0, split), (split, len(ANSWER))):
        logits = _answer(model, company, text, lengths, places, first, last)
    return logits


def _prompt(model: CheckableModel, text: Tensor, lengths: Tensor) -> None:
    steps = torch.arange(WIDTH)
    real = steps < lengths.unsqueeze(1)
    tokens = torch.where(real, torch.nn.functional.pad(text, (0, WIDTH - text.shape[1])), 0)
    seen = torch.where(real.unsqueeze(2), steps <= steps.unsqueeze(1), steps == 0)
    _forward(
        model,
        ForestInput(
            tokens=tokens,
            positions=torch.where(real, steps, 0),
            slots=torch.where(real, steps, SLOTS - 1),
            mask=seen,
            slot_positions=steps.expand(len(text), -1),
            rows=torch.arange(len(text)),
        ),
        logits=False,
    )


def _answer(
    model: CheckableModel, company: Company, text: Tensor, lengths: Tensor, places: Tensor, first: int, last: int
) -> Tensor:
    """[V] logits of the last of the answer's tokens first .. last, which see the prompt and the answer so far."""
    rows, before = company.rows, company.others // 2
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
    so_far = torch.arange(len(ANSWER)) <= own.unsqueeze(2)  # [R, m, A]
    mine = (answer & so_far.unsqueeze(3)).any(2) | prompt
    other = (index == free.unsqueeze(2)) | prompt
    slot_positions = index.expand(rows, -1).clone()
    slot_positions.scatter_(1, places, lengths.unsqueeze(1) + torch.arange(len(ANSWER)))
    logits = _forward(
        model,
        ForestInput(
            tokens=join(text.gather(1, depth), other_tokens),
            positions=join(depth, lengths.unsqueeze(1).expand(-1, company.others)),
            slots=slots,
            mask=join(mine, other),
            slot_positions=slot_positions,
            settled=tuple(lengths.tolist()) if model.device.type == "cpu" else (0,) * rows,
            tail=company.slots,
        ),
    )
    assert logits is not None
    return logits[company.row, before + last - first - 1].clone()


def _forward(model: CheckableModel, batch: ForestInput, *, logits: bool = True) -> Tensor | None:
    names = ("tokens", "positions", "slots", "mask", "slot_positions")
    on_device = (getattr(batch, name).to(model.device) for name in names)
    rows = None if batch.rows is None else batch.rows.to(model.device)
    return model.forward(ForestInput(*on_device, rows, batch.settled, batch.tail), logits=logits)
