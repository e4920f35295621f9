"""Settings of a conversation: what goes into a chat template beside the messages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dsbd_cli.config.checking import refuse, require
from dsbd_cli.errors import reading

MOST_BYTES = 1 << 20  # of a chat template; those of known models have up to 20,000

# names that transformers' apply_chat_template gives another meaning than a variable of the template
ELSEWHERE = {
    "messages": "messages",
    "conversations": "messages",
    "tools": "tools",
    "documents": "documents",
    "chat_template": "chat_template of the run",
    "continue_final_message": "continue_final_message",
    "add_generation_prompt": "continue_final_message",
}
IN_ANOTHER_CALL = (
    "tokenize",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
)  # of apply_chat_template


def check_template_kwargs(kwargs: object) -> None:
    """Raise UsageError for what cannot be the variables of a chat template."""
    name = "chat_template_kwargs"
    fits = isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)
    require(fits, name, kwargs, "an object")
    assert isinstance(kwargs, dict)
    for key in kwargs:
        if key in ELSEWHERE:
            refuse(name, kwargs, f"{key} is no variable of a template: give {ELSEWHERE[key]}")
        if key in IN_ANOTHER_CALL:
            refuse(name, kwargs, f"{key} is no variable of a template: drop it")


def template_text(template: str | os.PathLike[str]) -> str:
    """Return a chat template, which is given as text, or as a file by its path. Raises UsageError."""
    name = "chat_template"
    if isinstance(template, str):
        require("{" in template, name, template, "the text of a template: for a file give a Path")
        return template
    path = Path(template)
    require(path.is_file(), name, str(path), "a file")
    if (size := path.stat().st_size) > MOST_BYTES:
        refuse(name, str(path), f"it has {size} bytes, and a template may have {MOST_BYTES}")
    with reading(f"chat_template {path}"):
        return path.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Settings of a conversation, as vLLM and transformers name them.

    Attributes:
        tools: functions that the model may call, as JSON schemas in the form of the OpenAI API. A list may be given.
        tool_choice: auto: the model decides; none: the template gets no tools; required: every answer calls one;
            another text: the name of the function that every answer calls.
        documents: texts that the template shows to the model. A list may be given.
        template_kwargs: variables of the template, such as enable_thinking. Which ones it knows cannot be told.
        continue_final_message: the answer continues the last message, which is the assistant's, and no new turn opens.
    """

    tools: tuple[dict[str, object], ...] = ()
    tool_choice: str = "auto"
    documents: tuple[dict[str, object], ...] = ()
    template_kwargs: dict[str, object] | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        for name in ("tools", "documents"):
            value: object = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            value = getattr(self, name)
            fits = isinstance(value, tuple) and all(isinstance(item, dict) for item in value)
            require(fits, name, value, "a list of objects")
        require(
            isinstance(self.tool_choice, str) and bool(self.tool_choice), "tool_choice", self.tool_choice, "a string"
        )
        if self.tool_choice not in ("auto", "none") and not self.tools:
            refuse("tool_choice", self.tool_choice, "there are no tools: give some, or drop it")
        if self.template_kwargs is not None:
            check_template_kwargs(self.template_kwargs)
        continued = self.continue_final_message
        require(isinstance(continued, bool), "continue_final_message", continued, "true or false")

    @property
    def forces_call(self) -> bool:
        """True where every answer must call a function."""
        return self.tool_choice not in ("auto", "none")

    @property
    def reads_calls(self) -> bool:
        """True where calls of functions are read from the answers."""
        return bool(self.tools) and self.tool_choice != "none"


NO_CHAT = ChatConfig()
