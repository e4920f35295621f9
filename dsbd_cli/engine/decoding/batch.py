"""Requests decoded together: on the host the job in each row, on the device the tensors of all rows.

Letters: R rows, S cache slots, D layers, K drafts per layer, N = W + D*K nodes of a forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from dsbd_cli.config.method import MethodConfig
from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.constraints.legal import FREE
from dsbd_cli.engine.core.beams import fit_window
from dsbd_cli.engine.core.own_ids import OwnIds
from dsbd_cli.engine.decoding.tables import RequestTables
from dsbd_cli.engine.drafting.beam import MERGED_BACKLOG
from dsbd_cli.engine.drafting.text import PromptTable
from dsbd_cli.engine.iteration.batch_state import BatchState, NewRow
from dsbd_cli.engine.iteration.devices import current
from dsbd_cli.engine.iteration.iteration import IterationShape
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.planning.planner import DraftWork, Shape, deepest
from dsbd_cli.engine.planning.timing import PhaseTimer
from dsbd_cli.ops.interface import host_reads


def most_steps(jobs: Iterable[RequestState]) -> int:
    """Return the most tokens that one of these requests may generate."""
    return max(job.max_new for job in jobs)


class Batch:
    """Rows and the jobs in them. A job that is done frees its row at once, and the next one takes it.

    Attributes:
        jobs: of each row, None where it is free. state: the rows on the device, made with the first requests.
    """

    state: BatchState

    def __init__(
        self,
        rows: int,
        method: MethodConfig,
        caches: Caches,
        tables: RequestTables,
        *,
        keep_text: bool,
    ) -> None:
        """keep_text: the drafter reads prompts, so they stay on the device."""
        self.jobs: list[RequestState | None] = [None] * rows
        self._method, self._caches, self._tables, self._keep_text = method, caches, tables, keep_text
        self._legal = [FREE] * rows
        self._empty = True
        self._unread: tuple[tuple[tuple[int, int], ...], int] = (), 0  # rows and jobs, and their unread tokens

    @property
    def running(self) -> list[tuple[int, RequestState]]:
        """(row, job) of every taken row."""
        return [(row, job) for row, job in enumerate(self.jobs) if job is not None]

    @property
    def free(self) -> list[int]:
        """Rows without a job."""
        return [row for row, job in enumerate(self.jobs) if job is None]

    def admit(self, waiting: deque[RequestState]) -> None:
        """Put waiting requests into free rows. The target reads their prompts; each begins with one live beam."""
        new = {row: waiting.popleft() for row in self.free[: len(waiting)]}
        for row, job in new.items():
            self.jobs[row] = job
            job.used = job.common_prefix = job.drafted = len(job.prompt) - 1
            job.prefilled = False
        if not new:
            return
        jobs = [job for _, job in self.running]
        steps = most_steps(jobs)
        shape = deepest(self._method, steps)
        nodes, history = shape.nodes(self._method.num_beams), steps + shape.depth + 2
        slots = max(len(job.prompt) + job.max_new for job in jobs)
        if self._empty:
            self._allocate(slots + 2 * nodes, nodes, history)
        self.state.grow_history(history)
        self._grow(slots + nodes + 1)
        for row, job in new.items():
            self._caches.admit(row, job.prompt)
        self._caches.encode(_encoder_inputs(new), draft=False)
        self._listen({row: job for row, job in new.items() if job.listen is not None})
        for row, count in self._caches.prefill_target({row: job.prompt for row, job in new.items()}).items():
            new[row].stats.prompt_tokens_reused = count
        self._tables.stops.forget({job.ends for job in jobs})
        entries = dict[int, NewRow]()
        for row, job in new.items():
            sampling = job.request.sampling
            self._legal[row] = self._begin(job)
            on_logits = (sampling.num_beams or self._method.num_beams) == 1
            self._tables.rules.begin(
                row, job.rules, job.prompt, sampling.max_new_tokens, job.ends.tokens, on_logits=on_logits
            )
            stop = self._tables.stops.start(job.ends)
            entries[row] = NewRow(job.prompt, job.seed, sampling, stop, self._legal[row])
        self.state.admit(entries)
        for row, job in new.items():
            if (
                self.state.prompts is not None
                and job.encoder_input is not None
                and not job.encoder_input.is_floating_point()
            ):
                # for answers that copy their source: behind the decoder's first tokens they go on as the source begins
                self.state.prompts.put(row, [*job.prompt, *job.encoder_input.tolist(), *job.prompt])

    def _listen(self, unknown_language: dict[int, RequestState]) -> None:
        """Determine the languages of speech for rows that name none, for all of them in one forward."""
        if not unknown_language:
            return
        first = self._caches.first_logits({row: job.prompt[0] for row, job in unknown_language.items()})
        for job, logits in zip(unknown_language.values(), first, strict=True):
            assert job.listen is not None
            job.prompt, job.language = job.listen(logits)
            job.listen = None

    def _begin(self, job: RequestState) -> int:
        """Return the initial legal state of a request."""
        if job.grammar is not None:
            return self._tables.grammars.begin(job.grammar, job.request.sampling.max_new_tokens)
        return FREE if job.catalogue is None else self._tables.tries.begin(job.catalogue)

    def _allocate(self, slots: int, nodes: int, history: int) -> None:
        """Allocate the memory of a batch that begins."""
        self._tables.tries.forget()
        self._tables.rules.allocate(len(self.jobs))
        rows, device, caches = len(self.jobs), self._caches.target.device, self._caches
        caches.reserve(rows, slots, nodes)
        self.state = BatchState.empty(self._method, rows, caches.slots, caches.round_window(nodes), history, device)
        if self._keep_text:
            self.state.prompts = PromptTable.empty(rows, device)
        self.state.own_ids = OwnIds.of(caches.draft, caches.target.vocab_size, rows, device)
        self._empty = False

    def _grow(self, slots: int) -> None:
        """Make room for at least `slots` cache slots per row."""
        if self._caches.grow(self.state.rows, slots):
            self.state.table.grow(self._caches.slots)

    def reading(self) -> DraftWork:
        """Return the work that the draft must do before it drafts. The backlog is 0, or W times a power of two, so that
        shapes repeat."""
        if self._caches.draft is None:
            return DraftWork()
        draft_backlog = max((job.used - job.drafted for _, job in self.running), default=0)
        size = self._method.num_beams
        while size < draft_backlog:
            size *= 2
        # later rows are assumed to share as much of their prompts as these do
        prompts = sum(len(job.prompt) - job.stats.prompt_tokens_reused for _, job in self.running)
        return DraftWork(size if draft_backlog else 0, self._unread_tokens(), prompts)

    def _unread_tokens(self) -> int:
        """Return how many prompt tokens the draft model would have to run before it drafts. They are counted once for
        the same rows."""
        rows = [(row, job) for row, job in self.running if not job.prefilled]
        numbers = tuple((row, job.number) for row, job in rows)
        if self._unread[0] != numbers:
            self._unread = numbers, self._caches.unread({row: job.prompt for row, job in rows})
        return self._unread[1]

    def read_prompts(self, timer: PhaseTimer) -> None:
        """Let the draft model, if there is one, read the prompts of rows that are about to draft for the first time. So
        a row that never drafts costs nothing. A recurrent draft also reads the text that was generated while it rested.
        timer: gets a lap `read` where anything is read."""
        draft = self._caches.draft
        new = [(row, job) for row, job in self.running if not job.prefilled]
        backlog = self._rested()
        if draft is None or not (new or backlog):
            return
        with current(draft.device):
            timer.start()
            self._caches.encode(_encoder_inputs(dict(new)), draft=True)
            self._caches.prefill_draft({row: job.prompt for row, job in new})
            for _, job in new:
                job.prefilled = True
            backlog = self._rested()
            if backlog:
                drafted, common_prefix = [job.drafted for _, job in backlog], [job.common_prefix for _, job in backlog]
                self._caches.catch_up([row for row, _ in backlog], self.state.table.tokens, drafted, common_prefix)
            timer.lap("read")
        for row, job in backlog:
            job.drafted = job.common_prefix
            self.state.table.drafted[row] = job.common_prefix

    def _rested(self) -> list[tuple[int, RequestState]]:
        """Return the rows of which a recurrent draft model missed a long part of the common prefix while it rested. It
        reads that part as it reads a prompt."""
        if not self._caches.draft_rests:
            return []
        return [(row, job) for row, job in self.running if job.common_prefix - job.drafted > MERGED_BACKLOG]

    def iteration_shape(self, shape: Shape, reading: DraftWork, *, narrow: bool) -> IterationShape:
        """Return the static shapes of the next iteration, and make room for its nodes in the cache and the suffix
        window. narrow: a first iteration may have one root per row."""
        running, caches = [job for _, job in self.running], self._caches
        beams = self._method.num_beams
        if narrow and not any(job.stats.steps for job in running):
            beams = 1  # a row begins with one live beam
        nodes = shape.nodes(beams)
        used = max(job.used for job in running) + nodes
        self._grow(used + 1)
        suffix = max(job.used - job.common_prefix for job in running) + nodes
        rests = shape.runs_draft and caches.draft_rests
        prefixes = (min(job.common_prefix, job.drafted) if rests else job.common_prefix for job in running)
        window = max(job.used - prefix for job, prefix in zip(running, prefixes, strict=True)) + nodes
        caches.hold(self.state.rows, window)
        self.state.beams.ancestors = fit_window(self.state.beams.ancestors, caches.round_window(suffix))
        active = min(caches.round_slots(used), caches.slots - 1)
        idle = not shape.runs_draft and all(job.drafted <= job.common_prefix for job in running)
        prompt_slots, suffix = self._prompt_slots(nodes, active)
        generated = min(job.stats.steps for job in running)
        return IterationShape(
            slots=active,
            depth=shape.depth,
            drafts_per_layer=shape.drafts_per_layer,
            draft_backlog=reading.draft_backlog if shape.runs_draft else 0,
            looked_up=shape.looked_up,
            idle=idle,
            prompt_slots=prompt_slots,
            suffix=suffix,
            generated=generated,
            beams=beams,
        )

    def _prompt_slots(self, nodes: int, active: int) -> tuple[tuple[int, ...] | None, int]:
        """Return `prompt_slots` and `suffix` of the target's forward. On a GPU they are the same for all iterations of
        a shape."""
        target = self._caches.target
        if not target.invariant:
            return None, 0
        if not host_reads(target.device):
            return (0,) * len(self.jobs), active
        prompt_slots = tuple(0 if job is None else len(job.prompt) - 1 for job in self.jobs)
        longest = max(job.used - prompt_slots[row] for row, job in self.running)
        return prompt_slots, self._caches.round_slots(longest + nodes)

    def remove(self, rows: Sequence[int]) -> None:
        """Free rows."""
        for row in rows:
            job, self.jobs[row] = self.jobs[row], None
            if job is not None and not job.prefilled:
                self._caches.forget(row, draft=True)
            self._tables.tries.end(self._legal[row])
            self._legal[row] = FREE
        self.state.release(rows)

    def shrink(self) -> list[int]:
        """Drop free rows where at least a quarter is free (on a GPU half), so that the last requests do not pay for
        empty ones. Return the rows that are kept, in their order; an empty list where nothing is dropped."""
        taken = [row for row, _ in self.running]
        most = 0.75 if host_reads(self._caches.target.device) else 0.5  # a GPU captures each number of rows anew
        if not taken or len(taken) > most * len(self.jobs):
            return []
        self.jobs = [self.jobs[row] for row in taken]
        self._legal = [self._legal[row] for row in taken]
        self.state.select(taken)
        self._tables.rules.select(taken)
        self._caches.select_rows(taken)
        return taken


def _encoder_inputs(jobs: Mapping[int, RequestState]) -> dict[int, Tensor]:
    """Return what the encoder reads for each row."""
    return {row: job.encoder_input for row, job in jobs.items() if job.encoder_input is not None}
