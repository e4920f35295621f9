"""The table of request fields: what each name means here, or why it is refused and what to use.

It holds the fields of OpenAI's completions, chat completions and responses, the sampling parameters and request fields
of vLLM and SGLang, the parameters of TGI, and the names of transformers' GenerationConfig. The row reader follows it,
and sample_inputs/README.md and the schema of rows are made from it (docs/generate_fields.py). A name that stands in
none of its parts is nobody's, and a row that has one gets a warning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsbd_cli.config.sampling import MAX_TEMPERATURE, MAX_TOP_LOGPROBS
from dsbd_cli.config.token_rules import LEAST_PENALTY, MOST_BIAS, MOST_NGRAM, MOST_PENALTY, MOST_SUBTRACTED
from dsbd_cli.errors import MOST_INTEGER

Schema = dict[str, object]

# Larger numbers would break a whole batch, not one row.
MAX_NEW_TOKENS = 1 << 20
MAX_STOPS, MAX_STOP_BYTES = 16, 256


def _integer(least: int, most: int | None = MOST_INTEGER) -> Schema:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


TEXT: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS = _list(_integer(0))
SOME_IDS = _list(_integer(0), minItems=1)
ANSWERS = _list(TEXT, minItems=1)


@dataclass(frozen=True, slots=True)
class RequestField:
    """A field that is honoured.

    Attributes:
        name: our own name, or that of a field that is read as another one.
        text: what it means; may hold links of sample_inputs/README.md.
        schema: of its values; null, which is not given, goes without saying.
        aliases: other names of the same.
        neutral: values under which it changes nothing. A field with one of them is as good as not given, so no run may
            have a setting that such a value would change.
        becomes: names of our own fields that it is read as; empty: it is one itself.
    """

    name: str
    text: str
    schema: Schema = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    neutral: tuple[object, ...] = ()
    becomes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that cannot be honoured.

    Attributes:
        use: what to use, or why there is nothing.
        neutral: values under which it changes nothing, which are accepted.
    """

    use: str
    neutral: tuple[object, ...] = ()


