"""A codec of pictures for encoder-decoder models: a file or base64 data becomes pixels, and a prompt the tokens that
the decoder begins with. Needs the extra `image`."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsbd_cli.engine.protocols import EncoderRequest
from dsbd_cli.errors import InvalidRowError, shorten
from dsbd_cli.models.transformers_backend.encoder_inputs import Seq2SeqCodec
from dsbd_cli.models.transformers_backend.picture_sizes import picture_fault
from dsbd_cli.models.transformers_backend.row_files import MOST_BYTES, open_file, readable, shown
from dsbd_cli.requests import Request

if TYPE_CHECKING:
    from PIL.Image import Image

# what pillow reads by itself; others start programs (EPS) or hold no pixels
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MOST_PIXELS = 1 << 26  # of a picture, and of what an image processor makes of it: 8192 x 8192
DATA, BASE64 = "data:", ";base64,"
MOST_PREFIX = 200  # characters of a data URI before its data


def read_picture(image: str) -> Image:
    """Return a picture in RGB, upright, from a path or `data:image/png;base64,...`, as transformers' load_image does.

    Raises InvalidRowError for what is no picture, is too large or has several pages.
    """
    if not image.startswith(DATA):
        with open_file("image", image) as file:
            return _decoded(image, file)
    with readable("image", image):
        return _decoded(image, io.BytesIO(_contents(image)))


def _contents(image: str) -> bytes:
    """Return the bytes of a data URI. Raises InvalidRowError."""
    prefix = image[:MOST_PREFIX].partition(BASE64)
    if not prefix[1]:
        raise InvalidRowError(f"image is {shown(image)}, but data must be written as data:image/png;base64,...")
    data = image[len(prefix[0]) + len(BASE64) :]
    if len(data) > MOST_BYTES // 3 * 4:
        raise InvalidRowError(f"image is {shown(image)}, but must have at most {MOST_BYTES} bytes")
    return base64.b64decode(data, validate=True)


def _decoded(name: str, file: Any) -> Image:
    """Return the picture in an open file."""
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large pictures and of odd metadata
        Image.init()
        formats = [name for name in FORMATS if name in Image.OPEN]  # as this pillow was built
        with Image.open(file, formats=formats) as opened:  # reads the header alone
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise InvalidRowError(
                    f"image is {shown(name)}, which has {width} x {height} pixels, but may have {MOST_PIXELS} in all"
                )
            if opened.format != "MPO" and getattr(opened, "is_animated", False):
                raise InvalidRowError(f"image is {shown(name)}, which has several pages or frames: give one")
            opened.load()
            return ImageOps.exif_transpose(opened).convert("RGB")


class PictureCodec(Seq2SeqCodec):
    """A codec that turns pictures into the encoder's input, and prompts into the tokens that the decoder begins
    with."""

    reads = "image"

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...], start: int, model: Any, processor: Any) -> None:
        super().__init__(tokenizer, eos_ids, start, model)
        self._input_name, self._processor = model.main_input_name, processor
        if hasattr(processor, "resize"):
            processor.resize = _bounded(processor.resize)
        self._encoder = encoder = model.get_encoder().config
        # transformers puts the start token before every prompt but Donut's, whose task token takes its place
        self._prompt_starts = "donut" in str(encoder.model_type)
        named = {word for word in tokenizer.special_tokens_map.values() if isinstance(word, str)}
        special = {token: word.content for token, word in tokenizer.added_tokens_decoder.items() if word.special}
        # tokens as <s_total> are the form of Donut's answers, and belong to the text
        self._tags = {token: word for token, word in special.items() if word not in named and token not in eos_ids}
        self._silent = {*tokenizer.all_special_ids, *special, *eos_ids} - self._tags.keys()

    def encoder_input(self, request: Request) -> EncoderRequest:
        """Return the pixels of the picture, or its patches, and the decoder's prompt. Raises RowError."""
        request.check_source(self.reads)
        assert request.image is not None
        asked = request.sampling
        for name in ("source_lang", "target_lang"):
            if (value := getattr(asked, name)) is not None:
                raise InvalidRowError(f"{name} is {shorten(value)}, but the target reads pictures: drop it")
        begin = self._begin(request.prompt or "")
        with readable("image", request.image):
            pixels = self._pixels(read_picture(request.image))
        if self._input_name == "pixel_values" and (wanted := picture_fault(self._encoder, pixels)) is not None:
            raise InvalidRowError(
                f"image is {shown(request.image)}, of which the target's image processor makes "
                f"{' x '.join(map(str, pixels.shape))} numbers, but its encoder takes {wanted}"
            )
        return self._joined(pixels, begin, None, asked)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of generated ids, with tags, and with other special tokens or without them."""
        if not skip_special_tokens:
            return super().decode(ids, skip_special_tokens=False)
        kept = [token for token in ids if token not in self._silent and token not in self._no_text]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, *, skip_special_tokens: bool = True) -> list[bytes]:
        """Return the bytes that each id adds, as other codecs do, and those of tags."""
        if self._bytes is None:
            table = super().token_bytes()
            for token, word in self._tags.items():
                table[token] = word.encode()
        return super().token_bytes(skip_special_tokens=skip_special_tokens)

    def _begin(self, prompt: str) -> list[int]:
        """Return the tokens that the decoder begins with."""
        ids = self.encode_pieces([prompt])[0] if prompt else []
        return ids if ids and (self._prompt_starts or ids[0] == self._start) else [self._start, *ids]

    def _pixels(self, picture: Image) -> Tensor:
        """Return the pixels of a picture [C, H, W], or its patches [Z, d] without padding: float32."""
        made = self._processor(picture, return_tensors="pt")
        pixels: Tensor = made[self._input_name][0]
        return pixels if self._input_name == "pixel_values" else pixels[made["attention_mask"][0].bool()]


def _bounded(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Return an image processor's resize that refuses to make a picture of more than MOST_PIXELS, because a thin one is
    scaled by its short side. It raises InvalidRowError."""

    def bounded(image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        height, width = image.shape[-2:]
        side = size.shortest_edge or (min(size.height, size.width) if size.height and size.width else 0)
        if side * side * max(height, width) > MOST_PIXELS * min(height, width):
            raise InvalidRowError(
                f"image has {width} x {height} pixels, or is cropped to them, and would be scaled until its short side "
                f"has {side}: cut it"
            )
        return resize(image, size, *args, **kwargs)

    return bounded
