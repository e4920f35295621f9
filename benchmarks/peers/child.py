"""One engine in a process of its own, which answers questions on its standard input: see benchmarks.evidence.

    python benchmarks/peers/child.py ENGINE FOLDER THREADS

A question is a line {"ids": prompts as token ids, all of one length, "beams": W, "tokens": N}; its answer is a line
{"seconds", "best": ids of the best answer of each prompt}. All answers have N tokens: none may end before. Nothing of
this package but the engine itself is imported here, as peers live in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

ROOM = 256  # new tokens that llama.cpp keeps room for

Prompts = list[list[int]]
Answer = Callable[[Prompts, int, int], Prompts]


def dsbd(folder: str, threads: int, dtype: str, quantize: str | None) -> Answer:
    """Return how dsbd answers: beam search, no draft."""
    from dsbd_cli import Engine, MethodConfig, ModelSpec, Request, SamplingConfig, load

    spec = ModelSpec(folder, device="cpu", dtype=dtype, quantize=quantize)  # type: ignore[arg-type]
    first = load(spec, None, method=MethodConfig(num_beams=1, rule="search"), threads=threads)
    engines: dict[tuple[int, int], Any] = {}

    def answer(prompts: Prompts, beams: int, tokens: int) -> Prompts:
        key = beams, len(prompts)
        if key not in engines:
            method = MethodConfig(num_beams=beams, rule="search")
            engines.clear()
            engines[key] = Engine(first.target, None, first.codec, method, batch_size=len(prompts))
        sampling = SamplingConfig(max_new_tokens=tokens, token_rules=f"none,min_new_tokens={tokens}")
        results = list(engines[key].run([Request(prompt_ids=tuple(ids), sampling=sampling) for ids in prompts]))
        return [list(result.hypotheses[0].token_ids) for result in results]

    return answer


def openvino(folder: str, threads: int, *, strict: bool) -> Answer:
    """Return how OpenVINO GenAI answers from a folder that `optimum-cli export openvino` made.

    strict: sums and cache in float32, and no activations in int8.
    """
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if strict:
        options |= {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
    elif "ONEDNN_MAX_CPU_ISA" in os.environ:  # it would choose by the flags of the processor, and find no kernel
        options |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    pipe = genai.LLMPipeline(folder, "CPU", **options)

    def answer(prompts: Prompts, beams: int, tokens: int) -> Prompts:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.num_beams, config.do_sample = tokens, True, beams, False
        config.num_return_sequences, config.length_penalty = 1, 1.0
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return [list(map(int, ids)) for ids in pipe.generate(inputs, config).tokens]

    return answer


def transformers(folder: str, threads: int, dtype: str) -> Answer:
    """Return how transformers' generate answers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def answer(prompts: Prompts, beams: int, tokens: int) -> Prompts:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            sequences = model.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=beams, max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, length_penalty=1.0, temperature=None, top_k=None, top_p=None, repetition_penalty=1.0,
                pad_token_id=0,
            )  # fmt: skip
        rows: Prompts = sequences[:, ids.shape[1] :].tolist()
        return rows

    return answer


def ctranslate2(folder: str, threads: int) -> Answer:
    """Return how CTranslate2 answers from a folder that its converter made."""
    import ctranslate2 as engine

    model = engine.Generator(folder, device="cpu", intra_threads=threads)
    with open(f"{folder}/vocabulary.json", encoding="utf-8") as file:
        words = json.load(file)

    def answer(prompts: Prompts, beams: int, tokens: int) -> Prompts:
        results = model.generate_batch(
            [[words[token] for token in ids] for ids in prompts], beam_size=beams, max_length=tokens,
            min_length=tokens, include_prompt_in_result=False, length_penalty=1.0,
        )  # fmt: skip
        return [result.sequences_ids[0] for result in results]

    return answer


def llama_cpp(file: str, threads: int) -> Answer:
    """Return how llama.cpp answers from a GGUF file: greedily, as it has no beam search.

    Only its HTTP side takes and gives token ids. It listens on this machine alone.
    """
    import xllamacpp

    servers: dict[tuple[int, int], Any] = {}

    def answer(prompts: Prompts, beams: int, tokens: int) -> Prompts:
        assert beams == 1, "llama.cpp has no beam search"
        key = len(prompts), len(prompts[0])
        if key not in servers:
            params = xllamacpp.CommonParams()
            params.model.path, params.verbosity, params.n_parallel = file, -1, len(prompts)
            params.n_ctx = len(prompts) * (len(prompts[0]) + ROOM)
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
            servers.clear()
            servers[key] = xllamacpp.Server(params)
        asked = {
            "prompt": prompts, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True,
            "cache_prompt": False,
        }  # fmt: skip
        request = urllib.request.Request(f"{servers[key].listening_address}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)
        answers = reply if len(prompts) > 1 else [reply]
        return [answer["tokens"] for answer in sorted(answers, key=lambda answer: answer["index"])]

    return answer


def onnxruntime(folder: str, threads: int) -> Answer:
    """Return how ONNX Runtime GenAI answers from a folder that its model builder made."""
    import numpy as np
    import onnxruntime_genai as genai

    config = genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)

    def answer(prompts: Prompts, beams: int, tokens: int) -> Prompts:
        start, end = len(prompts[0]), len(prompts[0]) + tokens
        params = genai.GeneratorParams(model)
        params.set_search_options(
            batch_size=len(prompts), num_beams=beams, num_return_sequences=1, do_sample=False, min_length=end,
            max_length=end, length_penalty=1.0, early_stopping=False, past_present_share_buffer=beams == 1,
        )  # fmt: skip
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [list(map(int, generator.get_sequence(index)))[start:] for index in range(len(prompts))]

    return answer


ENGINES: dict[str, Callable[[str, int], Answer]] = {
    "dsbd-int8": lambda folder, threads: dsbd(folder, threads, "bfloat16", "int8"),
    "dsbd-int4": lambda folder, threads: dsbd(folder, threads, "bfloat16", "int4"),
    "dsbd-gguf": lambda folder, threads: dsbd(folder, threads, "bfloat16", None),
    "dsbd-bfloat16": lambda folder, threads: dsbd(folder, threads, "bfloat16", None),
    "dsbd-float32": lambda folder, threads: dsbd(folder, threads, "float32", None),
    "openvino-int8": lambda folder, threads: openvino(folder, threads, strict=False),
    "openvino-int4": lambda folder, threads: openvino(folder, threads, strict=False),
    "openvino-strict": lambda folder, threads: openvino(folder, threads, strict=True),
    "transformers-bfloat16": lambda folder, threads: transformers(folder, threads, "bfloat16"),
    "transformers-float32": lambda folder, threads: transformers(folder, threads, "float32"),
    "ctranslate2-int8": ctranslate2,
    "llama.cpp-int8": llama_cpp,
    "llama.cpp-gguf": llama_cpp,
    "onnxruntime-int8": onnxruntime,
    "onnxruntime-int4": onnxruntime,
}


def main() -> None:
    """Answer until the input ends."""
    engine, folder, threads = sys.argv[1:4]
    answer = ENGINES[engine](folder, int(threads))
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        best = answer(asked["ids"], asked["beams"], asked["tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start, "best": best}), flush=True)


if __name__ == "__main__":
    main()
