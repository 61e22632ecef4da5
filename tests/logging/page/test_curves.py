from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image, pyplot

from flowtrain.logging.page import curves
from flowtrain.logging.page.curves import plot_curves
from flowtrain.logging.series import Series, read_series
from flowtrain.records import UserError


def row(step: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "step": step,
        "reward_mean": 0.5 + 0.3 * math.sin(step),
        "turns_mean": 1.5 + 0.01 * step,
        "malformed_share": 0.1 / (1 + step),
        "entropy": 1 / (1 + step),
        "ratio_max": 1.2,
        "ratio_min": 0.9,
        "clip_fraction": 0.0 if step < 3 else 0.02,
        "kl_ref": 0.001 * step,
        "logprob_mismatch": 1e-6 * (1 + step),
        "tool_share/lookup": 0.6,
        "tool_share/python": 0.4,
    }
    if step % 5 == 0:
        record |= {
            "eval_reward": 0.3 + step / 100,
            "eval_reward_entities": 0.25,
            "eval_reward_forms": 0.2,
        }
    return record


def make_run(folder: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows) + tail)
    return folder


def coloured_share(pixels: np.ndarray) -> float:
    return float((pixels.max(axis=-1) - pixels.min(axis=-1) > 0.1).mean())


def titles(series: dict[str, Series]) -> list[str]:
    return [axes.get_title() for axes in curves.run_figure(series, "run").axes]


@pytest.mark.parametrize("num_steps", [1, 60])
def test_the_picture_has_drawn_panels(tmp_path: Path, num_steps: int) -> None:
    path = plot_curves(make_run(tmp_path / "run", [row(step) for step in range(num_steps)]))
    assert path == tmp_path / "run" / "curves.png"
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    height, width = image.imread(path).shape[:2]
    assert 1200 <= width <= 4000 and 600 <= height <= 2500
    picture = image.imread(path)[round(0.05 * height) :, :, :3]
    rows = np.array_split(picture, 3)
    shares = [coloured_share(part) for half in rows for part in np.array_split(half, 3, axis=1)]
    assert min(shares[:8]) > 0.0001, shares
    assert pyplot.get_fignums() == []


def test_a_panel_without_a_logged_metric_is_left_out(tmp_path: Path) -> None:
    full = read_series(make_run(tmp_path / "full", [row(1), row(2)]))
    assert titles(full) == [
        *("Reward", "KL", "Token entropy", "Importance ratio", "Log-prob mismatch"),
        *("Turns per rollout", "Tool use", "What goes wrong"),
    ]
    assert titles({"kl": full["kl_ref"]}) == ["KL"], "of a run of an older version"
    assert titles({"kl_old": full["kl_ref"]}) == [], "without a reference it is hardly above 0"
    assert titles({"unknown": full["kl_ref"]}) == []


def test_each_line_shows_its_metric(tmp_path: Path) -> None:
    series = read_series(make_run(tmp_path, [row(step) for step in range(6)]))
    reward = curves.run_figure(series, "run").axes[0]
    lines = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in reward.get_lines()
    }
    assert lines["held-out texts"] == ([0, 5], [0.3, 0.35])
    assert lines["training"] == series["reward_mean"]
    assert reward.get_xlabel() == "training step"


def test_benchmarks_and_lengths_have_panels_of_their_own() -> None:
    series = {
        "eval_accuracy/aime24": ([0, 10], [0.1, 0.3]),
        "eval_accuracy/nq": ([0, 10], [0.4, 0.5]),
        "eval_turns/nq": ([0, 10], [2.0, 3.0]),
        "response_len_mean": ([1, 2], [50.0, 40.0]),
        "prompt_len_mean": ([1, 2], [900.0, 950.0]),
        "tool_error_share": ([1, 2], [0.5, 0.25]),
    }
    figure = curves.run_figure(series, "run")
    shown = {
        axes.get_title(): {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        for axes in figure.axes
    }
    assert shown == {
        "Accuracy on benchmarks": {"aime24": [0.1, 0.3], "nq": [0.4, 0.5]},
        "Tokens per response": {"tokens": [50.0, 40.0]},
        "Tokens per prompt": {"tokens": [900.0, 950.0]},
        "What goes wrong": {"tool errors": [0.5, 0.25]},
    }
    (accuracy, _) = figure.axes[0].get_lines()
    assert accuracy.get_marker() == "o", "few points are marked"


def test_many_steps_get_a_moving_average(tmp_path: Path) -> None:
    series = read_series(make_run(tmp_path, [row(step) for step in range(60)]))
    raw, smooth = curves.run_figure({"entropy": series["entropy"]}, "run").axes[0].get_lines()
    assert list(raw.get_ydata()) == series["entropy"][1]
    assert smooth.get_ydata()[-1] == pytest.approx(sum(series["entropy"][1][-10:]) / 10)
    assert smooth.get_label() == "nats, mean of 10"


def test_a_tool_that_appears_later_had_no_share_before(tmp_path: Path) -> None:
    rows = [{"step": 1, "tool_share/a": 1.0}, {"step": 2, "tool_share/a": 0.5, "tool_share/b": 0.5}]
    (axes,) = curves.run_figure(read_series(make_run(tmp_path, rows)), "run").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    tops = [max(y for _, y in area.get_paths()[0].vertices) for area in axes.collections]
    assert tops == [1.0, 1.0]


def test_series_skip_nulls_and_a_torn_last_line_and_merge_lines_of_a_step(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "kl": 0.1, "a": None},
        {"step": 2, "kl": float("nan")},
        {"step": 2, "kl": 0.3, "note": "x"},
        {"step": 2, "a": 4},
    ]
    series = read_series(make_run(tmp_path, lines, tail='{"step": 3, "kl": 0.'))
    assert series == {"kl": ([1, 2], [0.1, 0.3]), "a": ([2], [4])}


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "kl": None}]])
def test_nothing_logged_is_the_users_error(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl holds no metrics yet"):
        plot_curves(make_run(tmp_path, rows))
    assert not (tmp_path / "curves.png").exists()


def test_no_run_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        plot_curves(tmp_path)
