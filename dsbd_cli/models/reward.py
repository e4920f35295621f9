"""Reward models: transformers sequence classifiers with one output that score a candidate after its prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from dsbd_cli.config.checking import refuse
from dsbd_cli.config.model import ModelSpec
from dsbd_cli.errors import InvalidRowError, NumericalError, UnsupportedModelError
from dsbd_cli.models.chat import ChatTemplate, check_template
from dsbd_cli.models.checkpoints.checkpoint import Checkpoint
from dsbd_cli.models.checkpoints.loader import device_of, load_network

Asked = str | Sequence[Mapping[str, object]]


class RewardModel:
    """A model that scores texts. A prompt of messages goes through the chat template, with the candidate as the
    assistant's answer. A plain prompt is joined to the candidate."""

    def __init__(
        self, spec: ModelSpec, template: str | None = None, template_kwargs: Mapping[str, object] | None = None
    ) -> None:
        """Load the model. template: takes the place of its chat template. template_kwargs: variables of the template.

        Raises ModelNotFoundError and ModelError, or UnsupportedModelError where it is no sequence
        classifier with one output."""
        from transformers import AutoModelForSequenceClassification

        checkpoint = Checkpoint.open(spec)
        config = checkpoint.config
        names = [str(name) for name in getattr(config, "architectures", None) or ()]
        if config.num_labels != 1 or not any("Classification" in name or "Reward" in name for name in names):
            raise UnsupportedModelError(
                f"{spec.source!r} is no reward model: it is {', '.join(names) or config.model_type} with "
                f"{config.num_labels} outputs, but must be a sequence classifier with one"
            )
        if device_of(spec).type == "cpu":
            checkpoint = checkpoint.like(dtype="float32")
        self._model = load_network(checkpoint, config, AutoModelForSequenceClassification)
        self._tokenizer = checkpoint.tokenizer
        if template is not None:
            check_template(template)
        self._template = ChatTemplate(self._tokenizer, template, template_kwargs)
        if template_kwargs and not self.chat:
            reason = f"reward model {spec.source} has no chat template: drop it"
            refuse("chat_template_kwargs", template_kwargs, reason)
        self._limit = getattr(config.get_text_config(), "max_position_embeddings", None)

    @property
    def chat(self) -> bool:
        """Whether it has a chat template."""
        return self._template.exists

    @torch.inference_mode()
    def scores(self, prompt: Asked, texts: Sequence[str]) -> list[float]:
        """Return the reward of each text. Each text is run by itself, so that no score depends on padding. Raises
        InvalidRowError for a text that is too long or empty, or a conversation without a chat template, and
        NumericalError for a reward that is no number."""
        scores = []
        for text in texts:
            ids = self._ids(prompt, text)
            if self._limit is not None and len(ids) > self._limit:
                raise InvalidRowError(
                    f"prompt and candidate have {len(ids)} tokens, but the reward model has {self._limit} positions"
                )
            if not ids:
                raise InvalidRowError("prompt and candidate are empty: there is nothing for the reward model to read")
            tokens = torch.tensor([ids], device=self._model.device)
            reward = float(self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, 0])
            if not math.isfinite(reward):
                raise NumericalError(f"the reward model returned {reward}: it cannot rank the candidates")
            scores.append(reward)
        return scores

    def _ids(self, prompt: Asked, text: str) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt + text)["input_ids"]
            return ids
        if not self.chat:
            raise InvalidRowError("the row has messages, but the reward model's tokenizer has no chat template")
        messages: list[Mapping[str, object]] = [
            *(dict(message) for message in prompt),
            {"role": "assistant", "content": text},
        ]
        shown = self._template.render(messages, opened=False)
        prefix_ids: list[int] = self._tokenizer(shown, add_special_tokens=False)["input_ids"]
        return prefix_ids
