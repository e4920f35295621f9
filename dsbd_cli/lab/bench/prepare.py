"""The settings of a run, and the prompts of a task as token ids that fit both models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from dsbd_cli.config.chat import NO_CHAT
from dsbd_cli.config.grammars import Grammar
from dsbd_cli.config.sampling import SamplingConfig
from dsbd_cli.engine.protocols import EncoderDecoderCodec, TextCodec
from dsbd_cli.errors import InvalidRowError, PromptTooLongError, UsageError, plural
from dsbd_cli.io.records.file_roots import FILE_FIELDS
from dsbd_cli.lab.bench.sweep import SweepSetting
from dsbd_cli.lab.tasks.dataset import Dataset
from dsbd_cli.lab.tasks.record import TaskRecord
from dsbd_cli.requests import Request, derive_seed

MIN_WINDOW = 8
MAX_SKIPPED_PER_RECORD = 100


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Settings of a run, all but the models.

    Attributes:
        datasets: data sets that are answered; `data`: where they came from, for the record.
        settings: methods at points of a sweep, in order.
        records: number of records of each data set, at most.
        rounds: how often every record is timed; quality and counters come from the first round.
        batch_size: requests that are decoded together.
        seed: of the noise; each record derives its own from this one and its id.
        notes: notes on the plan, which are reported with the results.
        grammar: for every answer to a record that has no grammar of its own.
    """

    datasets: Sequence[Dataset]
    settings: Sequence[SweepSetting]
    records: int
    rounds: int
    batch_size: int
    sampling: SamplingConfig
    seed: int = 0
    data: str | None = None
    notes: Sequence[str] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A record and what is decoded for it.

    Attributes:
        ids: token ids of the prompt, or of the encoder input; empty where `source` is given.
        runs: returns whether a text runs on the record's database; None where it has none.
        source: a request with the record's speech or picture; None for text.
    """

    record: TaskRecord
    ids: tuple[int, ...]
    runs: Callable[[str], bool] | None = None
    source: Request | None = None

    def sampling(self, run_sampling: SamplingConfig, changes: Mapping[str, object]) -> SamplingConfig:
        """Return the options of the record, or of the run where it has none. changes: fields that the method sets."""
        return replace(self.record.sampling(run_sampling), **changes)  # type: ignore[arg-type]

    def seed(self, run_seed: int) -> int:
        """Return the seed of the record's own request, else one derived from `run_seed` and the record's id."""
        return derive_seed(run_seed, self.record.id) if self.record.request is None else self.record.request.seed

    def request(self, name: str, seed: int, sampling: SamplingConfig, grammar: Grammar | None = None) -> Request:
        """Return the request for our engine. name: its id. grammar: of the run; a record's own takes its place."""
        request = Request(prompt_ids=self.ids) if self.source is None else self.source
        if (own := self.record.request) is not None:
            request, grammar = replace(request, allow=own.allow), own.grammar or grammar
        return replace(request, id=name, seed=seed, sampling=sampling, grammar=grammar)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set, the prompts of it that are run, in windows, and notes for the report."""

    dataset: Dataset
    windows: tuple[tuple[Prompt, ...], ...]
    notes: tuple[str, ...]


def window_size(batch_size: int) -> int:
    """Return how many records are timed in one stretch."""
    return max(MIN_WINDOW, batch_size)


def prepare(
    dataset: Dataset, codec: TextCodec, count: int, size: int, room: int | None, sampling: SamplingConfig
) -> Prepared:
    """Return the first `count` records that fit, in windows of `size`.

    room: tokens that a prompt may have besides the new tokens of the run; None for any number. sampling: of the run.

    Raises UsageError where no record fits, or where a record cannot be encoded: an empty prompt, or a conversation that
    has no plain text and meets a tokenizer without a chat template.
    """
    prompts: list[Prompt] = []
    too_long = too_long_sources = plain_chats = 0
    records = itertools.islice(dataset.records(), MAX_SKIPPED_PER_RECORD * count)
    while len(prompts) < count and (record := next(records, None)) is not None:
        record_sampling = record.sampling(sampling)
        source = _source(record, record_sampling)
        if source is not None:
            if _fits(record, source, codec):
                prompts.append(Prompt(record, (), None, source))
            else:
                too_long_sources += 1
            continue
        ids, as_plain = encode_record(record, codec, record_sampling)
        if not ids:
            raise UsageError(f"record {record.id} has an empty prompt")
        # an encoder's input does not take positions from the generated tokens
        more = 0 if isinstance(codec, EncoderDecoderCodec) else record_sampling.max_new_tokens - sampling.max_new_tokens
        if room is not None and len(ids) > room - more:
            too_long += 1
            continue
        plain_chats += as_plain
        prompts.append(Prompt(record, tuple(ids), _runs(dataset, record)))
    if not prompts and too_long_sources:
        raise UsageError(f"no record of {dataset.name} fits: the audio of each is too long for the target: shorten it")
    if not prompts:
        raise UsageError(
            f"no record of {dataset.name} fits: prompt and new tokens together are more than the models hold; shorten "
            "the prompts, lower --max-new-tokens or the lines' own max_new_tokens, or use other models"
        )
    notes = list(dataset.notes)
    for left_out, why in (
        (too_long, "prompt and new tokens do not fit the models"),
        (too_long_sources, "their audio is too long"),
    ):
        if left_out:
            notes.append(f"{dataset.name}: left out, because {why}: {plural(left_out, 'record')}")
    if len(prompts) < count and too_long + too_long_sources == 0:
        notes.append(
            f"{dataset.name}: the data holds {plural(len(prompts), 'record')}, fewer than the {count} asked for"
        )
    if plain_chats:
        notes.append(
            f"{dataset.name}: the target's tokenizer has no chat template, so questions are given as plain text"
        )
    windows = tuple(tuple(prompts[start : start + size]) for start in range(0, len(prompts), size))
    return Prepared(dataset, windows, tuple(notes))


def _runs(dataset: Dataset, record: TaskRecord) -> Callable[[str], bool] | None:
    execute = dataset.execute
    return None if execute is None else lambda text: execute(record, text) is not None


def _source(record: TaskRecord, sampling: SamplingConfig) -> Request | None:
    """Return a record's speech or picture as a request with its prompt; None where it has neither."""
    audio, image = (str(record.meta[name]) if name in record.meta else None for name in FILE_FIELDS)
    if audio is image is None:
        return None
    return Request(record.prompt or None, audio=audio, image=image, sampling=sampling)


