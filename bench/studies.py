"""The arms of the studies of learning: options of each beside the quickstart's.

Steps differ because the tokens of a step do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Study = Mapping[str, Sequence[str]]
"""Options by arm; the first is what the others are compared with."""


def _words(text: str) -> list[str]:
    return text.split()


_APPO = _words("--algorithm.name appo --appo.num_roots 4 --appo.spacing 4 --train.num_steps 75")
_DEEP = [
    *_words("--tasks.num_train 8000 --agent.max_turns 6 --agent.eval_max_turns 6"),
    *("--tasks.kinds", '["sum4", "sum5"]'),
]
_LORA = _words("--train.num_steps 80")
_QWEN3_MOE = _words("--train.num_steps 60 --tiny.family qwen3_moe")
_QWEN3_5 = _words("--train.num_steps 60 --tiny.family qwen3_5")
_BF16 = _words("--model.dtype bfloat16")
_OWN_ROUTES = [*_QWEN3_MOE, *_words("--train.router own")]
_FORKED = [
    *_DEEP,
    *_words("--eval.at_ends false --eval.every 4 --rollout.num_questions 8 --train.lr 3e-4"),
]
_DEEP_APPO = [*_FORKED, *_APPO[:-1], "30"]

STUDIES: Mapping[str, Study] = {
    "appo": {
        "flow_grpo": ["--train.num_steps", "60"],
        "appo": [*_APPO, "--appo.rule", "score"],
        "appo, no future": [*_APPO, "--appo.rule", "score", "--appo.future_coef", "0"],
        "appo, single group": [*_APPO, "--appo.advantage_groups", "single"],
        "entropy": [*_APPO, "--appo.rule", "entropy"],
        "arpo": [*_APPO, "--appo.rule", "arpo"],
    },
    "relatives": {
        "flow_grpo": ["--train.num_steps", "60"],
        **{
            name: ["--train.num_steps", "60", "--algorithm.name", name]
            for name in ("dr_grpo", "dapo", "rloo", "reinforce_plus_plus")
        },
    },
    "branching": {
        "flow_grpo": [*_FORKED, "--train.num_steps", "24"],
        "appo": [*_DEEP_APPO, "--appo.gamma", "1"],
        "appo, gamma 0.99": [*_DEEP_APPO, "--appo.gamma", "0.99"],
        "entropy": [*_DEEP_APPO, "--appo.rule", "entropy"],
        "random": [*_DEEP_APPO, "--appo.rule", "random"],
        "arpo": [*_DEEP_APPO, "--appo.rule", "arpo"],
        "appo, no future": [*_DEEP_APPO, "--appo.gamma", "1", "--appo.future_coef", "0"],
        "appo, single group": [
            *_DEEP_APPO,
            "--appo.gamma",
            "1",
            *_words("--appo.advantage_groups single"),
        ],
    },
    "lora": {
        "all weights": ["--train.num_steps", "80"],
        "LoRA, rank 8": [*_LORA, *_words("--train.lr 2e-3 --lora.rank 8 --lora.alpha 16")],
    },
    "experts": {
        "qwen3": ["--train.num_steps", "60"],
        "qwen3_moe": _QWEN3_MOE,
        "qwen3_moe, own routes": _OWN_ROUTES,
        "qwen3_moe, bf16": [*_QWEN3_MOE, *_BF16],
        "qwen3_moe, own routes, bf16": [*_OWN_ROUTES, *_BF16],
        "gpt_oss": _words("--train.num_steps 60 --tiny.family gpt_oss"),
        "qwen3_5": _QWEN3_5,
        "qwen3_5, bf16": [*_QWEN3_5, *_BF16],
    },
    "infoflow": {
        "flow_grpo": [*_DEEP, "--train.num_steps", "200"],
        "infoflow, no hints": [
            *_DEEP,
            *_words("--train.num_steps 80 --algorithm.name infoflow --infoflow.hint_rate 0"),
        ],
        "infoflow": [
            *_DEEP,
            *_words("--train.num_steps 80 --algorithm.name infoflow --infoflow.hint_turn 1"),
        ],
    },
}
"""appo: APPO and its rivals on the quickstart's questions. branching: the same on questions of 4
and 5 turns, with random places as a control. lora: an adapter against all weights, on the
quickstart's questions. experts: families of `tiny.family`, routes replayed or the trainer's own.
infoflow: on those of 4 and 5 turns. relatives: GRPO's, on the quickstart's.
"""
