"""A transformers encoder-decoder model as a ForestModel: its source is read once per request, and the forest holds its
answers.

Shape letters: R rows, n nodes of a forward, S cache slots, Z source places, V vocabulary, B sequences, T tokens.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import Seq2SeqLMOutput

from dsbd_cli.engine.protocols import ForestInput
from dsbd_cli.errors import UnsupportedModelError, one_line
from dsbd_cli.models.attention.metadata import AttentionMetadata, LayerMask, Split
from dsbd_cli.models.forest_model import calibration_tokens, repeated
from dsbd_cli.models.transformers_backend.attention import NAME, attend_by_function, attention_over
from dsbd_cli.models.transformers_backend.base import TransformersForestModel
from dsbd_cli.models.transformers_backend.crossing import STEP, CrossCache, ForestPairCache
from dsbd_cli.models.transformers_backend.patching import PackedLinear
from dsbd_cli.models.transformers_backend.picture_sizes import any_size, picture_shape, sample_shape, swin_places
from dsbd_cli.models.transformers_backend.positions import DecoderPositions, decoder_of
from dsbd_cli.ops.interface import host_reads

DECODER_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
ENCODER_LIMITS = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings")
MASK = "encoder_attention_mask"  # argument of a decoder; with audio the whole model's mask of the source is another
PADDED_TO = 128  # tokens: a longer source fills the processor by itself
UNLIMITED = 512  # positions of a table whose size the config does not tell
UNMASKED_ALONE = ("led",)  # kinds of models that make no mask for one token, so that it would see all slots


class Seq2SeqForestModel(TransformersForestModel):
    """A model with an encoder and a decoder. `encode` comes before the first forward of a row."""

    def __init__(
        self, model: Any, name: str, stock: Callable[[], Any] | None = None, digest: str | None = None
    ) -> None:
        """digest: what `encoder_digest` gives for the model before its products are packed."""
        self.encoder_digest = digest
        self._encoder = model.get_encoder()
        self._cross = CrossCache(model.get_input_embeddings().weight.device)
        self._positions = DecoderPositions(model, _decoder_positions(model.config) or UNLIMITED)
        self._hidden: Tensor | None = None  # of the sources that are being encoded: [R, Z, d]
        self._output: Any = None  # class of the encoder's output
        self._encoder_width = 1
        self._follower: Seq2SeqForestModel | None = None
        self._shared = False
        self._picture_places = 1  # of the pictures that the encoder takes, where these are of one size
        decoder = decoder_of(model)
        self._takes_source_mask = MASK in inspect.signature(type(decoder).forward).parameters
        self._mask: Tensor | None = None  # of the forward under way: which source places its nodes see
        if self._takes_source_mask:
            decoder.register_forward_pre_hook(self._give_mask, with_kwargs=True)
        super().__init__(model, name, stock)
        tokens = torch.arange(5, 13, device=self._device).unsqueeze(0)
        attend_by_function(model, lambda: self.plain(tokens, sample_encoder_input(self, 8, 0)))
        self.copies_prefixes = False  # what the decoder keeps of its first tokens depends on the source

    @property
    def has_encoder(self) -> bool:
        return True

    @property
    def max_positions(self) -> int | None:
        """Number of positions of the decoder; None where it uses distances instead."""
        return _decoder_positions(self._config) if "bias" not in self._positions.kinds else None

    @property
    def max_encoder_input(self) -> int | None:
        """Largest number of tokens of a source; None where the encoder uses distances instead, or reads no tokens."""
        if self.encoder_input_name != "input_ids" or "bias" in self._positions.kinds:
            return None
        config = self._model.config
        return _first_number(getattr(config, "encoder", None) or config, ENCODER_LIMITS)

    @property
    def encoder_input_name(self) -> str:
        """Name of the encoder's input: input_ids, input_features, input_values, pixel_values or flattened_patches."""
        name: str = self._model.main_input_name
        return name

    @property
    def encoder_input_shape(self) -> tuple[int, ...] | None:
        """The part of a source's shape that the encoder insists on: bins of features, [C, H, W] of a picture, numbers
        of a patch. None where it insists on none."""
        config = self._model.config
        if self.encoder_input_name == "pixel_values":
            return picture_shape(self._encoder.config)
        if self.encoder_input_name == "flattened_patches":
            return (config.vision_config.patch_embed_hidden_size,)
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
        return None if self.encoder_input_name == "input_ids" or bins is None else (int(bins),)

    @property
    def encoder_vocab_size(self) -> int:
        """Rows of the encoder's embedding table."""
        if self.encoder_input_name != "input_ids":
            return 0
        return int(self._encoder.get_input_embeddings().weight.shape[0])

    @property
    def generation(self) -> int:
        return self._cache.generation + self._cross.generation

    @property
    def by_parts(self) -> bool:
        return self._all_split(len(self._cache.layers) + len(self._cross.layers))

    def share_encoder(self, follower: Seq2SeqForestModel) -> None:
        """Give the follower, whose encoder is the same, the output of this model's encoder for each source from now
        on."""
        self._follower, follower._shared = follower, True

    def reserve(self, rows: int, slots: int, window: int | None = None) -> None:
        super().reserve(rows, slots, window)
        self._cross.reserve(rows)

    def release(self) -> None:
        super().release()
        self._cross.release()

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._cross.select_rows(rows)

    @torch.no_grad()
    def clear(self, row: int, start: int = 0) -> None:
        super().clear(row, start)
        self._cross.clear(row)

    def encoder_bytes(self, encoder_input: Tensor) -> int:
        """Return the bytes of keys and values of a source [Z] int64, or [bins, frames], [samples], [C, H, W] or
        [patches, d] float."""
        return self._cross.bytes_per_place * self.encoder_places(encoder_input)

    def encoder_places(self, encoder_input: Tensor) -> int:
        """Return the number of places of a source in the encoder, or an upper bound."""
        if self.encoder_input_name in ("input_ids", "flattened_patches"):
            return len(encoder_input)
        if self.encoder_input_name == "pixel_values":
            config = self._encoder.config
            return swin_places(config, encoder_input) if any_size(config) else self._picture_places
        return getattr(self._model.config, "max_source_positions", None) or encoder_input.shape[-1]

    @torch.no_grad()
    def encode(self, rows: Sequence[int], encoder_inputs: Sequence[Tensor]) -> None:
        """Read the sources of these cache rows: token ids [Z] int64, features [bins, frames], a wave [samples], a
        picture [C, H, W] or its patches [Z, d].

        The result for a source does not depend on other sources: see `_batch_key`. A model that shares the encoder of
        another one reads nothing here, because that one has given it the sources already.
        """
        if self._shared:
            return
        groups = defaultdict[tuple[int, ...], list[int]](list)
        for index, encoder_input in enumerate(encoder_inputs):
            groups[self._batch_key(index, encoder_input)].append(index)
        read = [(places, *self._encoded([encoder_inputs[index] for index in places])) for places in groups.values()]
        apart = defaultdict[int, list[tuple[list[int], Tensor, Any]]](list)
        for number, group in enumerate(read):
            apart[0 if self._rows_alike else number].append(group)
        for parts in apart.values():
            width = max(hidden.shape[1] for _, hidden, _ in parts)
            hidden = torch.cat(
                [nn.functional.pad(states, (0, 0, 0, width - states.shape[1])) for _, states, _ in parts]
            )
            places = [index for some, _, _ in parts for index in some]
            together = [rows[index] for index in places]
            # the decoder attends to all places of speech
            heard = encoder_inputs[0].is_floating_point()
            lengths = [hidden.shape[1] if heard else len(encoder_inputs[index]) for index in places]
            self._project(together, hidden, lengths, parts[0][2])
            follower = self._follower
            if follower is not None and follower._cache.rows > max(together):  # else nobody drafts with it
                follower._project(together, hidden.to(follower.device), lengths, parts[0][2])

    def _batch_key(self, index: int, encoder_input: Tensor) -> tuple[int, ...]:
        """Return a key. Sources with equal keys share a forward of the encoder.

        On the CPU sources of up to PADDED_TO tokens share one where products do not depend on the number of rows. They
        are padded to whole steps, with one place of padding at least, so that the same kernels run for a source that is
        alone. Any other source has a forward of its own there. On other devices sources of one shape share one.
        """
        if encoder_input.ndim == 1 and self._rows_alike and len(encoder_input) <= PADDED_TO:
            width = (len(encoder_input) // STEP + 1) * STEP
            if self.max_encoder_input is None or width <= self.max_encoder_input:
                return (-1, width)
        return (index if host_reads(self._device) else -2, *encoder_input.shape)

    def layers_replaced(self) -> None:
        super().layers_replaced()
        for name in ("_rows_alike", "_lm_head"):
            vars(self).pop(name, None)

    @functools.cached_property
    def _lm_head(self) -> PackedLinear | None:
        """The LM head with the bias of the logits in its product; None where the model adds the bias itself."""
        return _biased_lm_head(self._model)

    @functools.cached_property
    def _rows_alike(self) -> bool:
        """Whether on the CPU the encoder's output for a source does not depend on the other sources in the forward, and
        the decoder takes a mask of the padding."""
        if self._device.type != "cpu" or self.encoder_input_name != "input_ids" or not self._takes_source_mask:
            return False
        plain = any(type(module) is nn.Linear for module in self._model.modules())
        # experts drop tokens where there are many; encoders with attention by blocks attend to padding, too
        config = self._model.config
        crowded = any(getattr(config, name, None) is not None for name in ("expert_capacity", "encoder_attention_type"))
        named = getattr(self._encoder.config, "_attn_implementation", None) == NAME
        return named and not plain and not crowded

    def _encoded(self, encoder_inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Return the hidden states [n, Z, d] of sources that share a forward, and the class of the encoder's output."""
        first = encoder_inputs[0].to(self._device)
        group = self._batch_key(0, first)
        options: dict[str, Tensor] = {}
        if group[0] == -1:
            padding = getattr(self._model.config, "pad_token_id", None) or 0
            batch = torch.full((len(encoder_inputs), group[1]), padding, dtype=torch.int64)
            mask = torch.zeros_like(batch)
            for row, encoder_input in enumerate(encoder_inputs):
                batch[row, : len(encoder_input)] = encoder_input
                mask[row, : len(encoder_input)] = 1
            options["attention_mask"] = mask
        else:
            batch = torch.stack([encoder_input.to(self._device) for encoder_input in encoder_inputs])
        if batch.is_floating_point():
            batch = batch.to(self._model.dtype)
        output = self._encoder(**{self.encoder_input_name: batch}, **options, return_dict=True)
        return output[0], type(output)

    def _project(self, rows: list[int], hidden: Tensor, lengths: list[int], kind: Any) -> None:
        """Project hidden states [n, Z, d] to the decoder's keys and values, by one forward of a token in the trash
        slot.

        rows: the sources' cache rows. lengths: places of each source that hold anything. kind: class of the encoder's
        output.
        """
        self._output, self._encoder_width = kind, hidden.shape[-1]
        # a decoder that takes no mask of the source reads all places: there are as many as the source has
        self._cross.reserve(self._cache.rows, hidden.shape[1], step=STEP if self._takes_source_mask else 1)
        self._cross.write(rows, lengths)
        zero = torch.zeros(len(rows), 1, dtype=torch.int64, device=self._device)
        alone = torch.ones(len(rows), 1, 1, dtype=torch.bool, device=self._device)
        index = torch.tensor(rows, device=self._device)
        self._hidden = hidden
        try:
            self._call(self._runner(), ForestInput(zero, zero, zero + self._cache.slots - 1, alone, zero, index))
        finally:
            self._hidden = None

    @torch.no_grad()
    def plain(self, tokens: Tensor, encoder_input: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V] of answers [B, T] to one source, by an ordinary forward without our cache and
        masks."""
        assert encoder_input is not None, "an answer has a source"
        if encoder_input.is_floating_point():  # sound and pictures are large: each is read once for all answers
            hidden, kind = self._encoded([encoder_input])
            source: dict[str, Any] = {"encoder_outputs": kind(last_hidden_state=hidden.expand(len(tokens), -1, -1))}
        else:
            source = {self.encoder_input_name: encoder_input.to(self._device).expand(len(tokens), -1)}
        output = self._model(**source, decoder_input_ids=tokens, use_cache=False, return_dict=True)
        logits: Tensor = output.logits
        return logits.to(self._device)

    def calibrate(self) -> None:
        tokens = calibration_tokens(len(self.embeddings), self.max_positions)
        size = tokens.shape[1] if self.max_encoder_input is None else min(tokens.shape[1], self.max_encoder_input)
        for seed, answer in enumerate(tokens):
            self.plain(answer.unsqueeze(0), sample_encoder_input(self, size, seed))

    def _run(self, batch: ForestInput, *, logits: bool) -> Tensor | None:
        if self._config.model_type in UNMASKED_ALONE and batch.tokens.shape[1] == 1:
            batch = repeated(batch, 2)
        return super()._run(batch, logits=logits)

    def _runner(self) -> Any:
        """Return the model without its LM head, where it has such a part."""
        return self._body if self._model.base_model is not self._model else self._model

    def _call(self, runner: Any, batch: ForestInput) -> Any:
        if runner is not self._model:
            runner = self._runner()
        rows = len(batch.tokens)
        self._cache.begin(batch.slots, batch.rows, batch.mask.shape[-1])
        hidden = self._hidden
        pair = ForestPairCache(self._cache, self._cross, known=hidden is None)
        metadata = self._attention_metadata(batch, "all slots")
        if hidden is None:
            self._cross.read(rows if batch.rows is None else batch.rows)
            # only its shape is used, because the keys and values are in the cache
            hidden = torch.zeros(1, 1, 1, dtype=self._model.dtype, device=self._device)
            hidden = hidden.expand(rows, self._cross.width, self._encoder_width)
        masks = self._masks(batch, metadata)
        inputs: dict[str, Any] = {
            "decoder_input_ids": self._ids_in_table(batch),
            "decoder_attention_mask": masks,
            "encoder_outputs": self._output(last_hidden_state=hidden),
            "past_key_values": pair,
        }
        if self._positions.argument:
            inputs[self._positions.argument] = batch.positions
        self._mask = self._source_mask(batch, hidden.shape[1], metadata)
        lm_head = self._lm_head if runner is self._model else None
        try:
            with (
                attention_over(metadata),
                self._positions.at(batch.positions, batch.slot_positions, inputs["decoder_input_ids"]),
            ):
                output = (self._body if lm_head else runner)(**inputs, use_cache=True, return_dict=True)
        finally:
            self._mask = None
        return output if lm_head is None else Seq2SeqLMOutput(logits=lm_head(output[0]))

    def _give_mask(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put our mask of the source in place of the model's own mask, in a forest's forward."""
        return (args, {**kwargs, MASK: self._mask}) if self._mask is not None else None

    def _source_mask(self, batch: ForestInput, width: int, metadata: AttentionMetadata) -> Tensor:
        """Return the mask [R, 1, n, Z] that is added to the scores of the sources' places."""
        rows, count = batch.tokens.shape
        sizes = self._cross.sizes[:rows] if batch.rows is None else self._cross.sizes[batch.rows]
        seen = torch.arange(width, device=self._device) < sizes.unsqueeze(1)  # [R, Z]
        seen = seen.unsqueeze(1).expand(-1, count, -1)
        by_row = host_reads(self._device)
        masked = by_row and self._takes_source_mask  # else there are as many places as the source has
        split: Split | None = None
        if metadata.split is not None:
            read = range(rows) if batch.rows is None or not by_row else batch.rows.tolist()
            lengths = tuple(self._cross.lengths[row] if by_row else 0 for row in read)
            split = Split.without_suffix(lengths) if masked else Split.of(lengths, 1 if by_row else width)
        metadata.source = LayerMask(seen, self._mask_dtype, split, whole=not masked)
        return metadata.source.additive

    def _probe(self) -> Tensor:
        """Return logits of one token, as for other models, after a source.

        Raises UnsupportedModelError where the source cannot be encoded.
        """
        self.reserve(1, 2)
        try:
            sample = sample_encoder_input(self, 8, 0)
            self.encode([0], [sample])
            if self.encoder_input_name == "pixel_values":
                self._picture_places = self._cross.lengths[0]
                if (places := self.encoder_places(sample)) != self._picture_places:
                    raise ValueError(f"a picture takes {self._picture_places} places, not {places}")
        except Exception as error:
            reason = one_line(error)
            raise UnsupportedModelError(
                f"{self.architecture} cannot keep its source apart from a tree of tokens "
                f"({type(error).__name__}: {reason}); use another model"
            ) from error
        return super()._probe()


def sample_encoder_input(model: Seq2SeqForestModel, size: int, seed: int) -> Tensor:
    """Return a random source for checks at load: `size` token ids, or features, or a wave of about that many frames, or
    a picture or `size` patches of one."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.module.config
    if model.encoder_input_name == "input_ids":
        return torch.randint(5, model.encoder_vocab_size, (size,), generator=generator)
    if model.encoder_input_name == "pixel_values":
        return torch.randn(sample_shape(model._encoder.config), generator=generator)
    if model.encoder_input_name == "flattened_patches":
        vision = config.vision_config
        places = torch.randint(1, vision.seq_len, (size, 2), generator=generator)
        return torch.cat((places, torch.randn(size, vision.patch_embed_hidden_size, generator=generator)), 1)
    if model.encoder_input_name == "input_values":
        return torch.randn(1000 * size, generator=generator)
    if hasattr(config, "num_mel_bins"):  # Whisper's encoder takes 30 seconds, no more and no less
        return torch.randn(int(config.num_mel_bins), 2 * int(config.max_source_positions), generator=generator)
    return torch.randn(8 * size, int(config.input_feat_per_channel), generator=generator)


def encoder_digest(model: Any) -> str:
    """Return a hash of the encoder's weights, their names and dtypes. It has to be taken before the weights are
    packed."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.get_encoder().state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _biased_lm_head(model: Any) -> PackedLinear | None:
    """Return the LM head of BART and similar models with the bias in its product. These models add the bias to the
    logits, which copies all of them. None where the model has another LM head."""
    lm_head, bias = model.get_output_embeddings(), getattr(model, "final_logits_bias", None)
    if not isinstance(lm_head, PackedLinear) or lm_head.bias is not None or not isinstance(bias, Tensor):
        return None
    return lm_head.with_bias(bias.flatten()) if bias.numel() == lm_head.out_features else None


def _decoder_positions(config: Any) -> int | None:
    """Return the number of positions that a config names for its decoder; None where it names none."""
    return _first_number(getattr(config, "decoder", None) or config, DECODER_LIMITS)


def _first_number(config: Any, names: Sequence[str]) -> int | None:
    """Return the first of these settings that the config has; None where it has none."""
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None
