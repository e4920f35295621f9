"""The caches of target and draft as one: the same rows and slots in both, reserved, moved and given back together.

Letters: R rows, S slots, N nodes of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dsbd_cli.engine.cache.prefill import prefill
from dsbd_cli.engine.cache.prefix_index import PrefixIndex
from dsbd_cli.engine.planning.memory_limit import free_bytes
from dsbd_cli.engine.protocols import DraftHeadModel, EncoderDecoderModel, ForestInput, ForestModel, SwitchingModel

CPU = torch.device("cpu")
ROOM = 0.9  # share of the processor's free memory that caches may take


def _bucket(size: int, step: int) -> int:
    return -(-size // step) * step


class CacheObserver:
    """Hooks that the caches call. They change nothing, and every method does nothing unless it is overridden."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context around a part of the work: tokenise, prefill, draft, target, verify, compact (within verify)
        or detokenise. A replayed CUDA graph opens none for draft, target, verify and compact."""
        return nullcontext()


class Caches:
    """One cache row per request in the target and, where a draft model runs the forest, in the draft.

    Attributes:
        models: target and draft, or the target alone. slots: S, reserved per row; the last one is the trash slot.
        window: slots past its common prefix that a row has room for; only recurrent models use it.
        draft_guesses: the draft is a head, which runs accepted drafts again.
    """

    def __init__(
        self, target: ForestModel, draft: ForestModel | None, *, large_steps: bool, moving: Callable[[], None]
    ) -> None:
        """large_steps: sizes are rounded up further, so that there are fewer shapes to capture.

        moving: called before the memory of a cache moves.
        """
        self.target, self.draft = target, draft
        self.models = [target] if draft is None else [target, draft]
        # found once, because isinstance with a protocol reads every property
        self._readers = [model for model in self.models if isinstance(model, EncoderDecoderModel)]
        self._switching = {
            number: model.switch_position
            for number, model in enumerate(self.models)
            if isinstance(model, SwitchingModel) and model.switch_position is not None
        }
        self.draft_guesses = isinstance(draft, DraftHeadModel)
        assert not isinstance(draft, DraftHeadModel) or draft.target is target, (
            "a head reads the states of its own target"
        )
        self.slots = self.window = 0
        self.observer = CacheObserver()
        self._recurrent = any(model.recurrent_bytes(0) for model in self.models)
        self._slot_step, self._window_step = (128, 64) if large_steps else (32, 16)
        self._moving = moving
        self._reserved: tuple[int, ...] | None = None  # `_reserved_key` after the last `reserve`
        self._indexes: dict[int, PrefixIndex] = {}  # of models whose prefixes are shared, by place in `models`

    def begin(self, *, share: bool) -> None:
        """Begin a run in which no row holds a prompt yet, because the weights may have been trained since the last run.
        share: a beginning that prompts of the run have in common is read once and copied."""
        shared = [index for index, model in enumerate(self.models) if share and model.copies_prefixes]
        self._indexes = {index: PrefixIndex(self._switching.get(index)) for index in shared}

    def _forget_prompts(self) -> None:
        for index in self._indexes.values():
            index.clear()

    def forget(self, row: int, *, draft: bool = False) -> None:
        """Stop copying from a row; with `draft`, in the draft's cache alone. The row holds NaN, or the draft never read
        its last prompt, and what it has not run is written over older contents."""
        for number, index in self._indexes.items():
            if number or not draft:
                index.drop(row)

    def round_slots(self, slots: int) -> int:
        """Round a number of slots up, so that shapes repeat."""
        return _bucket(slots, self._slot_step)

    def round_window(self, nodes: int) -> int:
        """Round a suffix window up, so that shapes repeat."""
        return _bucket(nodes, self._window_step)

    @property
    def draft_rests(self) -> bool:
        """Whether the draft model is recurrent. Then it is cheaper to read tokens that it missed in one piece than one
        by one."""
        return self.draft is not None and self.draft.recurrent_bytes(0) > 0

    def reserve(self, rows: int, slots: int, window: int) -> None:
        """Reserve memory for a new batch, with slots and window rounded up. The memory of the last batch is used again
        where it has this size."""
        self.slots = self.round_slots(slots)
        self.window = max(self.window, self.round_window(window))
        if self._reserved != self._reserved_key(rows):
            self._moving()
            self._forget_prompts()
            for model in self.models:
                model.release()  # otherwise memory would grow to the rows of one batch times the slots of another
            self._check_room(rows, self.slots, self.window)
            for model in self.models:
                model.reserve(rows, self.slots, self.window)
            self._reserved = self._reserved_key(rows)

    def _reserved_key(self, rows: int) -> tuple[int, ...]:
        """Return rows, sizes, and the generation of each cache, which shows whether another engine has used the same
        models since."""
        return (rows, self.slots, self.window, *(model.generation for model in self.models))

    def grow(self, rows: int, slots: int) -> bool:
        """Make room for at least `slots` slots per row of a running batch. Contents stay. Return whether there are more
        slots now."""
        if slots <= self.slots:
            return False
        self._moving()
        self.slots = self.round_slots(max(slots, self.slots * 5 // 4))
        self._check_room(rows, self.slots, 0)
        self._reserve_all(rows)
        return True

    def hold(self, rows: int, window: int) -> None:
        """Make room for at least `window` slots past the common prefix of each row. Contents stay."""
        if self._recurrent and window > self.window:
            self._moving()
            self.window = self.round_window(max(window, self.window * 5 // 4))
            self._check_room(rows, 0, self.window)
            self._reserve_all(rows)

    def _check_room(self, rows: int, slots: int, window: int) -> None:
        """Raise MemoryError where new caches of this size do not fit into the free memory of the processor.

        The system hands out more than it has, and ends the process when it is written to. A GPU refuses by itself.
        """
        here = [model for model in self.models if model.device.type == "cpu"]
        wanted = rows * sum(slots * model.kv_bytes_per_slot() + model.recurrent_bytes(window) for model in here)
        if here and wanted > ROOM * free_bytes(CPU, files=True):
            raise MemoryError(f"caches of {rows} rows and {slots} slots take {wanted} bytes")

    def _reserve_all(self, rows: int) -> None:
        for model in self.models:
            model.reserve(rows, self.slots, self.window)
        self._reserved = None

    def release(self) -> None:
        """Give all memory back."""
        self._moving()
        self._forget_prompts()
        self._reserved = None
        self.window = 0
        for model in self.models:
            model.release()

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Make a row ready for the next request. It must be zeroed, because 0 times a NaN of an earlier request would
        be NaN. Where prefixes are shared, it is zeroed when its prompt is read, because until then other rows may copy
        its contents."""
        for number, model in enumerate(self.models):
            if number in self._indexes:
                self._indexes[number].keep(row, len(prompt) - 1)  # the slots behind it will be overwritten
            else:
                model.clear(row)

    def encoder_bytes(self, encoder_input: Tensor | None) -> int:
        """Return the bytes that a source takes in the models on the target's device; 0 without a source."""
        if encoder_input is None:
            return 0
        return sum(model.encoder_bytes(encoder_input) for model in self._readers if model.device == self.target.device)

    def encode(self, encoder_inputs: Mapping[int, Tensor], *, draft: bool) -> None:
        """Let the target, or with `draft` the draft model, read sources, by row. Does nothing where there are none or
        the model has no encoder."""
        wanted = self.draft if draft else self.target
        model = next((reader for reader in self._readers if reader is wanted), None)
        if not encoder_inputs or model is None:
            return
        generation = model.generation
        with self.observer.span("prefill"):
            model.encode(list(encoder_inputs), list(encoder_inputs.values()))
        if model.generation != generation:
            self._moving()
            if self._reserved is not None:
                self._reserved = self._reserved_key(self._reserved[0])

    def first_logits(self, tokens: Mapping[int, int]) -> Tensor:
        """Return the target's logits [n, V] behind the first token of each row's prompt. The target has read the
        sources, but not yet the prompts."""
        device = self.target.device
        first = torch.tensor(list(tokens.values()), device=device).unsqueeze(1)
        zero = torch.zeros_like(first)
        batch = ForestInput(
            tokens=first,
            positions=zero,
            slots=zero,
            mask=torch.ones(len(first), 1, 1, dtype=torch.bool, device=device),
            slot_positions=zero,
            rows=torch.tensor(list(tokens), device=device),
            prompt_slots=(0,) * len(first) if self.target.invariant else None,
            suffix=1,
        )
        logits = self.target.forward(batch)
        assert logits is not None
        return logits[:, 0]

    def prefill_target(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Let the target read prompts, by row. Where its logits are invariant, a prompt is read as if it were alone.
        Return how many tokens of each it did not read, because a row of the cache held them already."""
        with self.observer.span("prefill"):
            return self._prefill(0, prompts, apart=self.target.invariant)

    def prefill_draft(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Let the draft model, if there is one, read prompts, by row."""
        if self.draft is not None:
            with self.observer.span("prefill"):
                self._prefill(1, prompts, apart=False)

    def _prefill(self, number: int, prompts: Mapping[int, Sequence[int]], *, apart: bool) -> dict[int, int]:
        model, index, trash = self.models[number], self._indexes.get(number), self.slots - 1
        if number in self._switching and isinstance(model, SwitchingModel):
            for row, prompt in prompts.items():
                model.begin_row(row, len(prompt))
        if index is None:
            # while it rested, its states advanced with the common prefix, over a prompt that it had not read
            for row in prompts if number and self.draft_rests else ():
                model.clear(row)
            prefill(model, list(prompts), list(prompts.values()), trash=trash, apart=apart)
            return {}
        counts: dict[int, int] = {}
        for wave in index.plan(prompts):
            model.copy_prefixes([(copy.src_row, row, copy.count) for row, copy in wave.items() if copy.src_row != row])
            copied = {row: copy.count for row, copy in wave.items()}
            for row, count in copied.items():
                index.drop(row)
                model.clear(row, count)
            texts = [prompts[row] for row in copied]
            prefill(model, list(copied), texts, trash=trash, apart=apart, known=list(copied.values()))
            for row in copied:
                index.put(row, prompts[row])
            counts |= copied
        return counts

    def unread(self, prompts: Mapping[int, Sequence[int]]) -> int:
        """Return how many tokens the draft model would have to run to read these prompts."""
        held = sum(map(len, prompts.values()))
        index = self._indexes.get(1)
        if index is None:
            return held
        return held - sum(copy.count for wave in index.plan(prompts) for copy in wave.values())

    def catch_up(
        self, rows: Sequence[int], tokens: Tensor, drafted: Sequence[int], common_prefix: Sequence[int]
    ) -> None:
        """Let the draft model run the part of some rows' common prefixes that it missed: slots drafted .. common_prefix
        of tokens [R, S]."""
        assert self.draft is not None
        texts = [tokens[row, : end + 1].tolist() for row, end in zip(rows, common_prefix, strict=True)]
        with self.observer.span("prefill"):
            prefill(self.draft, rows, texts, trash=self.slots - 1, apart=False, known=drafted)

    def move(
        self, src_slots: Tensor, dst_slots: Tensor, common_prefix: Tensor, drafted: Tensor, *, draft: bool
    ) -> None:
        """Copy slots within each row, [R, T] each, in the target and, if `draft`, in the draft model. common_prefix:
        [R], slots that all live beams share from now on. drafted: [R], leading slots that the draft model has run."""
        with self.observer.span("compact"):
            self._move(self.target, src_slots, dst_slots, common_prefix)
            if draft and self.draft is not None:
                kept = torch.minimum(common_prefix, drafted) if self.draft_rests else common_prefix
                self._move(self.draft, src_slots, dst_slots, kept)

    def _move(self, model: ForestModel, *slots: Tensor) -> None:
        src_slots, dst_slots, common_prefix = (part.to(model.device) for part in slots)
        model.move(src_slots, dst_slots, common_prefix)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for index in self._indexes.values():
            index.select(rows)
        for model in self.models:
            model.select_rows(torch.tensor(rows, device=model.device))
