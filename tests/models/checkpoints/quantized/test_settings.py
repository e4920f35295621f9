"""Settings of quantised checkpoints: what is read, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AwqConfig, GPTQConfig, LlamaConfig

from dsbd_cli.models.checkpoints.quantized.settings import Quantization, quantization_of
from tests.models.checkpoints.quantized.packing import compressed_config, config

INSTEAD = ": take its GPTQ, AWQ, compressed-tensors or GGUF form, or its plain weights"


def test_plain_weights_have_no_settings() -> None:
    assert quantization_of(LlamaConfig()) is None
    assert quantization_of(SimpleNamespace(quantization_config=None)) is None


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (config("gptq", bits=4, group_size=128, sym=True), Quantization("gptq", "gptq", 4, 128, symmetric=True)),
        (
            config("gptq", bits=8, group_size=-1, desc_act=True, checkpoint_format="gptq_v2", format="gptq"),
            Quantization("gptq", "gptq_v2", 8, -1, ordered=True),
        ),
        (
            config("gptq", bits=4, group_size=32, dynamic={"-:.*down.*": {}}, pack_dtype="int32"),
            Quantization("gptq", "gptq", 4, 32),
        ),
        (config("awq", bits=4, group_size=64, version="GEMM"), Quantization("awq", "gemm", 4, 64)),
        (
            config("awq", w_bit=4, q_group_size=64, version="gemv", modules_to_not_convert=["lm_head"]),
            Quantization("awq", "gemv", 4, 64),
        ),
        (
            compressed_config(),
            Quantization("compressed-tensors", "pack-quantized", 4, 32, symmetric=True),
        ),
        (
            compressed_config(8, None, "tensor", form="float-quantized", kind="float"),
            Quantization(
                "compressed-tensors",
                "float-quantized",
                8,
                -1,
                symmetric=True,
                floating=True,
                shared=True,
            ),
        ),
    ],
)
def test_settings_are_read(settings: Any, wanted: Quantization) -> None:
    assert quantization_of(settings) == wanted


def test_settings_may_be_transformers_objects_and_stand_in_the_text_config() -> None:
    assert quantization_of(LlamaConfig(quantization_config=GPTQConfig(bits=4, group_size=64))) == Quantization(
        "gptq", "gptq", 4, 64, symmetric=True
    )
    assert quantization_of(LlamaConfig(quantization_config=AwqConfig(bits=4))) == Quantization("awq", "gemm", 4, 128)
    text = config("gptq", bits=4, group_size=64)
    assert isinstance(quantization_of(SimpleNamespace(get_text_config=lambda decoder: text)), Quantization)
    old = SimpleNamespace(compression_config=compressed_config().quantization_config)
    assert isinstance(quantization_of(old), Quantization)


def several() -> Any:
    settings = compressed_config()
    other = compressed_config(8).quantization_config["config_groups"]["group_0"]
    settings.quantization_config["config_groups"]["group_1"] = other
    return settings


def compressed(**changes: Any) -> Any:
    settings = compressed_config()
    settings.quantization_config.update(changes)
    return settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(
            (config(method), f"its weights are quantised by a method called '{method}', which is not read{INSTEAD}")
            for method in (
                "bitsandbytes",
                "hqq",
                "eetq",
                "torchao",
                "quanto",
                "fp8",
                "fbgemm_fp8",
                "auto-round",
            )
        ),
        (
            SimpleNamespace(quantization_config={"bits": 4}),
            f"its weights are quantised by a method that quantization_config does not name, which is not read{INSTEAD}",
        ),
        (SimpleNamespace(quantization_config=[4]), "its quantization_config is [4], but an object must stand there"),
        (config("gptq"), f"its weights have bits = null, and 2, 3, 4 or 8 is read{INSTEAD}"),
        (config("gptq", bits=5), f"its weights have bits = 5, and 2, 3, 4 or 8 is read{INSTEAD}"),
        (config("awq", bits=3), f"its weights have bits = 3, and 4 is read{INSTEAD}"),
        (
            config("gptq", bits=4, group_size=0),
            "its quantization_config says group_size = 0, but 1 to 16777216 must stand there, or -1 for all inputs",
        ),
        (
            config("gptq", bits=4, sym="yes"),
            "its quantization_config says sym = 'yes', but true or false must stand there",
        ),
        (
            config("gptq", bits=4, checkpoint_format="marlin"),
            f"its GPTQ weights have the layout 'marlin', which is not read{INSTEAD}",
        ),
        (
            config("gptq", bits=4, is_marlin_format=True),
            f"its GPTQ weights have the layout 'is_marlin_format', which is not read{INSTEAD}",
        ),
        (
            config("gptq", bits=4, dynamic={"+:.*down.*": {"bits": 8}}),
            f"its layers are quantised in several ways (dynamic: '+:.*down.*'), and one way is read{INSTEAD}",
        ),
        (
            config("awq", bits=4, version="gemv_fast"),
            f"its AWQ weights have the layout 'gemv_fast', and gemm or gemv is read{INSTEAD}",
        ),
        (
            config("awq", bits=4, dynamic=[3]),
            "its quantization_config says dynamic = [3], but rules must stand there",
        ),
        (
            compressed_config(8, None, "channel", symmetric=False, form="float-quantized", kind="float"),
            f"its weights are float-quantized with zero points, which is not read{INSTEAD}",
        ),
        (several(), f"its layers are quantised in 2 ways, and one way is read{INSTEAD}"),
        (
            compressed(format="nvfp4-pack-quantized"),
            f"its weights have the layout 'nvfp4-pack-quantized' of compressed-tensors, which is not read{INSTEAD}",
        ),
        (
            compressed(kv_cache_scheme={"num_bits": 8}),
            f"its keys and values are changed, too (kv_cache_scheme), which is not read{INSTEAD}",
        ),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            f"its weights are sparse ({{'format': 'sparse-24-bitmask'}}), which is not read{INSTEAD}",
        ),
        (
            compressed_config(8, None, "block", form="float-quantized", kind="float"),
            f"its scales have the strategy 'block', which is not read{INSTEAD}",
        ),
        (
            compressed_config(4, kind="float"),
            f"its weights are pack-quantized of the type 'float', which is not read{INSTEAD}",
        ),
    ],
)
def test_a_reason_says_what_to_do(settings: Any, said: str) -> None:
    assert quantization_of(settings) == said
