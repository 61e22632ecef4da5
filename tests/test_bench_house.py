"""The measures of bench.house, on a checkout small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import house

FILES = {
    "flowtrain/__init__.py": '"""A package."""\n',
    "flowtrain/train.py": (
        '"""The loop."""\n\nimport flowkernels\n\nfrom flowtrain.run import make\n\n\n'
        "def main():\n    # a comment\n    return make()\n"
    ),
    "flowtrain/unused.py": "import flowtrain.tasks\n",
    "flowtrain/run/__init__.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from ..unused import x\n\n\n"
        'def make(config):\n    """What is made."""\n    from ..tasks import rows\n\n'
        '    if config.algorithm.name == "appo" and config.name != "b":\n        return rows\n'
    ),
    "flowtrain/tasks/__init__.py": '"""Of tasks."""\n',
    "flowtrain/tasks/rows.py": (
        "from flowtrain import run\n\nn = 1\n"
        '"""Whatever n is."""\n\ntry:\n    n = 2\nexcept ValueError:\n    n = 3\n'
    ),
    "flowtrain/algorithms/appo.py": 'def f(algorithm):\n    return algorithm.name == "appo"\n',
    "flowtrain/config/__init__.py": (
        "class Section: ...\n\n\nclass Run(Section):\n    seed: int = 0\n    dir: str = ''\n\n\n"
        "class Config(Section):\n    run: Run = Run()\n    user: dict[str, Run] = {}\n    "
        "plugins: dict[str, int] = {}\n"
    ),
    "kernels/flowkernels/__init__.py": f'"""Kernels."""\n\nx = "{"y" * 120}"\n',
    "tests/test_x.py": '"""Where tests are."""\n',
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


def test_each_measure_of_a_small_checkout(checkout: Path) -> None:
    found = house.measure(checkout)
    assert found["files"] == 9
    assert found["files that train.py reaches"] == 6, "neither unused, nor algorithms, nor config"
    assert found["largest fan-out"] == "2 (flowtrain.run)"
    assert (found["package cycles"], found["packages in cycles"]) == (1, 3), "types count here"
    assert found["tests of algorithm.name outside algorithms/ and config/"] == 1
    assert found["docstrings from Of, What, Where"] == 2, "Whatever is another word"
    assert found["... in bench/, examples/, tests/"] == 1
    assert found["lines over 100 columns"] == 1
    assert found["options in the config"] == 4
    lines = found["lines at 100 columns"]
    assert isinstance(lines, int) and lines == found["lines"] + 1, "a line of 126 fills two"
    assert found["`except` per 1,000 lines"] == round(1000 / lines, 1)
    assert found["largest function"] == "6 (flowtrain.run.make)"


def test_tokens_leave_out_comments_and_docstrings(tmp_path: Path) -> None:
    plain, documented = tmp_path / "plain.py", tmp_path / "documented.py"
    plain.write_text("x = 1\ndef f():\n    return x\n")
    documented.write_text(
        '"""A\nmodule."""\n\n# why\nx = 1\n"""Says x."""\ndef f():\n    "F."\n    return x\n'
    )
    assert house.num_tokens(documented) == house.num_tokens(plain) > 10


def test_the_name_of_an_algorithm_is_seen_in_comparisons_and_matches(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(
        "a = config.algorithm.name in names\nb = (x, algorithm.name) == y\nc = policy.name == x\n"
        "d = algorithm_name != x\nmatch algorithm.name:\n    case 'appo': pass\n"
        "print(algorithm.name)\n"
    )
    assert set(house.name_tests([path])) == {f"{path}:{line}" for line in (1, 2, 4, 5)}


def test_strong_components() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "e": {"f"}, "f": {"e"}}
    assert house.strong_components(graph) == [["b", "c"], ["e", "f"]]


def test_two_checkouts_stand_side_by_side(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    house.main([str(checkout), str(checkout), "--json", str(tmp_path / "house.json")])
    heading, files, *_ = capsys.readouterr().out.splitlines()
    assert (heading.split(), files.split()) == (["before", "after"], ["files", "9", "9"])
    written = json.loads((tmp_path / "house.json").read_text())
    assert written["before"] == written["after"] == house.measure(checkout)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of flowtrain"):
        house.measure(tmp_path)