# Heading of each part of the table -> its fields.
HONOURED: dict[str, tuple[RequestField, ...]] = {
    "What is asked": (
        RequestField(
            "id",
            "names the row in the output; default: its index, from 0",
            _either(TEXT, {"type": "integer"}),
            aliases=("custom_id",),
        ),
        RequestField(
            "prompt",
            "text to continue, or the source of an encoder-decoder target; a row has exactly one of `prompt`, "
            "`messages`, `audio` and `image`",
            TEXT,
            aliases=("inputs",),
        ),
        RequestField(
            "messages",
            "a [chat](#messages-of-a-chat), put through the model's chat template",
            {"type": "array", "items": {"$ref": "#/$defs/message"}, "minItems": 1},
        ),
        RequestField("system", "a message of the system before the messages, or before the prompt of `--chat`", TEXT),
        RequestField(
            "audio",
            "for Whisper: a sound file under the input file's folder ([speech](../docs/models.md#speech))",
            TEXT,
        ),
        RequestField(
            "image",
            "for TrOCR and its like: a picture file there, or `data:image/png;base64,...`; `prompt` may stand beside "
            "it ([pictures](../docs/models.md#pictures))",
            TEXT,
        ),
        RequestField(
            "source_lang",
            "language of the source, as an encoder-decoder target's tokenizer names it",
            TEXT,
            aliases=("language",),
        ),
        RequestField("target_lang", "language of the answer", TEXT),
        RequestField("prefix", "text that the answer begins with", TEXT),
        RequestField("add_special_tokens", "false: a plain prompt gets no BOS; a chat template adds its own", BOOLEAN),
        RequestField(
            "truncate_prompt_tokens",
            "keep so many of the prompt's last tokens; -1: as many as fit",
            _either({"const": -1}, _integer(1)),
            aliases=("truncate",),
        ),
        RequestField("metadata", "copied to the row's record"),
    ),
    "Length and end": (
        RequestField(
            "max_new_tokens",
            "generated tokens at most, the end token included",
            _integer(1, MAX_NEW_TOKENS),
            aliases=("max_tokens", "max_completion_tokens", "max_output_tokens"),
        ),
        RequestField(
            "min_new_tokens",
            "no end token comes before the answer has so many tokens; a stop string may",
            _integer(0),
            aliases=("min_tokens",),
        ),
        RequestField("min_length", "the same, of the decoder's prompt and the answer together", _integer(0)),
        RequestField(
            "stop",
            f"text that ends the answer, and is cut from it; {MAX_STOP_BYTES} bytes in all",
            _either(TEXT, _list(TEXT, maxItems=MAX_STOPS)),
            aliases=("stop_strings", "stop_sequences"),
        ),
        RequestField("stop_token_ids", "tokens that end the answer, beside the checkpoint's", IDS, neutral=([],)),
        RequestField(
            "eos_token_id", "tokens that end the answer, in place of the checkpoint's", _either(_integer(0), SOME_IDS)
        ),
        RequestField("ignore_eos", "the checkpoint's end tokens do not end the answer", BOOLEAN, neutral=(False,)),
        RequestField(
            "include_stop_str_in_output",
            "the text keeps the stop string or stop token that ended it",
            BOOLEAN,
            aliases=("no_stop_trim",),
            neutral=(False,),
        ),
        RequestField("skip_special_tokens", "false: the text keeps special tokens", BOOLEAN, neutral=(True,)),
    ),
    "Search and sampling": (
        RequestField(
            "temperature",
            "divides log-probabilities; 0 is beam search, which is `--decode search`; under that option this and the "
            "next three are not used, and a line says in how many rows",
            _number(0, MAX_TEMPERATURE),
        ),
        RequestField(
            "top_k",
            "keep the k likeliest; 0 and -1 keep all",
            {"type": "integer", "minimum": -1, "maximum": MOST_INTEGER},
        ),
        RequestField(
            "top_p",
            "keep the likeliest whose mass reaches this",
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        ),
        RequestField("min_p", "drop what is less likely than this times the likeliest", _number(0, 1)),
        RequestField(
            "do_sample",
            "must agree with the run: true where it samples, false under `--decode search` or temperature 0",
            BOOLEAN,
        ),
        RequestField("use_beam_search", "true: the same as `do_sample` false", BOOLEAN, neutral=(False,)),
        RequestField(
            "seed",
            "of the row's draws; default: from the run's seed and the row's id",
            _integer(0, 2**63 - 1),
            aliases=("random_seed", "sampling_seed"),
        ),
        RequestField(
            "n_best",
            "texts to return, the n best of one search, at most `--num-beams`",
            _integer(1, None),
            aliases=("n", "num_return_sequences"),
        ),
        RequestField("num_beams", "W of this row, at most `--num-beams`", _integer(1, None), aliases=("beam_width",)),
        RequestField("best_of", "must be `--num-beams` or 1", _integer(1, None), neutral=(1,)),
        RequestField("length_penalty", "exponent of the length that a score is divided by", _number(-10, 10)),
        RequestField(
            "early_stopping",
            "true: end as soon as `--num-beams` texts are finished; false: when no live beam is better than they are; "
            "`never`: when none can become better",
            _either(BOOLEAN, {"const": "never"}),
        ),
    ),
    "Tokens": (
        RequestField(
            "repetition_penalty",
            "of tokens that occur in prompt or answer; 1 changes nothing",
            _number(LEAST_PENALTY, MOST_PENALTY),
        ),
        RequestField(
            "presence_penalty",
            "subtracted from the logit of each token that the answer holds",
            _number(-MOST_SUBTRACTED, MOST_SUBTRACTED),
        ),
        RequestField(
            "frequency_penalty",
            "the same, once for each time that the answer holds it",
            _number(-MOST_SUBTRACTED, MOST_SUBTRACTED),
        ),
        RequestField(
            "no_repeat_ngram_size", "no n-gram of this size occurs twice; 0: any may", _integer(0, MOST_NGRAM)
        ),
        RequestField(
            "logit_bias",
            "token ids with numbers that are added to their logits",
            {
                "type": "object",
                "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
                "additionalProperties": _number(-MOST_BIAS, MOST_BIAS),
            },
        ),
        RequestField("allowed_token_ids", "the only tokens that may be generated", SOME_IDS),
        RequestField(
            "bad_words",
            "texts that do not occur in the answer, with and without a blank before them; the prompt counts as text "
            "before it",
            _list(TEXT),
            neutral=([],),
        ),
        RequestField("bad_words_ids", "sequences of tokens that do not occur in the answer", _list(SOME_IDS)),
        RequestField("suppress_tokens", "tokens that are never generated", IDS),
        RequestField("begin_suppress_tokens", "tokens that are never generated first", IDS),
        RequestField(
            "forced_bos_token_id", "the first generated token, where the decoder's prompt is one token", _integer(0)
        ),
        RequestField("forced_eos_token_id", "the last token that `max_new_tokens` allows", _integer(0)),
        RequestField("renormalize_logits", "log-probabilities are normalised again after all other rules", BOOLEAN),
        RequestField(
            "token_rules",
            "the [token rules](../docs/models.md#token-rules) as `--set token-rules` has them: "
            '`{"no_repeat_ngram_size": 3, "forced_eos_token_id": null}`',
            {"type": ["object", "string"]},
        ),
    ),
    "What may be answered": (
        RequestField(
            "allow",
            "the only answers: a [catalogue](../docs/constraints.md)'s name, or the answers themselves",
            _either(TEXT, ANSWERS),
        ),
        RequestField(
            "guided_choice", "`allow` with the answers themselves", ANSWERS, aliases=("choice",), becomes=("allow",)
        ),
        RequestField(
            "response_format",
            "what the whole answer must match: type `text`, `json_object`, `json_schema`, `regex` or `grammar` "
            "([grammars](../docs/constraints.md#grammars))",
            {"$ref": "#/$defs/response_format"},
        ),
        RequestField(
            "guided_json",
            "a JSON schema that the whole answer must match, as an object or as text",
            {"type": ["object", "string"]},
            aliases=("json_schema",),
            becomes=("response_format",),
        ),
        RequestField(
            "guided_json_object",
            "true: the whole answer is a JSON object",
            BOOLEAN,
            aliases=("json_object",),
            neutral=(False,),
            becomes=("response_format",),
        ),
        RequestField(
            "guided_regex",
            "a regular expression that the whole answer must match",
            TEXT,
            aliases=("regex",),
            becomes=("response_format",),
        ),
        RequestField(
            "guided_grammar",
            "a Lark or GBNF grammar that the whole answer must match",
            TEXT,
            aliases=("ebnf",),
            becomes=("response_format",),
        ),
        RequestField(
            "grammar",
            "such a grammar, or TGI's object with `type` and `value`",
            _either(TEXT, {"$ref": "#/$defs/response_format"}),
            becomes=("response_format",),
        ),
        RequestField(
            "structured_outputs",
            "vLLM's object with one of `json`, `regex`, `choice`, `grammar` and `json_object`",
            {"$ref": "#/$defs/structured_outputs"},
            aliases=("guided_decoding",),
            becomes=("response_format", "allow"),
        ),
    ),
    "Chats": (
        RequestField(
            "tools",
            "functions that the model may call, in OpenAI's form",
            _list({"$ref": "#/$defs/tool"}),
            neutral=([],),
        ),
        RequestField(
            "tool_choice",
            "`auto`, `none`, `required`, or the function that every answer calls",
            _either({"enum": ["auto", "none", "required"]}, {"$ref": "#/$defs/tool_choice"}),
        ),
        RequestField("documents", "texts that the template shows to the model", _list(OBJECT), neutral=([],)),
        RequestField(
            "chat_template_kwargs",
            'variables of the template: `{"enable_thinking": false}`',
            OBJECT,
            neutral=({},),
        ),
        RequestField(
            "reasoning_effort",
            "such a variable; `none` also sets `enable_thinking` to false, unless that is given",
            TEXT,
        ),
        RequestField(
            "continue_final_message",
            "the answer continues the last message, which is the assistant's; the same as `prefix` in that message",
            BOOLEAN,
        ),
        RequestField("add_generation_prompt", "false: only with `continue_final_message`", BOOLEAN, neutral=(True,)),
        RequestField("parallel_tool_calls", "false: only without tools", BOOLEAN, neutral=(True,)),
    ),
    "What the record holds": (
        RequestField(
            "token_logprobs", "report id and log-probability of every token", BOOLEAN, aliases=("return_logprob",)
        ),
        RequestField(
            "top_logprobs",
            "with them, the likeliest tokens at every place",
            _integer(0, MAX_TOP_LOGPROBS),
            aliases=("top_logprobs_num",),
        ),
        RequestField(
            "logprobs",
            "`token_logprobs`, or with a number both",
            _either(BOOLEAN, _integer(0, MAX_TOP_LOGPROBS)),
            becomes=("token_logprobs", "top_logprobs"),
        ),
        RequestField(
            "reasoning",
            "`split`, `keep` or `drop`: what becomes of a model's "
            "[reasoning](../docs/cookbook.md#reasoning-and-calls-of-functions); or an object whose `effort` is "
            "`reasoning_effort`",
            _either({"enum": ["split", "keep", "drop"]}, OBJECT),
        ),
        RequestField("include_reasoning", "false: `drop`; true: `split`", BOOLEAN, becomes=("reasoning",)),
        RequestField("separate_reasoning", "false: `keep`; true: `split`", BOOLEAN, becomes=("reasoning",)),
        RequestField("top_n_tokens", "both", _integer(0, MAX_TOP_LOGPROBS), becomes=("token_logprobs", "top_logprobs")),
    ),
}

