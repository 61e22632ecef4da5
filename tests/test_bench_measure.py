"""What the benches print and keep: rows as they come, and under what they were measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import measure

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


def test_a_row_is_printed_and_kept_before_the_next_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"

    def rows() -> Iterator[measure.Row]:
        yield {"way": "first", "ms": 1.23456}
        assert capsys.readouterr().out.split() == ["way", "ms", "-" * 13, "-" * 9, "first", "1.235"]
        assert json.loads(path.read_text())["rows"] == [{"way": "first", "ms": 1.23456}]
        yield {"way": "second", "ms": 2}
        assert capsys.readouterr().out == f"{'second':>13}  {2:>9}\n", "below the same header"
        yield {"other": 3}

    measure.report(str(path), rows())
    assert capsys.readouterr().out.split() == ["other", "-" * 9, "3"]
    assert len(json.loads(path.read_text())["rows"]) == 3


def test_a_bench_that_is_stopped_leaves_its_rows(tmp_path: Path) -> None:
    def rows() -> Iterator[measure.Row]:
        yield {"ms": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.report(str(tmp_path / "rows.json"), rows())
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [{"ms": 1}]


def test_facts_name_the_commit_the_command_and_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.sys, "argv", ["/x/delta.py", "--sizes", "1 2"])
    monkeypatch.setenv("FLOWTRAIN_COMMIT", "abc")
    measure.commit_of_checkout.cache_clear()
    measure.write_json(tmp_path / "rows.json", [])
    measure.commit_of_checkout.cache_clear()
    facts = json.loads((tmp_path / "rows.json").read_text())["facts"]
    assert facts["commit"] == "abc" and facts["date"][:2] == "20" and facts["date"][4] == "-"
    assert facts["command"].startswith("python ") and facts["command"].endswith(" --sizes '1 2'")
    assert facts["cpu"] and facts["cores"] == len(os.sched_getaffinity(0)) and facts["load"] >= 0
    assert facts["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()


def test_sizes_of_the_docs_are_one_option_and_others_go_before_it() -> None:
    parser = measure.new_parser("What it does.", sizes="512", repeats=5)
    parser.add_argument("--sizes", default="1")
    parser.add_argument("--repeats", type=int, default=1)
    assert vars(parser.parse_args([])) == {"json": None, "full": None, "sizes": "1", "repeats": 1}
    given = parser.parse_args(["--full", "--repeats", "2"])
    assert (given.sizes, given.repeats) == ("512", 2)
    assert "the sizes that the docs quote: --sizes 512 --repeats 5" in " ".join(
        parser.format_help().split()
    )


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_results_that_are_kept_say_when_and_by_which_command(path: Path) -> None:
    facts = json.loads(path.read_text())["facts"]
    assert facts["commit"] and facts["date"] and "python -m " in facts["command"]
