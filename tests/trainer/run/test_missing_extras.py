"""A package of an extra that is not installed is one line that names the extra."""

from __future__ import annotations

import sys
import tomllib
from importlib import util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from flowtrain.config import Config
from flowtrain.logging import MetricsLog
from flowtrain.records import UserError
from flowtrain.tools.registry import make_tools
from flowtrain.trainer.run.run_logger import _draw

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
BASE = {
    *("flowkernels", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy"),
    *("pydantic", "msgspec", "httpx2", "tqdm", "tomli_w"),
}


@pytest.fixture(params=["bm25s", "trafilatura", "matplotlib", "tensorboard"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    find, name = util.find_spec, str(request.param)

    def found(module: str) -> ModuleSpec | None:
        return None if module == name else find(module)

    for module in [each for each in sys.modules if each.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "flowtrain.tools.retrieval.bm25", raising=False)
    for module in ("search", "web_reader", "retrieval.index", "retrieval.corpus"):
        monkeypatch.delitem(sys.modules, f"flowtrain.tools.{module}", raising=False)
    monkeypatch.delitem(sys.modules, "flowtrain.logging.page.curves", raising=False)
    monkeypatch.delattr("flowtrain.logging.page.curves", raising=False)
    for module in ("flowtrain.logging.loggers", "flowtrain.tools.web.extract"):
        monkeypatch.setattr(f"{module}.find_spec", found)
    return name


def test_a_missing_package_is_one_line_that_names_its_extra(
    missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = {"bm25s": ("Search", "search"), "trafilatura": ("Web_Reader", "web")}
    if missing in tools:
        tool, extra = tools[missing]
        line = rf"^agent\.tools='{tool}' needs {missing}: pip install -e '\.\[{extra}\]'$"
        with pytest.raises(UserError, match=line):
            make_tools(Config.model_validate({"agent": {"tools": [tool]}}))
        return
    if missing == "matplotlib":
        assert not _draw(tmp_path) and not list(tmp_path.iterdir())
    else:
        log = MetricsLog(tmp_path)
        log.log({"step": 1, "a": 0.5})
        log.close()
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("pip install -e '.[plots]'")


def test_the_base_needs_what_every_run_needs() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    names = {line.partition("~")[0].partition(">")[0] for line in project["dependencies"]}
    assert names == BASE
