"""Every request field that is known but not honoured, in one place. Nothing else is dropped silently.

Three tables. ``IGNORED`` fields are accepted with any value and do nothing: they carry bookkeeping, not behaviour.
``NEUTRAL`` fields change the answer in other servers and are not implemented here; they are accepted only with the
value that asks for nothing (null is always accepted) and refused otherwise. ``RENAMED`` fields are refused with
today's name. A field in no table and in no model is unknown and refused with the nearest known name.
"""

from collections.abc import Mapping

IGNORED: Mapping[str, str] = {
    "user": "end-user label, used for nothing here",
    "metadata": "free tags for OpenAI's dashboard",
    "store": "nothing is ever stored for later retrieval",
    "service_tier": "there is one tier",
    "safety_identifier": "end-user label, used for nothing here",
    "prompt_cache_key": "the prefix cache finds prefixes by content",
    "prompt_cache_retention": "the prefix cache keeps pages until it needs the room",
    "verbosity": "DeepSeek's encodings have no such control",
    "request_id": "the server makes its own ids; send X-Request-ID to correlate",
    "session_id": "requests of one session find each other by content",
}

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_embeds": (),
    "documents": ([],),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
}

RENAMED: Mapping[str, str] = {
    "guided_json": 'structured_outputs: {"json": …}',
    "guided_regex": 'structured_outputs: {"regex": …}',
    "guided_choice": 'structured_outputs: {"choice": […]}',
    "guided_grammar": "structured_outputs (grammars are not supported)",
    "guided_decoding_backend": "nothing; there is one backend",
    "guided_whitespace_pattern": "nothing; there is one whitespace rule",
    "separate_reasoning": "include_reasoning",
    "enable_thinking": 'chat_template_kwargs: {"enable_thinking": …}',
    "thinking": 'chat_template_kwargs: {"thinking": …}',
}

# Fields of one message. Clients send whole answers back, so what our own answers carry must be accepted.
MESSAGE_IGNORED: Mapping[str, str] = {
    "name": "DeepSeek's encodings have no participant names",
    "annotations": "comes back from earlier answers",
    "refusal": "comes back from earlier answers",
}
MESSAGE_NEUTRAL: Mapping[str, tuple[object, ...]] = {"audio": (), "function_call": (), "prefix": (False,)}

# Fields of one tool's function. Agent kits send strict with every tool and cannot be told not to.
FUNCTION_IGNORED: Mapping[str, str] = {
    "strict": "arguments are parsed from the model's own markup, not constrained; check them before use",
}

# Fields of response_format's json_schema.
JSON_SCHEMA_IGNORED: Mapping[str, str] = {
    "strict": "a schema always binds the answer; false asks for less than that",
    "description": "the schema is not shown to the model",
}
