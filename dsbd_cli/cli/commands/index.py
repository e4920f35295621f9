"""`dsbd index`: an index of the user's own texts, a file that the drafter `retrieval` reads."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Annotated, Literal

import typer

from dsbd_cli.cli.options.declare import Existing, Output, Quiet
from dsbd_cli.cli.run.files import check_no_input, check_replaced
from dsbd_cli.cli.run.messages import say, set_style, talking
from dsbd_cli.cli.run.signals import StopSignals
from dsbd_cli.config.model import BUILTIN_TARGET, ModelSpec
from dsbd_cli.errors import InvalidRowError, UsageError, plural
from dsbd_cli.io.lines.corpus import read_documents
from dsbd_cli.io.lines.replace import replacing

NEWS_EVERY = 1 << 22  # tokens between two messages

Corpus = Annotated[list[Path], typer.Argument(metavar="CORPUS", help="texts, or .jsonl files", show_default=False)]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help=f"whose tokenizer: alias, folder or hub id (default: {BUILTIN_TARGET})",
        metavar="MODEL",
        show_default=False,
    ),
]
Field = Annotated[
    str,
    typer.Option(
        "--field",
        help="the text in a line of a .jsonl file (default: text)",
        metavar="NAME",
        show_default=False,
    ),
]
Trust = Annotated[
    Literal["target"] | None,
    typer.Option("--trust-remote-code", help="target: run code that its checkpoint brings with it", metavar="MODEL"),
]


def index(
    corpus: Corpus,
    output: Output,
    target: Target = BUILTIN_TARGET,
    field: Field = "text",
    existing: Existing = "error",
    quiet: Quiet = False,
    trust_remote_code: Trust = None,
) -> None:
    """Index texts for dsbd generate --drafter suffix:FILE: the tokens of the target.

    A plain file is one document; a .jsonl file has one per line. Files may end in .gz or .zst.

    The file has 4 bytes per token. A run that looks up in it needs 28 to 56 bytes of memory per token.
    """
    check_replaced(output, existing=existing)
    check_no_input("--output", output, [*corpus, Path(target)])
    for path in corpus:
        if not path.is_file():
            raise UsageError(f"{path} is no file")
    from dsbd_cli.engine.drafting.index import CorpusTokens, write_index
    from dsbd_cli.models.checkpoints.catalog import tokenizer_of

    set_style(quiet=quiet)
    # the new file is locked from here on, so that a second command on this output is refused before it reads anything
    with replacing(output) as stream, StopSignals(), talking() as talk:
        codec = tokenizer_of(ModelSpec(target, trust_remote_code=trust_remote_code is not None))
        tokens, reported = CorpusTokens(), 0
        for path, piece in _pieces(corpus, field):
            if piece is None:
                tokens.end_document()
                continue
            try:
                tokens.extend(codec.encode_pieces([piece])[0])
            except InvalidRowError as error:
                raise UsageError(f"{path}, document {tokens.documents + 1} of all: {error}") from None
            if len(tokens.ids) - reported >= NEWS_EVERY:
                reported = len(tokens.ids)
                talk.now(f"{reported} tokens read")
        write_index(buffered := BufferedWriter(stream), tokens.tokens, codec.token_bytes())
        buffered.detach()
    stream.close()
    counts = plural(tokens.documents, "document"), plural(len(tokens.ids) - tokens.documents, "token")
    say(f"{output}: {', '.join(counts)}")


def _pieces(corpus: list[Path], field: str) -> Iterator[tuple[Path, str | None]]:
    """Yield texts in pieces, each with its file, and None after each document."""
    for path in corpus:
        for document in read_documents(path, field):
            yield from ((path, piece) for piece in document)
            yield path, None
