"""Checkpoints: exact, whole or absent, and readable by transformers."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import random_samples
from checkpoints import save, saved_state
from flowkernels import LossSpec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from flowtrain.inference.factory import ModelSpec
from flowtrain.inference.requests import stop_ids
from flowtrain.records import Sample, UserError
from flowtrain.trainer import checkpoint, toy
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import PackedRow, pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer

ALONE = World(0, 1, torch.device("cpu"))
STATE = "state/shard-00001-model-00001-of-00001.safetensors"
"""The file of a lone rank."""
MakeSamples = Callable[..., list[Sample]]


class Setup:
    """A trainer in fp32 and the checkpoints it writes."""

    def __init__(
        self, model_path: str, root: Path, world: World, make_samples: MakeSamples
    ) -> None:
        self.root, self.world, self.make_samples, self.model_path = (
            root,
            world,
            make_samples,
            model_path,
        )
        self.tokenizer = models.load_tokenizer(model_path)
        self.trainer = self.new_trainer()

    def new_trainer(self, model: Any = None) -> Trainer:
        model = models.load_model(self.model_path, torch.float32) if model is None else model
        return Trainer(model, self.world, LossSpec(), OptimSpec(lr=1e-2))

    def rows(self, seed: int) -> list[list[PackedRow]]:
        return [pack_rows(self.make_samples(4, seed=seed), 4)]

    def save(self, step: int, keep: int = 10, **state: int) -> Path:
        return save(
            self.root, step, self.trainer, self.tokenizer, self.world, state=state, keep=keep
        )

    def restored(self, path: Path) -> Trainer:
        """A new trainer whose weights are nothing like the saved ones, restored."""
        trainer = self.new_trainer()
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(1.0)
        checkpoint.restore(path, trainer.model, trainer.optimizer, ALONE)
        return trainer

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def setup(tiny_path: str, tmp_path: Path, alone: World) -> Setup:
    return Setup(tiny_path, tmp_path / "checkpoints", alone, random_samples)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and moments by name."""
    tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for name, state in trainer.optimizer.state.items():
        tensors.update({f"{name}/{key}": value.clone() for key, value in state.items()})
    return tensors


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name


def test_restore_is_exact_and_so_are_the_steps_after_it(setup: Setup) -> None:
    for seed in range(3):
        setup.trainer.step(setup.rows(seed))
    restored = setup.restored(setup.save(3))
    assert_same(everything(restored), everything(setup.trainer))
    assert sum("/exp_avg" in name for name in everything(restored)) > 20
    for seed in (3, 4):
        assert restored.step(setup.rows(seed)) == setup.trainer.step(setup.rows(seed))
        assert_same(everything(restored), everything(setup.trainer))


def test_saving_changes_nothing(setup: Setup) -> None:
    """Not even before the first step, when there are no moments yet."""
    other = setup.new_trainer()
    for seed in range(2):
        restored = setup.restored(setup.save(seed))
        for trainer in (setup.trainer, other, restored):
            trainer.step(setup.rows(seed))
        assert_same(everything(setup.trainer), everything(other))
        assert_same(everything(restored), everything(other))


def test_the_hyper_parameters_are_those_of_the_config(setup: Setup) -> None:
    """A run may be resumed with another learning rate."""
    setup.trainer.step(setup.rows(0))
    path = setup.save(1)
    trainer = Trainer(
        models.load_model(setup.model_path, torch.float32),
        setup.world,
        LossSpec(),
        OptimSpec(lr=0.5, weight_decay=0.25),
    )
    checkpoint.restore(path, trainer.model, trainer.optimizer, ALONE)
    groups = trainer.optimizer.param_groups
    assert {group["lr"] for group in groups} == {0.5}
    assert sorted(group["weight_decay"] for group in groups) == [0, 0.25]


