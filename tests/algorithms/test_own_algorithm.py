"""Algorithms of users: examples/my_algorithm.py trains, and packages name theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from batches import random_samples
from cli_runs import Server

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.records import UserError
from flowtrain.trainer.packing import pack_rows
from flowtrain.trainer.trainer import Trainer
from tests.trainer.gradients import distance, gradient_of

pytest_plugins = ("cli_runs",)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (
    *("--algorithm.name", f"{ROOT}/examples/my_algorithm.py:BoundedRloo", "--train.lr", "1e-3"),
    *("--train.num_minibatches", "1", "--eval.at_ends", "false", "--algorithm.kl_coef", "0"),
    *("--train.num_steps", "2"),
)


def test_an_algorithm_in_a_file_trains_two_steps(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    argv = ("--run.dir", tmp_path / "run", "--plugins.BoundedRloo.most", "0.25")
    code, said, _ = server.run("train", *words, *TRAIN, *argv)
    assert code == 0, said
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["num_optim_steps"] == 1 and step["num_tokens"] > 0 for step in steps)
    records = (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    trained = [
        turn["training"]["advantage"]
        for record in map(json.loads, records)
        for turn in record["turns"]
        if turn["training"]
    ]
    assert 0.0 < max(map(abs, trained)) <= 0.25 + 1e-6


def test_dapo_asks_other_questions_for_those_that_teach_nothing(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    """A run that is stopped after its first checkpoint goes on with the same questions."""
    options = ("--algorithm.name", "dapo", "--algorithm.dynamic_sampling", "3")
    told = []
    for name, parts in {"whole": (4,), "halves": (2, 4)}.items():
        for num_steps in parts:
            argv = (
                *("--run.dir", tmp_path / name, "--train.num_steps", num_steps, "--resume"),
                "auto",
            )
            code, said, _ = server.run("train", *words, *options, *argv)
            assert code == 0, said
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines if '"num_tokens"' in line]
        told.append([(s["step"], s["reward_mean"], s["num_questions_sampled"]) for s in steps])
    assert told[0] == told[1]
    num_questions = [step[2] for step in told[0]]
    assert min(num_questions) >= 2 and max(num_questions) > 2, num_questions


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            (*TRAIN[:2], "--plugins.BoundedRloo.mos", "1.0"),
            r"plugins\.BoundedRloo\.mos=1\.0: Extra",
        ),
        (("--algorithm.name", "grpo"), "name='grpo': there is no such algorithm; there are flow_g"),
        (("--algorithm.name", "json:dumps"), "is not a subclass of flowtrain.algorithms.Algorithm"),
        (("--plugins.flow_grpo.beta", "1"), r"plugins\.flow_grpo\.beta=1: Extra inputs"),
    ],
)
def test_what_is_no_algorithm_and_options_that_it_lacks_are_refused(
    words: tuple[str, ...], problem: str
) -> None:
    config = parse(words)
    with pytest.raises(UserError, match=problem):
        load_algorithm(config)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("json:Half", "of package halves 1.2 cannot be imported: AttributeError: module 'json'"),
        ("halves:Half", "cannot be constructed: ZeroDivisionError"),
        ("halves:Whole", ""),
    ],
)
def test_an_algorithm_of_a_package(
    target: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "halves-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[flowtrain.algorithms]\nhalf = {target}\n")
    (tmp_path / "halves.py").write_text(
        "from flowtrain.algorithms import Algorithm\n"
        "class Whole(Algorithm):\n    def credit(self, rewards): return rewards\n"
        "class Half(Whole):\n    def check(self): 1 / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = parse(["--algorithm.name", "half"])
    if not problem:
        assert type(load_algorithm(config)).__name__ == "Whole"
        return
    with pytest.raises(UserError) as raised:
        load_algorithm(config)
    assert problem in str(raised.value) and "algorithm.name='half'" in str(raised.value)


# ---- losses


def test_a_loss_in_a_file_has_the_gradient_that_autograd_gives_it(
    make_trainer: Callable[..., Trainer],
) -> None:
    """Its slope is A r s' (t (r - 1)) 4 / t: that of `clip` where r is 1."""
    path = f"{ROOT}/examples/my_loss.py:soft_clip"
    config = Config.model_validate({"algorithm": {"loss": path, "kl_coef": 0.0}})
    algorithm = load_algorithm(config)
    clipped, own = make_trainer(rescore=True, grad_clip=0.0), make_trainer(grad_clip=0.0)
    own._token_loss = algorithm.token_loss(algorithm.loss_spec())
    stale = pack_rows(random_samples(6), 4)
    (fresh,) = clipped.old_logprobs([stale])
    truth = gradient_of(clipped, fresh)
    assert distance(gradient_of(own, fresh), truth) < 1e-5
    assert distance(gradient_of(own, stale), truth) > 1e-2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"loss": "clap"},
            r"(?s)algorithm\.loss.*'clap' must be one of clip, gspo, cispo, or FILE",
        ),
        ({"loss": "my_loss.py:gone"}, r"algorithm\.loss='my_loss\.py:gone'"),
        ({"loss": "json:dumps", "entropy_coef": 0.1}, "entropy_coef=0.1 cannot be combined with"),
        ({"loss": "json:dumps", "name": "appo"}, "cannot be combined with algorithm.name='appo'"),
        ({"loss": "math:pi"}, "'pi' is a float, not a function"),
    ],
)
def test_what_is_no_loss_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises((UserError, ValueError), match=problem):
        load_algorithm(Config.model_validate({"algorithm": options}))
