"""Chat templates that write calls of tools after the published styles of newer model families."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

from chat_templates import tokenizer_of
from transformers import PreTrainedTokenizerFast


def _template(
    turn: str,
    end: str,
    calls: str,
    result: str,
    call_end: str = "",
    said: str = "m.content",
    mark: str = "''",
) -> str:
    """A template of these pieces, most of them in Jinja's words.

    `turn` opens a turn of ROLE, `mark` stands before a text, and `said` beside calls.
    """
    assistant = turn.replace("ROLE", "'assistant'")
    system = turn.replace("ROLE", "'system'")
    return (
        "{%- set ns = namespace(said='') %}"
        f"{{%- if tools %}}{{{{- {system} + {mark} + 'Tools: ' + tools | tojson + {end} }}}}"
        "{%- endif %}{%- for m in messages %}"
        "{%- set before = loop.previtem.role if not loop.first else '' %}"
        f"{{%- if m.role == 'tool' %}}{result}"
        f"{{%- elif m.tool_calls %}}{{{{- {assistant} + {said} }}}}{calls}"
        f"{{{{- {call_end or end} }}}}"
        f"{{%- else %}}{{{{- {turn.replace('ROLE', 'm.role')} + {mark} + m.content + {end} }}}}"
        "{%- endif %}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {assistant} }}}}{{%- endif %}}"
    )


NEXT = "('\\n' if not loop.first else '')"


def _each(begin: str, argument: str, end: str) -> str:
    """Calls whose arguments stand one by one."""
    return (
        f"{{%- for c in m.tool_calls %}}{{{{- {begin.replace('_NEXT', NEXT)} }}}}"
        "{%- for k, v in c.function.arguments.items() %}"
        "{%- set v = v if v is string else v | tojson %}"
        f"{{{{- {argument} }}}}{{%- endfor %}}{{{{- {end} }}}}{{%- endfor %}}"
    )


def _json(begin: str, end: str) -> str:
    """Calls whose arguments are one object."""
    return (
        "{%- for c in m.tool_calls %}"
        f"{{{{- {begin} + c.function.arguments | tojson + {end} }}}}{{%- endfor %}}"
    )


@dataclass(frozen=True)
class Style:
    """A template, and the tokens that end its replies."""

    template: str
    end: str
    special: tuple[str, ...]
    call_end: str = ""


_CHATML = "'<|im_start|>' + ROLE + '\\n'"
_GEMMA_VALUE = "{%- for k, v in c.function.arguments.items() %}{{- ',' if not loop.first }}"
STYLES = {
    "qwen3_coder": Style(
        _template(
            _CHATML,
            "'<|im_end|>\\n'",
            _each(
                "_NEXT + '<tool_call>\\n<function=' + c.function.name + '>\\n'",
                "'<parameter=' + k + '>\\n' + v + '\\n</parameter>\\n'",
                "'</function>\\n</tool_call>'",
            ),
            "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content"
            " + '\\n</tool_response><|im_end|>\\n' }}",
        ),
        "<|im_end|>",
        (),
    ),
    "glm": Style(
        _template(
            "'<|' + ROLE + '|>\\n'",
            "''",
            _each(
                "_NEXT + '<tool_call>' + c.function.name + '\\n'",
                "'<arg_key>' + k + '</arg_key>\\n<arg_value>' + v + '</arg_value>\\n'",
                "'</tool_call>'",
            ),
            "{{- '<|observation|>' if before != 'tool' }}"
            "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}",
        ),
        "<|user|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|observation|>",
    ),
    "minimax_m2": Style(
        _template(
            "']~b]' + ROLE + '\\n'",
            "'[e~[\\n'",
            "{{- '<minimax:tool_call>' }}"
            + _each(
                "'\\n<invoke name=\"' + c.function.name + '\">\\n'",
                "'<parameter name=\"' + k + '\">' + v + '</parameter>\\n'",
                "'</invoke>'",
            )
            + "{{- '\\n</minimax:tool_call>' }}",
            "{{- ']~b]tool\\n<response>' + m.content + '</response>[e~[\\n' }}",
        ),
        "[e~[",
        ("]~b]", "[e~["),
    ),
    "deepseek_v31": Style(
        _template(
            "'<｜' + ROLE + '｜>'",
            "'<｜end▁of▁sentence｜>'",
            "{{- '<｜tool▁calls▁begin｜>' }}"
            + _json(
                "'<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>'",
                "'<｜tool▁call▁end｜>'",
            )
            + "{{- '<｜tool▁calls▁end｜>' }}",
            "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}",
        ),
        "<｜end▁of▁sentence｜>",
        (
            *("<｜user｜>", "<｜assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
            *(
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ),
        ),
    ),
    "kimi_k2": Style(
        _template(
            "'<|im_' + ROLE + '|>' + ROLE + '<|im_middle|>'",
            "'<|im_end|>'",
            "{{- '<|tool_calls_section_begin|>' }}"
            + _json(
                "'<|tool_call_begin|>functions.' + c.function.name + ':' ~ loop.index0 +"
                " '<|tool_call_argument_begin|>'",
                "'<|tool_call_end|>'",
            )
            + "{{- '<|tool_calls_section_end|>' }}",
            "{{- '<|im_system|>tool<|im_middle|>' + m.content + '<|im_end|>' }}",
        ),
        "<|im_end|>",
        (
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "gemma4": Style(
        _template(
            "('<|turn>' + ROLE + '\\n' if before != 'tool' else '')",
            "'<turn|>\\n'",
            "{%- set ns.said = m.content %}"
            "{%- for c in m.tool_calls %}{{- '<|tool_call>call:' + c.function.name + '{' }}"
            + _GEMMA_VALUE
            + "{{- k + ':' + ('<|\"|>' + v + '<|\"|>' if v is string else v | tojson) }}"
            "{%- endfor %}{{- '}<tool_call|>' }}{%- endfor %}",
            "{{- '<|tool_response>' if before == 'tool' }}"
            "{{- 'response:f{value:<|\"|>' + m.content + '<|\"|>}<tool_response|>' }}"
            "{{- ns.said if loop.last or loop.nextitem.role != 'tool' }}",
            "'<|tool_response>'",
            "''",
        ).replace("add_generation_prompt", "add_generation_prompt and messages[-1].role != 'tool'"),
        "<turn|>",
        (
            *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
            *("<tool_response|>", '<|"|>'),
        ),
        "<|tool_response>",
    ),
    "harmony": Style(
        _template(
            "'<|start|>' + ROLE",
            "('<|return|>' if m is defined and m.role == 'assistant' and loop.last else '<|end|>')",
            "{%- set c = m.tool_calls[0] %}"
            "{{- ' to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}"
            "{{- c.function.arguments | tojson }}",
            "{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content"
            " + '<|end|>' }}",
            "'<|call|>'",
            "('<|channel|>analysis<|message|>' + m.content + '<|end|><|start|>assistant'"
            " if m.content else '')",
            "('<|channel|>final' if m is defined and m.role == 'assistant' else '')"
            " + '<|message|>'",
        ),
        "<|return|>",
        (
            *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>", "<|channel|>"),
            "<|constrain|>",
        ),
        "<|call|>",
    ),
}


@functools.cache
def tokenizer_in(style: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template and the special tokens of a style."""
    known = STYLES[style]
    tokenizer = copy.deepcopy(tokenizer_of("", "<|im_end|>"))
    special = [*tokenizer.all_special_tokens, *known.special]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token, tokenizer.chat_template = known.end, known.template
    return tokenizer
