"""Conversations in the form of a checkpoint's chat template, rendered by a child process with limits of time and
memory.

A template is a program that comes with the checkpoint: it may loop for ever, or make a text that no memory holds. The
child is started while a model with a template loads, or at the first conversation. It serves all tokenizers of the
process, and is started anew where a template has ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.config.chat import NO_CHAT, ChatConfig
from dsbd_cli.errors import InvalidRowError, UsageError, one_line

SECONDS = 10  # of processor time for one conversation; the templates of known models take less than a millisecond
CHILD = Path(__file__).with_name("chat_child.py")


class Renderer:
    """The child process and the exchange with it, one conversation at a time."""

    def __init__(self, seconds: int = SECONDS) -> None:
        """seconds: of processor time for one conversation."""
        self.starts = 0  # children that were started
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that started it: a fork must not share its pipes

    def render(self, template: str, variables: Mapping[str, object], **asked: object) -> str:
        """Return the text of a conversation. variables: of the template, beside the messages. asked: arguments of
        transformers' render_jinja_template. Raises InvalidRowError where the template refuses the conversation or
        exceeds the limits, or a value is no JSON."""
        question = {"template": template, "variables": dict(variables), "asked": asked, "seconds": self._seconds}
        try:
            line = json.dumps(question).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRowError(f"the conversation cannot be given to a chat template: {one_line(error)}") from None
        answer: dict[str, str] = json.loads(self._answer(line))
        if "error" in answer:
            raise InvalidRowError(f"the model's chat template refuses these messages: {answer['error']}")
        return answer["text"]

    def compile(self, template: str) -> str | None:
        """Return why a text is no template; None where it is one."""
        question = {"template": template, "seconds": self._seconds}
        answer: dict[str, str] = json.loads(self._answer(json.dumps(question).encode() + b"\n"))
        return answer.get("error")

    def begin(self) -> None:
        """Start the child now, so that its imports run at the same time as other work."""
        with self._lock:
            if self._child is None or self._owner != os.getpid():
                self._start()

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            _end(child)

    def _answer(self, line: bytes) -> bytes:
        """Send a line to the child and return the line that it answers. Raises InvalidRowError where the child ends
        instead."""
        with self._lock:
            if self._child is not None and self._child.poll() is not None:  # it was killed while it had nothing to do
                self.close()
            if self._child is None or self._owner != os.getpid():
                self._start()
            child = self._child
            assert child is not None
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(line)
                    child.stdin.flush()
                answer = child.stdout.readline()
            except BaseException:
                self.close()  # its late answer would be taken for that of the next conversation
                raise
            if answer.endswith(b"\n"):  # a child that ends may leave a part of a line
                return answer
            self._child = None
            code = _end(child)
            why = f"takes more than {self._seconds} s of processor time for these messages"
            if code != -signal.SIGXCPU:
                why = f"cannot be rendered: the process that does it ended with exit code {code}"
            raise InvalidRowError(f"the model's chat template {why}")

    def _start(self) -> None:
        # -P: otherwise the folder of the child's file would come first on the path, and its modules could hide others
        environment = {**os.environ, "USE_TORCH": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and isinstance(path, str))
        command = [sys.executable, "-P", str(CHILD)]
        self._child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner = os.getpid()
        self.starts += 1


def _end(child: subprocess.Popen[bytes]) -> int:
    """Close the pipes of a child that ends; return its exit code."""
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()
    return child.wait()


_renderer = Renderer()
atexit.register(_renderer.close)


def begin_rendering(*folders: Path) -> None:
    """Start the child process, whose imports take a second, where a folder of a checkpoint has a chat template."""
    for folder in folders:
        settings = folder / "tokenizer_config.json"
        if (folder / "chat_template.jinja").is_file() or (
            settings.is_file() and b'"chat_template"' in settings.read_bytes()
        ):
            _renderer.begin()


def check_template(text: str) -> None:
    """Raise UsageError for a text that is no template."""
    if (fault := _renderer.compile(text)) is not None:
        raise UsageError(f"chat_template cannot be used: {fault}", field="chat_template", value=text)


class ChatTemplate:
    """The chat template of a tokenizer, or a run's template in its place, with the run's variables."""

    def __init__(self, tokenizer: Any, text: str | None = None, kwargs: Mapping[str, object] | None = None) -> None:
        """text: takes the place of the tokenizer's template. kwargs: variables of the template; those of a conversation
        come before them."""
        self._tokenizer, self._text, self._kwargs = tokenizer, text, dict(kwargs or {})

    @property
    def exists(self) -> bool:
        """Whether there is a template."""
        return self._text is not None or bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def texts(self) -> str:
        """Text of the template, or of all where a tokenizer has several; empty where there is none."""
        templates = self._text if self._text is not None else getattr(self._tokenizer, "chat_template", None)
        return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""

    def render(
        self, messages: Sequence[Mapping[str, object]], chat: ChatConfig = NO_CHAT, *, opened: bool = True
    ) -> str:
        """Return the text of a conversation, as transformers' apply_chat_template does, by the child of this process.

        opened: it ends with the beginning of the assistant's answer, unless its last message is continued.

        Raises InvalidRowError where there is no template, or it refuses the conversation or exceeds the limits.
        """
        if not self.exists:
            raise InvalidRowError(
                "the model's tokenizer has no chat template: give a plain prompt, or use an instruct model"
            )
        tools = list(chat.tools) if chat.tools and chat.tool_choice != "none" else None
        template = self._text
        if template is None:
            try:
                template = self._tokenizer.get_chat_template(tools=tools)
            except ValueError as error:  # several templates, none of which is the default
                raise InvalidRowError(f"the model's chat template cannot be chosen: {error}") from None
        special = {
            name: value if isinstance(value, list) else str(value)
            for name, value in self._tokenizer.special_tokens_map.items()
        }
        return _renderer.render(
            template,
            {**special, **self._kwargs, **(chat.template_kwargs or {})},
            messages=[dict(message) for message in messages],
            tools=tools,
            documents=list(chat.documents) or None,
            continue_final_message=chat.continue_final_message,
            add_generation_prompt=opened and not chat.continue_final_message,
        )
