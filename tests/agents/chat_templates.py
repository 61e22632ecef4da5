"""Chat templates after the published styles of some model families, and tokenizers for them."""

from __future__ import annotations

import functools

from transformers import PreTrainedTokenizerFast

from flowtrain.trainer import toy

_TOOLS = (
    "# Tools\\n\\nYou may call functions, described within <tools></tools>:\\n<tools>"
    "{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{- '\\n</tools>\\n\\nFor each call, return a json object within <tool_call></tool_call>:\\n"
    '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
    "<|im_end|>\\n' }}"
)
_CHATML_SYSTEM = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '"
    + _TOOLS.replace("{%- for", "' }}{%- for", 1)
    + "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
)
_CHATML_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
)
_CHATML_RESULT = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
)
_CHATML_TEXT = (
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
)

QWEN25 = (
    _CHATML_SYSTEM + "{%- for message in messages %}" + _CHATML_TEXT + "{%- elif message.role == "
    "'assistant' %}{%- set content = message.content %}"
    "{{- '<|im_start|>assistant\\n' + content }}" + _CHATML_CALLS + _CHATML_RESULT + "{%- endif %}"
)

_LAST_QUESTION = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)

QWEN3 = (
    _CHATML_SYSTEM + _LAST_QUESTION + "{%- for message in messages %}" + _CHATML_TEXT + "{%- elif "
    "message.role == 'assistant' %}{%- set content = message.content %}{%- set thinking = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thinking) %}"
    "{{- '<think>\\n' + thinking + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content }}" + _CHATML_CALLS + _CHATML_RESULT + "{%- if enable_thinking is defined and "
    "enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""Thinking stays in the replies after the last question, and goes from those before it."""

QWEN3_CALLS = QWEN3.replace(
    "{%- set content = message.content %}{%- set thinking = '' %}",
    "{%- set content = message.content %}{%- set thinking = message.reasoning_content or '' %}",
).replace("(loop.last or thinking)", "thinking and not message.tool_calls")
QWEN3_CALLS = QWEN3_CALLS.replace("{{- content }}", "{{- content if not message.tool_calls }}")
"""Thinking goes from replies that call tools, too, with all that they say besides."""

R1 = (
    "{%- for message in messages %}" + _CHATML_TEXT + "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>assistant\\n' + content }}"
    + _CHATML_CALLS
    + _CHATML_RESULT
    + "{{- '<think>\\n' }}{%- endif %}"
)
"""Thinking is opened by the prompt and goes from every earlier reply."""

LLAMA31 = (
    "{{- '<|begin_of_text|>' }}{%- set first = 0 %}{%- set system = '' %}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set first = 1 %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    "{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}"
    "{{- 'Today Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}"
    "{%- for message in messages[first:] %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson"
    " + '<|eot_id|>' }}"
    "{%- elif message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('only single tool-calls at once') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + call.name'
    " + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{%- else %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if loop.first and tools %}{{- 'Given the functions, respond with a JSON for a call, "
    'as {"name": function name, "parameters": dictionary of argument name and value}.\\n\\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson + '\\n\\n' }}{%- endfor %}{%- endif %}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

MISTRAL = (
    "{{- '<s>' }}{%- set ns = namespace(turn=0, last=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.turn = ns.turn + 1 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- if tools and loop.index0 == ns.last %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}"
    "{{- raise_exception('ids of calls have length 9') }}{%- endif %}"
    '{{- \'[TOOL_RESULTS] {"content": \' + message.content + \', "call_id": "\''
    " + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + '</s>' }}"
    "{%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}{%- endfor %}"
)

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEMPLATES = {
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3.1": (LLAMA31, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "smollm2": (SMOLLM2, "<|im_end|>"),
}
"""Template and end of a reply by style."""

_SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
)


@functools.cache
def tokenizer_of(
    template: str, end: str, one_token_thinking: bool = True
) -> PreTrainedTokenizerFast:
    """A small tokenizer with merges of its own, all special tokens, and a template."""
    texts = [
        "system user assistant tool What is the area of Chad? The area of Chad is 1284.",
        '{"name": "Search", "arguments": {"query": "area of Chad"}} {"parameters": ',
        "<tool_call>\n</tool_call> <tool_response>\n</tool_response>\n\n <answer>12</answer>",
        "I think it is so.\n\nIt is so.\n",
    ] * 3
    tokenizer = toy.new_tokenizer(texts, vocab_size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.add_tokens(["\n\n"])  # one token, whatever follows, as in newer tokenizers
    if one_token_thinking:
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    return tokenizer


def styled(style: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a style."""
    return tokenizer_of(*TEMPLATES[style])
