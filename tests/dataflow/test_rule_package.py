"""The package in examples/rule_package, installed by pip into a folder of its own and loaded by
another process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packages import check_shown, installed, printed

ASK = """
import json
from flowtrain.dataflow.rules import Outcome, load
from flowtrain.config.options import parse

args = ["--dataflow.prompt_filter", "rest"]
config = parse([*args, "--dataflow.prompt_filter_options", "{num_versions = 2}"])
prompt_filter = load(config.dataflow).prompt_filter
answers = [prompt_filter.admits("a", "", 0.5)]
prompt_filter.observe(Outcome(1, "a", "", (1.0, 1.0), 10))
prompt_filter.observe(Outcome(2, "b", "", (1.0, 0.0), 10))
for version in (1, 2):
    answers += [prompt_filter.admits("a", "", 0.5), prompt_filter.admits("b", "", 0.5)]
    prompt_filter.on_version(version)
print(json.dumps([*answers, prompt_filter.admits("a", "", 0.5)]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("rule_package", tmp_path_factory.mktemp("package"))


def test_an_installed_prompt_filter_is_loaded_with_its_options(site: Path) -> None:
    # a rests for versions 0 and 1, b was not solved
    assert printed(ASK, site) == [True, False, True, False, True, True]


def test_the_docs_show_the_example_as_it_is() -> None:
    check_shown("rule_package/flowtrain_rest.py", "dataflow-rules.md")