def test_transformers_loads_the_folder(setup: Setup) -> None:
    setup.trainer.step(setup.rows(0))
    path = setup.save(1) / "model"
    ids = torch.arange(20)[None]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    setup.trainer.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert model.dtype == torch.float32
        assert torch.equal(model(ids).logits, setup.trainer.model.eval()(ids).logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (
        models.load_model(str(path), torch.float32).config.eos_token_id
        == setup.tokenizer.eos_token_id
    )


def test_the_tokenizer_comes_back_as_it_was(setup: Setup) -> None:
    """With the rules it was made with, and no token that the model does not have."""
    texts = [
        "What is the capital of Chad?",
        "12345 + 67",
        "Ωmega, a\u0301 and é",
        " a  b\n\nc\t",
        "<|endoftext|>",
    ]
    made = toy.new_tokenizer(texts, vocab_size=270)
    path = setup.root / "model"
    model = toy.new_model(made, 16, 1, 2, max_positions=8)
    models.export(model, made, models.full_weights(model), path)
    loaded = models.load_tokenizer(str(path))
    assert loaded.get_vocab() == made.get_vocab() and len(loaded) == model.config.vocab_size
    assert (loaded.eos_token_id, loaded.pad_token_id) == (made.eos_token_id, made.pad_token_id)
    others = AutoTokenizer.from_pretrained(path)
    assert others.get_vocab() == made.get_vocab()
    for text in texts:
        assert loaded(text).input_ids == others(text).input_ids == made(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text


def test_a_plain_tokenizer_beside_a_qwen2_model_stays_plain(setup: Setup) -> None:
    """AutoTokenizer would put the class of the model's family in its place."""
    made = toy.new_tokenizer(["a\u0301 and é"], vocab_size=270)
    made.save_pretrained(setup.root)
    Qwen2Config(vocab_size=270).save_pretrained(setup.root)
    loaded = models.load_tokenizer(str(setup.root))
    assert loaded.get_vocab() == made.get_vocab()
    assert loaded("a\u0301").input_ids == made("a\u0301").input_ids


def test_the_state_of_the_loop_is_kept(setup: Setup) -> None:
    path = setup.save(12, cursor=96, version=12)
    assert checkpoint.load_state(path) == {"step": 12, "cursor": 96, "version": 12}


def test_the_newest_are_kept(setup: Setup) -> None:
    for step in (1, 2, 9, 10, 100):
        setup.save(step, keep=2)
    assert setup.names() == ["step_00000010", "step_00000100"]
    assert checkpoint.latest(setup.root) == setup.root / "step_00000100"


def test_without_a_checkpoint_there_is_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "never made") is None


def test_saving_a_step_again_replaces_it(setup: Setup) -> None:
    """A resumed run gets to the same step once more."""
    setup.save(1, cursor=1)
    setup.trainer.step(setup.rows(0))
    path = setup.save(1, cursor=2)
    assert checkpoint.load_state(path)["cursor"] == 2
    assert_same(everything(setup.restored(path)), everything(setup.trainer))
    assert setup.names() == ["step_00000001"]


def test_an_interrupted_write_is_ignored_and_then_replaced(setup: Setup) -> None:
    """A killed process leaves a partial folder under the temporary name."""
    path = setup.save(1)
    left_over = setup.root / "step_00000002.writing"
    left_over.mkdir()
    (left_over / "model").mkdir()
    (left_over / "model" / "model.safetensors").write_bytes(b"half")
    (left_over / "no_such_file.bin").write_bytes(b"")
    assert checkpoint.latest(setup.root) == path
    setup.trainer.step(setup.rows(0))
    whole = setup.save(2)
    assert setup.names() == ["step_00000001", "step_00000002"]
    assert checkpoint.latest(setup.root) == whole
    assert not (whole / "no_such_file.bin").exists()
    assert_same(everything(setup.restored(whole)), everything(setup.trainer))


def test_what_killed_runs_left_of_other_steps_goes_with_the_next_save(setup: Setup) -> None:
    setup.save(2)
    for step in (1, 2, 4, 9):
        (setup.root / f"step_{step:08d}.writing" / "model").mkdir(parents=True)
    setup.save(3)
    assert setup.names() == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: disk full")],
)
def test_a_full_disk_leaves_no_half_checkpoint(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = setup.save(1)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(models, "save_file", fail)
    with pytest.raises(UserError, match=r"cannot write .*; (free|check)"):
        setup.save(2, keep=1)
    assert setup.names() == ["step_00000001"] and checkpoint.latest(setup.root) == path


@pytest.mark.parametrize(("hidden_size", "num_layers"), [(32, 3), (32, 1), (16, 2)])
def test_a_checkpoint_of_another_model_is_refused(
    setup: Setup, hidden_size: int, num_layers: int
) -> None:
    path = setup.save(1)
    other = toy.new_model(setup.tokenizer, hidden_size, num_layers, num_heads=4, max_positions=64)
    trainer = setup.new_trainer(other)
    before = everything(trainer)
    told = r"step_00000001 holds another model: \['.*model\.layers\.\d"
    with pytest.raises(UserError, match=told):
        checkpoint.restore(path, trainer.model, trainer.optimizer, ALONE)
    assert_same(everything(trainer), before)


def test_a_checkpoint_that_lacks_the_embedding_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = setup.save(1), checkpoint._saved_sizes
    monkeypatch.setattr(
        checkpoint,
        "_saved_sizes",
        lambda path: {
            n: x for n, x in sizes(path).items() if n != "model.model.embed_tokens.weight"
        },
    )
    with pytest.raises(UserError, match="another model"):
        checkpoint.restore(path, setup.trainer.model, setup.trainer.optimizer, ALONE)


def test_a_tied_head_is_written_once(setup: Setup) -> None:
    path = setup.save(1)
    assert "lm_head.weight" not in load_file(path / "model" / "model.safetensors")
    assert not any("lm_head" in name for name in saved_state(path))
    assert json.loads((path / "model" / "config.json").read_text())["tie_word_embeddings"] is True


# ---- what others read


def test_the_models_folder_is_a_models_and_nothing_else(setup: Setup) -> None:
    """vLLM reads every *.safetensors in it, so the optimizer's must lie elsewhere."""
    setup.trainer.step(setup.rows(0))
    path = setup.save(1)
    assert sorted(each.name for each in path.iterdir()) == ["model", "state"]
    names = {each.name for each in (path / "model").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    own = {name for name, _ in setup.trainer.model.named_parameters()}
    assert set(load_file(path / "model" / "model.safetensors")) == own


def test_every_token_that_ends_a_response_is_kept(setup: Setup) -> None:
    """A chat model ends with another token than its tokenizer names."""
    setup.trainer.model.generation_config.eos_token_id = [0, 5]
    setup.trainer.model.generation_config.temperature = 0.6  # without sampling, as many have it
    path = setup.save(1) / "model"
    spec = ModelSpec.load("model.path", str(path))
    assert stop_ids(spec.generation, spec.tokenizer) == {0, 5}
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id == [0, 5]


def test_the_chat_template_is_kept(setup: Setup) -> None:
    setup.tokenizer.chat_template = "{{ messages[0].content }}"
    path = setup.save(1) / "model"
    assert AutoTokenizer.from_pretrained(path).chat_template == setup.tokenizer.chat_template


def test_the_model_is_in_the_dtype_of_the_run_and_the_state_in_fp32(setup: Setup) -> None:
    setup.trainer.step(setup.rows(0))
    trainer = setup.trainer
    path = save(setup.root, 1, trainer, setup.tokenizer, ALONE, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert model.dtype == torch.bfloat16
    ours = dict(trainer.model.named_parameters())
    for name, weight in load_file(path / "model" / "model.safetensors").items():
        assert torch.equal(weight, ours[name].to(torch.bfloat16))
    assert_same(everything(setup.restored(path)), everything(trainer))


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "step_00000003"
    old.mkdir()
    for name in ("config.json", "model.safetensors", "optimizer.safetensors", "state.json"):
        (old / name).write_text("{}")
    told = r"step_00000003 has the layout of an older .*--model\.path"
    with pytest.raises(UserError, match=told):
        checkpoint.settle(tmp_path)
    assert (old / "model.safetensors").exists()


# ---- beside training


def test_training_goes_on_while_a_checkpoint_is_written(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it changes meanwhile is not in the checkpoint."""
    may_write, write, saved = threading.Event(), checkpoint._save, []

    def wait_and_write(*arguments: Any) -> None:
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "_save", wait_and_write)
    trainer = setup.trainer
    trainer.step(setup.rows(0))
    before = everything(trainer)
    checkpoints = checkpoint.Checkpoints(setup.root, ALONE, keep=1)
    model, optimizer = trainer.model, trainer.optimizer
    checkpoints.save(
        1,
        model,
        setup.tokenizer,
        optimizer,
        {},
        dtype=torch.float32,
        on_saved=lambda: saved.append(1),
    )
    trainer.step(setup.rows(1))
    assert checkpoint.latest(setup.root) is None and checkpoints.oldest_step == 0 and not saved
    may_write.set()
    checkpoints.close()
    assert checkpoints.oldest_step == 1 and saved == [1]
    path = checkpoint.latest(setup.root)
    assert_same(everything(setup.restored(path)), before)
    weights = load_file(path / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], before[name]) for name in weights)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_later(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_save", fail)
    trainer, tokenizer = setup.trainer, setup.tokenizer
    checkpoints = checkpoint.Checkpoints(setup.root, ALONE, keep=1)
    checkpoints.save(1, trainer.model, tokenizer, trainer.optimizer, {}, dtype=torch.float32)
    checkpoints._thread.submit(lambda: None).result()
    assert checkpoints.has_failed and not setup.names()
    with pytest.raises(UserError, match="No space left on device; free some space"):
        checkpoints.save(2, trainer.model, tokenizer, trainer.optimizer, {}, dtype=torch.float32)
    checkpoints.close()


# ---- damage


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List what flowtrain logged, and not torch.distributed.checkpoint."""
    return [each.getMessage() for each in caplog.records if each.name.startswith("flowtrain")]


def test_a_checkpoint_cut_at_any_byte_is_passed_over_for_the_one_before(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """Every file, cut at its ends and at some places between."""
    setup.trainer.step(setup.rows(0))
    before = setup.save(1)
    newest = setup.save(2)
    assert checkpoint.latest(setup.root) == newest and not said(caplog)
    cuts = 0
    for path in sorted(each for each in newest.rglob("*") if each.is_file()):
        data = path.read_bytes()
        for size in {0, 1, len(data) // 3, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:size])
            assert checkpoint.latest(setup.root) == before, (path.name, size)
            cuts += 1
        path.unlink()
        assert checkpoint.latest(setup.root) == before, path.name
        path.write_bytes(data)
    assert cuts >= 20 and checkpoint.latest(setup.root) == newest
    assert said(caplog) and all(f"skipping checkpoint {newest}" in text for text in said(caplog))


@pytest.mark.parametrize(
    "name", ["state/state.json", STATE, "model/model.safetensors", "model/tokenizer.json"]
)
def test_a_flipped_bit_anywhere_is_seen(setup: Setup, name: str) -> None:
    setup.trainer.step(setup.rows(0))
    before, newest = setup.save(1), setup.save(2, cursor=7)
    data = bytearray((newest / name).read_bytes())
    for at in range(0, len(data), max(1, len(data) // 25)):
        data[at] ^= 1
        (newest / name).write_bytes(data)
        assert checkpoint.latest(setup.root) == before, at
        data[at] ^= 1
    (newest / name).write_bytes(data)
    assert checkpoint.latest(setup.root) == newest and checkpoint.load_state(newest) == {
        "step": 2,
        "cursor": 7,
    }


def test_with_every_checkpoint_damaged_there_is_none(setup: Setup) -> None:
    for step in (1, 2):
        (setup.save(step) / STATE).unlink()
    assert checkpoint.latest(setup.root) is None


def test_a_damaged_one_that_was_passed_over_does_not_count_as_kept(setup: Setup) -> None:
    for step in (40, 50):
        path = setup.save(step)
    (path / STATE).unlink()
    found = checkpoint.settle(setup.root)
    assert found == setup.root / "step_00000040"
    assert setup.names() == ["step_00000040", "step_00000050.damaged"]
    setup.save(45, keep=1)
    assert setup.names() == ["step_00000045", "step_00000050.damaged"]
    assert checkpoint.settle(setup.root) == setup.root / "step_00000045"


def test_one_that_was_about_to_replace_another_is_put_in_its_place(setup: Setup) -> None:
    """Killed after the old one of the same step was deleted, in part or as a whole."""
    setup.save(1)
    path = setup.save(2, cursor=7)
    scratch = path.rename(path.with_suffix(".writing"))
    path.mkdir()
    (path / "model").mkdir()
    assert checkpoint.latest(setup.root) == scratch
    assert checkpoint.settle(setup.root) == path and checkpoint.load_state(path)["cursor"] == 7
    assert setup.names() == ["step_00000001", "step_00000002"]


def test_where_none_is_whole_the_run_does_not_begin_again(setup: Setup) -> None:
    assert checkpoint.settle(setup.root) is None
    (setup.save(1) / "state" / "state.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .*checkpoints is complete; restore one"):
        checkpoint.settle(setup.root)
    assert setup.names() == ["step_00000001"]