# Objects that hold request fields: of the openai package, SGLang, TGI and transformers.
CONTAINERS = ("extra_body", "sampling_params", "parameters", "generation_config")

# Fields that the body of /v1/responses has beside those above.
RESPONSES = (
    RequestField(
        "input",
        "a text, or items: messages, calls of functions and their outputs",
        _either(TEXT, _list(OBJECT, minItems=1)),
        becomes=("messages",),
    ),
    RequestField("instructions", "a message of the system before them", TEXT, becomes=("messages",)),
    RequestField("text", "its `format` is a `response_format`", OBJECT, becomes=("response_format",)),
    RequestField("reasoning", "its `effort` is `reasoning_effort`", OBJECT, becomes=("reasoning_effort",)),
    RequestField(
        "include",
        "`message.output_text.logprobs` is `token_logprobs`",
        _list({"const": "message.output_text.logprobs"}),
        neutral=([],),
        becomes=("token_logprobs",),
    ),
    RequestField(
        "truncation",
        "`auto` is `truncate_prompt_tokens` -1",
        {"enum": ["auto", "disabled"]},
        neutral=("disabled",),
        becomes=("truncate_prompt_tokens",),
    ),
)

_ADAPTER = "an adapter is the run's: --target BASE+ADAPTER"
_LOGPROBS = "token_logprobs and top_logprobs report the answer's"
_IDS = "token_logprobs reports ids"
_IN_FULL = "records hold the answer without its prompt"
_CONVERSATION = "nothing is kept between rows: give the whole conversation"
_PROMPT_IDS = "give prompt, which is text"

