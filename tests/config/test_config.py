"""Options: defaults, the file over them, the command line over that; messages about wrong ones."""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import complaint, filled, parsed
from pydantic import ValidationError
from refusals import check_parts, rows

from flowtrain.config import Chat, Config, McpServer, Policy
from flowtrain.config.options import (
    FIRST,
    NAMED,
    all_options,
    check_allowed,
    help_text,
    help_topic,
    parse,
    parse_over,
    to_toml,
)
from flowtrain.config.synonyms import SYNONYMS, meant
from flowtrain.records import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
REFUSALS = Path(__file__).parent / "refusals.toml"
KEYS = [
    f"{section}.{key}"
    for section, values in Config().model_dump().items()
    if section not in NAMED
    for key in values
]


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str | bytes], str]:
    """Writes a config file and gives its path."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


# ---- defaults


def test_without_arguments_every_option_has_its_default() -> None:
    config = parsed()
    assert config == Config()
    found = (config.agent.max_turns, config.rollout.group_size, config.algorithm.kl_coef)
    assert found == (3, 8, 0.001), "AgentFlow's numbers"
    assert config.agent.tools == ("Base_Generator", "Python_Coder", "Wikipedia_Search")
    assert (config.agent.prompt, config.rollout.max_new_tokens) == ("full", 2048)
    assert (config.run.resume, config.model.path) == ("never", "tiny")


def test_paper_mode_has_one_symmetric_clip_and_no_dual_clip() -> None:
    for config in (filled(), filled("--algorithm.mode", "paper")):
        algorithm = config.algorithm
        assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.2, None)


def test_released_mode_has_the_clips_of_the_released_code(toml: Callable[[str], str]) -> None:
    for config in (
        filled("--algorithm.mode", "released"),
        filled("--config", toml('[algorithm]\nmode = "released"')),
    ):
        algorithm = config.algorithm
        assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.3, 3.0)


def test_a_clip_that_is_set_wins_over_the_mode() -> None:
    algorithm = filled(
        "--algorithm.mode=released", "--algorithm.clip_high=0.25", "--algorithm.dual_clip=5"
    ).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.25, 5.0)
    assert filled("--algorithm.dual_clip=4").algorithm.dual_clip == 4


def test_the_length_of_fine_tuning_is_given_in_one_way() -> None:
    rft = parsed("--rft.num_epochs", "3").rft
    assert (rft.num_steps, rft.num_epochs) == (0, 3)
    assert (parsed().rft.num_steps, parsed().rft.num_epochs) == (1500, 0)


def test_the_size_of_an_optimizer_step_is_given_in_one_way() -> None:
    config = parsed("--train.minibatch_size", "64")
    assert (config.train.num_minibatches, config.train.minibatch_size) == (0, 64)
    assert parse_over(to_toml(config), []) == config
    assert (parsed().train.num_minibatches, parsed().train.minibatch_size) == (2, 0)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().train.lr = 1.0


# ---- file and command line


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(
    toml: Callable[[str], str],
) -> None:
    path = toml("[train]\nlr = 1e-4\nnum_steps = 7\n[run]\nseed = 3\n")
    config = parsed("--train.lr", "2e-4", "--config", path)
    found = (config.train.lr, config.train.num_steps, config.run.seed, config.train.beta1)
    assert found == (2e-4, 7, 3, 0.9)


@pytest.mark.parametrize("words", [["--run.seed", "5"], ["--run.seed=5"]])
def test_overrides_come_in_two_forms(words: list[str]) -> None:
    assert parsed(*words).run.seed == 5


@pytest.mark.parametrize(
    "words", [["--resume", "auto"], ["--resume=auto"], ["--run.resume", "auto"]]
)
def test_resume_has_a_short_form(words: list[str]) -> None:
    assert parsed(*words).run.resume == "auto"


def test_the_last_of_two_values_of_a_key_wins() -> None:
    assert parsed("--run.seed", "1", "--run.seed=2").run.seed == 2


def test_a_value_may_hold_an_equals_sign_and_spaces() -> None:
    assert parsed("--run.dir=a=b c").run.dir == "a=b c"
    assert parsed("--run.dir", "--x").run.dir == "--x"


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        (["--agent.tools", '["Search"]'], "agent", "tools", ("Search",)),
        (["--log.tensorboard", "false"], "log", "tensorboard", False),
        (["--run.threads", "2"], "run", "threads", 2),
        (["--train.lr", "3e-4"], "train", "lr", 3e-4),
        (["--rollout.temperature", "1"], "rollout", "temperature", 1.0),
        (["--model.path", "runs/warm/model"], "model", "path", "runs/warm/model"),
        (["--model.path", '"runs/warm model"'], "model", "path", "runs/warm model"),
        (["--eval.every", "0"], "eval", "every", 0),
    ],
)
def test_values_are_read_as_toml_or_as_text(
    words: list[str], section: str, key: str, value: Any
) -> None:
    assert getattr(getattr(parsed(*words), section), key) == value


@pytest.mark.parametrize(
    "name", ["1.10", "1e5", "007", "1_000", "0x10", "true", "2026-11-20", "inf", "[x]", "runs/#1"]
)
def test_a_text_option_takes_any_word_unquoted(name: str) -> None:
    assert parsed("--run.dir", name).run.dir == name


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("Search,Python_Coder", ("Search", "Python_Coder")),
        ("Search, Python_Coder", ("Search", "Python_Coder")),
        ('["Search", "Python_Coder"]', ("Search", "Python_Coder")),
        ("Search", ("Search",)),
        ('"Search"', ("Search",)),
    ],
)
def test_a_list_may_be_words_with_commas(text: str, tools: tuple[str, ...]) -> None:
    assert parsed("--agent.tools", text).agent.tools == tools


def test_help_returns_no_config() -> None:
    assert parse(["--help"]) is None
    assert parse(["--no.such.key", "x", "-h"]) is None


def test_the_quickstart_file_is_a_config() -> None:
    config = parsed("--config", str(QUICKSTART))
    assert config != Config() and config.model.path == "tiny"


# ---- what is wrong


def test_what_others_call_an_option_leads_to_it() -> None:
    names = [option.name for option in all_options()]
    words = [word for words in SYNONYMS.values() for word in words]
    assert set(SYNONYMS) <= set(names) and len(words) == len(set(words))
    for option, synonyms in SYNONYMS.items():
        for word in synonyms:
            assert meant(word, names) == [option]
            assert f"{option.partition('.')[0]}.{word}" not in names


def check_both(option: str, value: str, start: str, parts: str, path: str) -> None:
    """Check what is said of an option with a value, on the command line and in a file."""
    for message, origin in (
        (complaint(f"--{option}", value), ""),
        (complaint(f"--{option}={value}"), ""),
        (complaint("--config", path), f"--config {path}: "),
    ):
        assert message.startswith(f"{origin}{start}: ")
        check_parts(message, parts)


@pytest.mark.parametrize(("key", "hints"), rows(REFUSALS, "keys"))
def test_an_unknown_key_is_named_with_what_it_may_be(
    key: str, hints: str, toml: Callable[[str], str]
) -> None:
    section, _, name = key.partition(".")
    path = toml(f"[{section}]\n{name} = 1\n" if name else f"[{section}]\n")
    check_both(key, "1", f"unknown key {key}", hints, path)


@pytest.mark.parametrize(("line", "reason"), rows(REFUSALS, "values"))
def test_a_bad_value_is_named_with_its_key(
    line: str, reason: str, toml: Callable[[str], str]
) -> None:
    key, _, text = line.partition(" = ")
    section, _, name = key.partition(".")
    value = tomllib.loads(f"value = {text}")["value"]
    check_both(key, text, f"{key}={value!r}", reason, toml(f"[{section}]\n{name} = {text}\n"))


@pytest.mark.parametrize(("words", "parts"), rows(REFUSALS, "words"))
def test_words_that_do_not_fit_are_named(
    words: str, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_parts(complaint(*shlex.split(words)), parts)


MALFORMED: list[tuple[str | bytes, str]] = [
    *rows(REFUSALS, "files"),
    (b"[run]\ndir = '\xff'\n", "not TOML"),
    *((f"[run]\nseed = {text * 5000}\n", "not TOML") for text in "9["),
]


@pytest.mark.parametrize(("text", "reason"), MALFORMED)
def test_a_malformed_file_is_refused_with_the_reason(
    text: str | bytes, reason: str, toml: Callable[[str | bytes], str]
) -> None:
    path = toml(text)
    assert complaint("--config", path).startswith(f"--config {path}: {reason}")


@pytest.mark.parametrize("text", ["[" * 5000, "9" * 5000])
def test_values_that_overflow_the_parser_are_refused(text: str) -> None:
    assert complaint("--run.seed", text).startswith("run.seed=")


# ---- help and files written


def test_help_all_lists_every_option_with_type_default_and_meaning() -> None:
    lines = help_text("flowtrain.train", "all").splitlines()
    assert lines[0].startswith("python -m flowtrain.train [--config FILE|NAME]")
    shown = {line.split()[0].removeprefix("--"): line for line in lines if line.startswith("  --")}
    assert [key for key in shown if not key.startswith(("engines.", "mcp.", "policies."))] == KEYS
    for name, kind in (("engines", Chat), ("mcp", McpServer), ("policies", Policy)):
        seen = [key for key in shown if key.startswith(f"{name}.")]
        assert seen == [f"{name}.NAME.{key}" for key in kind.model_fields]
    for key, line in shown.items():
        assert lines[lines.index(line) + 1].startswith("        ")
        assert lines[lines.index(line) + 1].strip(), f"{key} has no meaning"
    assert shown["train.lr"] == "  --train.lr FLOAT = 1e-06"
    found = shown["agent.tools"]
    assert found == '  --agent.tools LIST = ["Base_Generator", "Python_Coder", "Wikipedia_Search"]'
    assert shown["algorithm.mode"] == '  --algorithm.mode paper|released = "paper"'
    assert shown["algorithm.dual_clip"] == "  --algorithm.dual_clip FLOAT = unset"
    assert shown["algorithm.clip_high"] == "  --algorithm.clip_high FLOAT = unset"
    kinds = {line.split()[1] for line in shown.values()}
    named = {kind for kind in kinds if kind.isupper()}
    assert named == {"BOOL", "FLOAT", "INT", "LIST", "STR", "TABLE"}
    assert shown["train.token_budget"] == '  --train.token_budget INT|auto = "auto"'


def test_help_shows_the_options_that_people_set_first() -> None:
    lines = help_text("flowtrain.train").splitlines()
    shown = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    assert shown == list(FIRST) and len(shown) == 20
    assert set(shown) <= set(KEYS) and shown == sorted(shown, key=KEYS.index), "order of Config"
    closing = " ".join(lines[-4:])
    assert "--help all shows every option, --help SECTION those of a section: run, mod" in closing


@pytest.mark.parametrize("topic", Config.model_fields)
def test_help_of_a_section_lists_its_options(topic: str) -> None:
    lines = help_text("flowtrain.train", topic).splitlines()
    shown = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    table = f"{topic}.NAME" if topic in NAMED else topic
    assert all(name.rpartition(".")[0] == table for name in shown)
    assert topic in NAMED or shown == [key for key in KEYS if key.startswith(f"{topic}.")]
    assert len(lines) > 2 and all(len(line) <= 100 for line in lines if not line.startswith("  --"))


def test_help_knows_no_other_section() -> None:
    with pytest.raises(UserError, match=r"--help rolout: unknown section; there are all, run, mod"):
        help_text("flowtrain.train", "rolout")


@pytest.mark.parametrize(
    ("argv", "topic"),
    [
        (["--run.seed", "1"], None),
        (["--help"], ""),
        (["-h", "--run.seed", "1"], ""),
        (["--run.seed", "1", "--help", "all"], "all"),
        (["--help=rollout"], "rollout"),
    ],
)
def test_help_topic(argv: list[str], topic: str | None) -> None:
    assert help_topic(argv) == topic


def test_every_default_in_the_help_parses_to_itself() -> None:
    words = [
        line.split(" = ", 1)
        for line in help_text("x", "all").splitlines()
        if line.startswith("  --")
    ]
    given = [
        word for head, default in words if default != "unset" for word in (head.split()[0], default)
    ]
    given = [word.replace("policies.NAME", "policies.verifier") for word in given]
    assert parsed(*given) == Config(
        engines={"NAME": Chat()}, mcp={"NAME": McpServer()}, policies={"verifier": Policy()}
    )


CONFIGS: list[dict[str, dict[str, Any]]] = [
    {},
    {"algorithm": {"mode": "released"}},
    {"algorithm": {"mode": "released", "clip_high": 0.28}, "train": {"lr": 1e-7}},
    {"algorithm": {"dual_clip": 2.5}, "log": {"tensorboard": False}},
    {"agent": {"tools": ("Python_Coder",)}, "tasks": {"name": "file", "path": "my tasks.jsonl"}},
    {"run": {"dir": 'a "quoted"\\ folder\twith # and \u00e9\u2028\U0001f600', "seed": -5}},
    {"model": {"path": "1.10"}, "run": {"dir": "true"}},
    {"tasks": {"name": "file", "mixture": {"data/nq train.parquet": 1, "math.jsonl": 2.5}}},
    {
        "roles": {"verifier": "own"},
        "train": {"policy": "verifier"},
        "policies": {"planner": {"path": "warm"}},
    },
    {
        "roles": {"verifier": "own"},
        "policies": {"verifier": {"path": "warm", "temperature": 0.5, "max_new_tokens": 9}},
    },
]


@pytest.mark.parametrize("values", CONFIGS)
def test_to_toml_roundtrip(values: dict[str, dict[str, Any]], toml: Callable[[str], str]) -> None:
    config = Config.model_validate(values)
    assert parsed("--config", toml(to_toml(config))) == config


@settings(derandomize=True, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf"])),
    st.floats(0, exclude_min=True, allow_infinity=False),
    st.lists(st.text("ab '\"\\\n"), min_size=1, unique=True),
)
def test_to_toml_roundtrip_of_any_text_number_and_list(
    tmp_path_factory: Any, text: str, number: float, tools: list[str]
) -> None:
    values = {"run": {"dir": text}, "train": {"lr": number}, "agent": {"tools": tools}}
    config = Config.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert parsed("--config", str(path)) == config


# ---- any words at all

WORDS = st.one_of(
    st.sampled_from(
        [
            *["--config", "--resume", "-h", "--", "=", "--=", "auto", "0", "1e3", "[]", "{}"],
            *(str(QUICKSTART), *map("--{}".format, KEYS)),
        ]
    ),
    st.builds("--{}={}".format, st.sampled_from(KEYS), st.text(max_size=8)),
    # What an operating system can pass: any bytes but NUL.
    st.binary(max_size=12).map(lambda raw: os.fsdecode(raw.replace(b"\0", b""))),
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.lists(WORDS, max_size=6))
def test_any_arguments_give_a_config_or_a_user_error(argv: list[str]) -> None:
    try:
        config = parse(argv)
    except UserError as error:
        assert str(error).strip()
        assert len(str(error).splitlines()) == 1 or any(
            len(word.splitlines()) != 1 for word in argv
        )
    else:
        assert config is None or isinstance(config, Config)


# ---- configs as records and files


def test_a_config_built_in_code_refuses_unknown_keys() -> None:
    """For code that builds a config without the parser."""
    with pytest.raises(ValidationError, match="not permitted"):
        Config.model_validate({"run": {"sed": 1}})


def test_every_shipped_config_is_valid() -> None:
    anywhere = (
        "quickstart appo infoflow gameof24 verifier facts gateway tools smollm2 smollm2-agentflow"
    )
    for path in Path("configs").glob("*.toml"):
        runs_anywhere = path.stem in (*anywhere.split(), "gemma3-270m")
        engine = parsed("--config", str(path)).rollout.engine
        assert engine == ("torch" if runs_anywhere else "vllm"), path


# ---- tables that the user names


def test_a_mixture_is_a_table_in_the_file_or_an_inline_table(toml: Callable[[str], str]) -> None:
    path = toml('[tasks]\nname = "file"\n[tasks.mixture]\n"nq.parquet" = 1\n"math.parquet" = 3\n')
    assert parsed("--config", path).tasks.mixture == {"nq.parquet": 1.0, "math.parquet": 3.0}
    assert parsed("--config", path, "--tasks.mixture", '{"own.jsonl" = 2}').tasks.mixture == {
        "own.jsonl": 2.0
    }
    assert "tasks.mixture.nq.parquet=0: " in complaint(
        "--config", path, "--tasks.mixture", '{"nq.parquet" = 0}'
    )
    assert "  --tasks.mixture TABLE = {}" in help_text("x", "tasks")


def test_named_tables_come_from_file_and_command_line(toml: Callable[[str], str]) -> None:
    tables = '[engines.helper]\nmodel = "small"\n[plugins.My_Tool]\ndepth = 3'
    path = toml(f'[agent]\ntools = ["my.py:My_Tool"]\n{tables}')
    words = "--engines.helper.temperature 0.5 --engines.other.model 1.5 --plugins.My_Tool.url x.org"
    config = parsed("--config", path, *words.split())
    assert (config.engines["helper"].model, config.engines["helper"].temperature) == ("small", 0.5)
    assert config.engines["other"].model == "1.5", "text where the key wants text"
    assert config.plugins == {"My_Tool": {"depth": 3, "url": "x.org"}}
    assert parsed("--config", toml(to_toml(config))) == config


# ---- APPO


def test_appo_has_its_clips() -> None:
    algorithm = filled("--algorithm.name", "appo").algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.2, 0.28, 3.0)


# ---- policies


def test_sampling_of_a_policy_falls_back_to_the_rollout_section() -> None:
    config = parsed(
        "--roles.verifier", "own", "--policies.verifier.path", "v", "--rollout.temperature", "0.7"
    )
    assert config.policy_names == ("planner", "verifier")
    assert config.sampling_of("planner") == config.sampling_of("verifier") == (2048, 0.7)
    options = "--policies.verifier.temperature 0.5 --policies.verifier.max_new_tokens 9"
    own = parsed("--roles.verifier", "own", *options.split())
    assert (own.sampling_of("planner"), own.sampling_of("verifier")) == ((2048, 1.0), (9, 0.5))


def test_the_trained_policys_model_is_that_of_the_model_section() -> None:
    paths = "--model.path m --policies.planner.path p --policies.verifier.path v"
    words = ("--roles.verifier", "own", *paths.split())
    planner, verifier = parsed(*words), parsed(*words, "--train.policy", "verifier")
    found = (planner.path_of("planner"), planner.path_of("verifier"))
    assert found == (("model.path", "m"), ("policies.verifier.path", "v"))
    found = (verifier.path_of("planner"), verifier.path_of("verifier"))
    assert found == (("policies.planner.path", "p"), ("model.path", "m"))


def test_a_policy_beside_the_first_has_a_run_of_its_own_that_measures_nothing() -> None:
    words = "--roles.verifier own --policies.verifier.path v --policies.verifier.trained true"
    config = parsed(*f"{words} --model.path m --run.dir r --checkpoint.keep 3".split())
    assert config.trained_beside == ("verifier",)
    beside = config.beside("verifier")
    assert (beside.train.policy, beside.run.dir) == ("verifier", "r/policies/verifier")
    assert beside.path_of("verifier") == ("model.path", "v")
    assert beside.path_of("planner") == ("policies.planner.path", "m")
    assert beside.trained_beside == () and beside.checkpoint.keep == 4
    assert (beside.eval.every, beside.eval.at_ends, beside.eval.benchmarks) == (0, False, ())


# ---- batches from nodes


def test_m2po_has_wide_clips_of_its_own() -> None:
    wide = filled("--algorithm.m2po", "0.04").algorithm
    assert (wide.clip_low, wide.clip_high) == (0.95, 20.0)
    assert (
        filled("--algorithm.m2po", "0.04", "--algorithm.clip_high", "0.5").algorithm.clip_high
        == 0.5
    )
    assert (filled().algorithm.m2po, filled().algorithm.clip_high) == (None, 0.2)


def test_parse_over_puts_options_over_a_stored_config() -> None:
    """A rollout node reads the run's config so."""
    words = "--roles.verifier own --policies.verifier.path warm --vllm.max_num_seqs 3"
    config = parsed(*words.split(), "--tasks.kinds", '["chain"]')
    assert parse_over(to_toml(config), []) == config
    ours = parse_over(
        to_toml(config), ["--vllm.max_num_seqs=9", "--policies.verifier.path", "/here"]
    )
    found = (ours.vllm.max_num_seqs, ours.policies["verifier"].path, ours.tasks)
    assert found == (9, "/here", config.tasks)
    with pytest.raises(UserError, match="the config of the run: not TOML"):
        parse_over("[run", [])
    with pytest.raises(UserError, match=r"unknown key run.speed"):
        parse_over("[run]\nspeed = 1", [])


@pytest.mark.parametrize(
    "words",
    [
        ["--train.lr", "1"],
        ["--vllmx", "1"],
        ["--config", "a.toml"],
        ["--run.device", "cpu", "--run.dir=x"],
    ],
)
def test_check_allowed_refuses_all_other_options(words: list[str]) -> None:
    allowed = ("run.device", "vllm.*")
    check_allowed(["--run.device", "cpu", "--vllm.sleep", "true"], allowed)
    with pytest.raises(
        UserError,
        match=r"is fixed for the whole run and cannot be set here; options that can: run.device, "
        r"vllm.\*",
    ):
        check_allowed(words, allowed)
