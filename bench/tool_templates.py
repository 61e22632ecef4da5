"""Published chat templates: which of them have their calls of tools read back:
python -m bench.tool_templates FOLDER

FOLDER holds *.jinja files, at any depth; of equal ones one counts, and only those that show tools.
The format is that of `agent.tool_format = "auto"`. Each template then writes other calls. One is
misread where it comes back as another call, or as none; a value that the template itself writes
unreadably comes back as a call with a problem.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flowtrain.agents.chat.tool_formats import (
    FORMATS,
    WrittenCall,
    format_of,
    reads,
    rendered_reply,
    tools_of,
)
from flowtrain.inference.token_chat import TEMPLATE_ERRORS, render_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TRIALS = {
    "words": {"text": "find it, then stop"},
    "number as text": {"text": "12", "more": "true", "none": "null"},
    "JSON as text": {"text": '{"a": [1]}', "list": "[1, 2]"},
    "unicode": {"text": "Zürich 東京 🦊"},
    "lines": {"text": "\n  first\n\nsecond \n"},
    "marks": {"text": "a </tool_call> b </parameter> c </arg_value> d </think> <think> e"},
    "quotes": {"text": 'it\'s "so" \\n', "more": "'"},
    "numbers": {"n": 5, "x": 0.5, "negative": -3, "is_new": False},
    "nested": {"tree": {"a": [{"b": "5"}, [], {}], "c": None}, "list": ["x", 1, True]},
    "nothing": {},
}


def shows_tools(template: str) -> bool:
    """Tell whether a template describes tools to the model."""
    tools = tools_of([WrittenCall("find_it", json.dumps({"city": "x"}))])
    with suppress(*TEMPLATE_ERRORS):
        user = {"role": "user", "content": "Hi"}
        return "find_it" in render_template(template, [user], tools, TOKENS)
    return False


def trials(template: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield what became of the calls that were not read back, by the name of the trial."""
    for trial, values in TRIALS.items():
        call = WrittenCall("find_it", json.dumps(values))
        with suppress(*TEMPLATE_ERRORS):
            reply = rendered_reply(template, [call], TOKENS)
            if not reads(FORMATS[name], reply, [call]):
                _, calls = FORMATS[name].parse(reply, tools_of([call]))
                yield trial, "problem" if calls and calls[0].problem else "misread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    sums: Counter[str] = Counter()
    sources = {
        path.read_text(): path for path in sorted(parser.parse_args().folder.rglob("*.jinja"))
    }
    for template, path in sources.items():
        if not shows_tools(template):
            continue
        name = format_of(template, TOKENS)
        failed = dict(trials(template, name)) if name else {}
        result = "refused" if not name else "misread" if "misread" in failed.values() else "read"
        sums[result] += 1
        print(f"{result:8} {name or '-':14} {path.name}", failed or "")
    print(dict(sums))


if __name__ == "__main__":
    main()