REFUSED: dict[str, RefusedField] = {
    # OpenAI
    "echo": RefusedField(_IN_FULL, (False,)),
    "suffix": RefusedField("the model writes forward: put the marks of its infilling form into prompt", ("",)),
    "stream": RefusedField("records are written as rows are done", (False,)),
    "functions": RefusedField("tools has them in its form", ([],)),
    "function_call": RefusedField("tool_choice has them in its form", ("none", "auto")),
    "modalities": RefusedField("answers are text", (["text"],)),
    "verbosity": RefusedField("ask for it in the prompt", ("medium",)),
    "web_search_options": RefusedField("there is no web search"),
    "moderation": RefusedField("nothing is moderated"),
    "previous_response_id": RefusedField(_CONVERSATION),
    "max_tool_calls": RefusedField("calls of functions are written, not run"),
    "context_management": RefusedField(_CONVERSATION, ([],)),
    "access_programs": RefusedField("there are none", ([], {})),
    # vLLM
    "prompt_logprobs": RefusedField(_LOGPROBS),
    "logprob_token_ids": RefusedField(_LOGPROBS),
    "prompt_logprob_token_ids": RefusedField(_LOGPROBS),
    "prompt_logprob_start": RefusedField(_LOGPROBS),
    "prompt_embeds": RefusedField(_PROMPT_IDS),
    "prompt_token_ids": RefusedField(_PROMPT_IDS),
    "chat_template": RefusedField("a template is the run's: --set chat-template=FILE"),
    "lora_request": RefusedField(_ADAPTER),
    "truncation_side": RefusedField("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "watermarking": RefusedField("nothing is watermarked", (False,)),
    "thinking_token_budget": RefusedField("max_new_tokens counts all tokens", (-1,)),
    "repetition_detection": RefusedField("no_repeat_ngram_size keeps n-grams from coming twice", ({},)),
    "trace_decode_token_ids": RefusedField("prefix has the text that an answer begins with", ([],)),
    "detokenize": RefusedField("records hold text, and ids with token_logprobs", (True,)),
    "guided_whitespace_pattern": RefusedField("JSON is written in one line; a schema's x-guidance says otherwise"),
    "structural_tag": RefusedField("response_format says what the whole answer must match"),
    "mm_processor_kwargs": RefusedField("an image is read as the checkpoint says", ({},)),
    "media_io_kwargs": RefusedField("an image is read as the checkpoint says", ({},)),
    "extra_args": RefusedField("there are no such extensions", ({},)),
    "vllm_xargs": RefusedField("there are no such extensions", ({},)),
    "logits_processors": RefusedField("there are no such extensions", ([],)),
    "return_tokens_as_token_ids": RefusedField(_IDS, (False,)),
    "return_token_ids": RefusedField(_IDS, (False,)),
    "return_prompt_token_ids": RefusedField("records hold no prompt", (False,)),
    "return_prompt_text": RefusedField("records hold no prompt", (False,)),
    "return_token_offsets": RefusedField("openai output has them with logprobs", (False,)),
    "enable_response_messages": RefusedField("records hold no prompt", (False,)),
    "previous_input_messages": RefusedField(_CONVERSATION, ([],)),
    "previous_response": RefusedField(_CONVERSATION),
    # SGLang
    "stop_regex": RefusedField("stop has texts, response_format an expression for the whole answer", ([],)),
    "custom_params": RefusedField("there are no such extensions", ({},)),
    "custom_logit_processor": RefusedField("there are no such extensions"),
    "lora_path": RefusedField(_ADAPTER),
    "lora_id": RefusedField(_ADAPTER),
    "session_params": RefusedField(_CONVERSATION, ({},)),
    "input_ids": RefusedField(_PROMPT_IDS),
    "input_embeds": RefusedField(_PROMPT_IDS),
    "logprob_start_len": RefusedField(_LOGPROBS, (-1,)),
    "token_ids_logprob": RefusedField(_LOGPROBS, ([],)),
    "return_hidden_states": RefusedField("records hold text", (False,)),
    "return_routed_experts": RefusedField("records hold text", (False,)),
    "return_meta_info": RefusedField("native records hold stats", (False,)),
    "require_reasoning": RefusedField("chat_template_kwargs switches a model's reasoning", (False,)),
    "max_thinking_tokens": RefusedField("max_new_tokens counts all tokens"),
    "return_entropy": RefusedField(_LOGPROBS, (False,)),
    "return_sampling_mask": RefusedField(_LOGPROBS, (False,)),
    "image_data": RefusedField("image has a picture"),
    "audio_data": RefusedField("audio has a sound file"),
    "video_data": RefusedField("no model reads videos"),
    "images_config": RefusedField("an image is read as the checkpoint says", ({},)),
    "max_dynamic_patch": RefusedField("an image is read as the checkpoint says"),
    "min_dynamic_patch": RefusedField("an image is read as the checkpoint says"),
    "use_audio_in_video": RefusedField("no model reads videos", (False,)),
    "task": RefusedField("chat_template_kwargs has variables of a template"),
    # TGI
    "typical_p": RefusedField("top_p, top_k and min_p are there", (1, 1.0)),
    "watermark": RefusedField("nothing is watermarked", (False,)),
    "return_full_text": RefusedField(_IN_FULL, (False,)),
    "decoder_input_details": RefusedField("records hold no prompt", (False,)),
    "adapter_id": RefusedField(_ADAPTER),
    # transformers
    "max_length": RefusedField("it counts the prompt too: max_new_tokens counts the answer"),
    "max_time": RefusedField("max_new_tokens bounds an answer"),
    "top_h": RefusedField("top_p, top_k and min_p are there"),
    "epsilon_cutoff": RefusedField("top_p, top_k and min_p are there", (0, 0.0)),
    "eta_cutoff": RefusedField("top_p, top_k and min_p are there", (0, 0.0)),
    "num_beam_groups": RefusedField("beams are one group", (1,)),
    "diversity_penalty": RefusedField("beams are one group", (0, 0.0)),
    "penalty_alpha": RefusedField("there is no contrastive search", (0, 0.0)),
    "dola_layers": RefusedField("there is no contrastive decoding"),
    "constraints": RefusedField("allow and response_format say what an answer may be", ([],)),
    "force_words_ids": RefusedField("allow and response_format say what an answer may be", ([],)),
    "encoder_repetition_penalty": RefusedField("repetition_penalty is there", (1, 1.0)),
    "encoder_no_repeat_ngram_size": RefusedField("no_repeat_ngram_size is there", (0,)),
    "exponential_decay_length_penalty": RefusedField("length_penalty is there"),
    "sequence_bias": RefusedField("logit_bias has single tokens, bad_words_ids sequences", ({}, [])),
    "token_healing": RefusedField("end the prompt at the end of a token", (False,)),
    "guidance_scale": RefusedField("there is no classifier-free guidance", (1, 1.0)),
    "watermarking_config": RefusedField("nothing is watermarked"),
    "decoder_start_token_id": RefusedField("the checkpoint has it"),
    "assistant_ensemble_weight": RefusedField("a draft changes no text"),
    "output_scores": RefusedField(_LOGPROBS, (False,)),
    "output_logits": RefusedField(_LOGPROBS, (False,)),
    "output_attentions": RefusedField("records hold text", (False,)),
    "output_hidden_states": RefusedField("records hold text", (False,)),
}

# A field of the body of /v1/responses that is data elsewhere.
REFUSED_IN_RESPONSES = {"conversation": RefusedField(_CONVERSATION)}

# Names that say nothing about the text.
WITHOUT_EFFECT = frozenset(
    # OpenAI, and what bench reads
    "model user store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "stream_options prediction background reference relevant "
    # vLLM and SGLang
    "priority request_id rid session_id conversation_id cache_salt extra_key custom_labels flat_logprobs output_kind "
    "spaces_between_special_tokens stream_interval stream_reasoning skip_clone skip_reading_prefix_cache "
    "routed_experts_prompt_start routed_experts_start_len return_mm_kwargs return_cached_tokens_details "
    "return_text_in_logprobs kv_transfer_params ec_transfer_params guided_decoding_backend bootstrap_host "
    "bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank ngram_corpus_id no_logs "
    "log_metrics "
    # TGI and transformers; a draft changes no text
    "details use_cache use_mtp cache_implementation cache_config max_cache_len return_dict_in_generate pad_token_id "
    "bos_token_id is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_early_exit assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size "
    "speculation_type compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size "
    "remove_invalid_values transformers_version _from_model_config".split()
)

FIELDS: dict[str, RequestField] = {field.name: field for part in HONOURED.values() for field in part}
ROW_FIELDS = tuple(name for name, field in FIELDS.items() if not field.becomes)
# Other names of our own fields.
ALIASES = {alias: field.name for field in FIELDS.values() if not field.becomes for alias in field.aliases}
# Every name of a field that is honoured -> the field.
NAMED = {name: field for field in FIELDS.values() for name in (field.name, *field.aliases)}
# Names of fields that are read as others -> our own.
READ_AS = {name: field.becomes for name, field in NAMED.items() if field.becomes}


# Of the refused names, those that stand for data in flat rows, where they are ignored with a warning.
DATA = frozenset({"task"})


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is one of these. Its type must agree too, because 0 == False and 1 == True."""
    return any(type(value) is type(value_of_field) and value == value_of_field for value_of_field in neutral)


def types_of(schema: Schema) -> set[str]:
    """Return the JSON types that values of a schema may have; none where any may come."""
    types: set[str] = set()
    for option in schema.get("anyOf", ()):  # type: ignore[attr-defined] # it is a list
        types |= types_of(option)
    if "type" in schema:
        kinds = schema["type"]
        types |= set(kinds) if isinstance(kinds, list) else {str(kinds)}
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        types |= {_JSON_TYPES[type(value)] for value in values}  # type: ignore[attr-defined] # it is a list
    if "$ref" in schema:
        types.add("object")
    return types


_JSON_TYPES = {str: "string", int: "integer", bool: "boolean"}
