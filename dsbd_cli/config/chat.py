"""Settings of a conversation: what goes into a chat template beside the messages."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_cli.config.checking import refuse, require


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
        kwargs = self.template_kwargs
        fits = kwargs is None or (isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs))
        require(fits, "chat_template_kwargs", kwargs, "an object")
        continued = self.continue_final_message
        require(isinstance(continued, bool), "continue_final_message", continued, "true or false")
