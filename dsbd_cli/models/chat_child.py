"""Program that renders chat templates for `chat`, a process of its own, because a template is a program of the
checkpoint.

Each line of standard input is a JSON object {template, variables, asked, seconds}, where `asked` holds arguments of
render_jinja_template, and each is answered with a line {text} or {error}. Without `asked` the template is only
compiled. The lines that a template executes are counted, so that a loop ends at the same line on every machine. One
operation may still be long: a template that takes more processor time than `seconds` ends the process, and there is no
answer. The process ends with its input. It imports nothing of dsbd, and transformers without torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from types import FrameType
from typing import Any

MEMORY_BYTES = 2 << 30  # of address space; the process itself takes a quarter of it
MAX_CHARACTERS = 64 << 20  # of a rendered conversation: four times the longest line of an input
MAX_LINES = 4_000_000  # of the compiled template that one conversation executes; 1,000 messages take some 20,000


class LineCounter:
    """Counter of the lines that a template executes. It is given to sys.settrace."""

    def __init__(self) -> None:
        self.left = MAX_LINES

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        """Return the function that traces a frame: `line` for the frame of a template, None for other code."""
        return self.line if frame.f_code.co_filename == "<template>" else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        """Count a line. Raises RuntimeError where none is left."""
        self.left -= event == "line"
        if self.left < 0:
            raise RuntimeError(f"it executes more than {MAX_LINES} lines for them")
        return self.line


def rendered(question: dict[str, Any]) -> dict[str, str]:
    """Render the conversation of one line and return the answer to it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + question["seconds"]
    limit(resource.RLIMIT_CPU, until)
    sys.settrace(LineCounter())
    try:
        text = text_of(question)
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 30} GiB"}
    except Exception as error:  # templates raise what they like
        return {"error": " ".join(str(error).split())[:200] or type(error).__name__}
    finally:
        sys.settrace(None)
    if len(text) > MAX_CHARACTERS:
        return {"error": f"it makes {len(text)} characters of them, but {MAX_CHARACTERS} are the most"}
    return {"text": text}


def text_of(question: dict[str, Any]) -> str:
    """Return the text of a conversation, "" where a template is only compiled.

    Arguments of calls that are JSON text, as in the OpenAI API, are given as the object that they hold, as vLLM does.
    A template that fails on the object, because it joins texts, gets the text.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template, asked = question["template"], question.get("asked")
    if asked is None:
        render_jinja_template(conversations=[], chat_template=template)
        return ""
    # as apply_chat_template does
    messages = [{name: value for name, value in message.items() if value is not None} for message in asked["messages"]]

    def text(conversation: list[Any]) -> str:
        more = {name: value for name, value in asked.items() if name != "messages"}
        made: Any = render_jinja_template(
            conversations=[conversation], chat_template=template, **more, **question["variables"]
        )
        return str(made[0][0])

    with_objects = [with_argument_objects(message) for message in messages]
    try:
        return text(with_objects)
    except Exception:
        if with_objects == messages:
            raise
    return text(messages)


def with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, where they are the JSON text of one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [with_argument_object(call) for call in calls]}


def with_argument_object(call: Any) -> Any:
    """Return a call of a function with its arguments as an object, where they are the JSON text of one."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def limit(kind: int, value: int) -> None:
    """Set the soft limit of a resource, no higher than its hard limit."""
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main() -> None:
    """Answer each line of standard input with a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end is the end of the input
    limit(resource.RLIMIT_CORE, 0)
    import transformers.utils.chat_template_utils  # noqa: F401 # before memory is limited

    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    # what a template prints must not be taken for an answer
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(rendered(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