def _fits(record: TaskRecord, source: Request, codec: TextCodec) -> bool:
    """Return whether the target takes the speech or the picture at once, which it does not where speech is too long.
    Raises UsageError where the file cannot be read."""
    try:
        if isinstance(codec, EncoderDecoderCodec):
            return codec.encoder_input(source).windows is None
        source.check_source("text")
    except PromptTooLongError:
        return False
    except InvalidRowError as error:
        raise UsageError(f"record {record.id}: {error}") from None
    return True


def encode_record(record: TaskRecord, codec: TextCodec, sampling: SamplingConfig) -> tuple[list[int], bool]:
    """Return the token ids of the prompt, or of the encoder input where the target has an encoder, and whether a
    conversation was encoded as plain text. Raises UsageError where the record cannot be encoded."""
    messages, chat = record.meta.get("messages"), NO_CHAT if record.request is None else record.request.chat
    if isinstance(codec, EncoderDecoderCodec):
        if messages is not None:
            raise UsageError(f"record {record.id} is a conversation, but the target has an encoder, which reads a text")
        try:
            encoder_input = codec.encoder_input(Request(record.prompt, sampling=sampling)).encoder_input
        except InvalidRowError as error:
            raise UsageError(f"record {record.id}: {error}") from None
        return encoder_input.tolist(), False
    if messages is None:
        adds = sampling.add_special_tokens
        return codec.encode(record.prompt) if adds else codec.encode_pieces([record.prompt])[0], False
    try:
        text = codec.render_chat(cast("list[dict[str, object]]", messages), chat)
        return codec.encode_pieces([text])[0], False
    except InvalidRowError as error:
        if not record.prompt:
            raise UsageError(f"record {record.id}: {error}") from None
        return codec.encode(record.prompt), True
