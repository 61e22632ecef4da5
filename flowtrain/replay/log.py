"""Files that a run keeps with `log.replay`, so that `python -m flowtrain.replay` can make it again.

    replay/steps.jsonl                            a line per step, and one where the run was opened
    replay/config.step_00000000.toml              the options from that step on
    replay/step_00000007/rollouts.rank0.z         what rank 0 trained from: its groups, and the
                                                  log-probs of a search for branch points, in the
                                                  dataflow's codec and zlib's
    replay/step_00000007/batch.rank0.json         digests of the batch that it made of them

A line has the SHA-256 of the step's files, the digests of its version's tensors, and a chain: the
SHA-256 of the line and of the chain of the line before, so none can be changed alone. The line is
written last, before the step is in any other log: one that is there was written as a whole.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.logging import RunDir
from flowtrain.logging.jsonl import append_lines, cut_lines, read_lines
from flowtrain.records import Group, Rollouts, SampleId, Scored, TrainBatch, UserError
from flowtrain.replay.batch_digests import digests_of
from flowtrain.rollouts.codec import decoded, encoded, pack, unpack
from flowtrain.rollouts.contract import Refused
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.files import make_folder, remove, replace_file, writing
from flowtrain.weights import WeightStore
from flowtrain.weights.format.manifest import Manifest, digest_hex
from flowtrain.weights.ranks import on_all_ranks

_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Kept:
    groups: tuple[bytes | Group, ...]
    """As `encoded` returns them, or the prompts of a long rollout would be written again with every
    turn; older logs have whole groups."""
    logprobs: tuple[tuple[SampleId, Scored], ...]


class ReplayLog:
    """Writes the replay log of a run; does nothing without `log.replay`."""

    def __init__(
        self, run_dir: RunDir, config: Config, placement: Placement, start_step: int
    ) -> None:
        """Go on after `start_step`, whose version is in the store; collective. Later steps go."""
        self._folder, self._is_on = run_dir.replay, config.log.replay
        self._store, self._placement = WeightStore(run_dir.weights), placement
        self._chain = ""

        def begin() -> None:
            if placement.world.is_main:
                self._begin(config, start_step)

        on_all_ranks(placement.world, begin, other_failed=UserError)

    def keep(self, step: int, rollouts: Rollouts, batch: TrainBatch) -> dict[str, float]:
        """Write a step down once its version is published; collective.

        Returns the metrics `replay_log_s` and `replay_log_bytes`, or nothing without `log.replay`.
        """
        if not self._is_on:
            return {}
        started, world = time.monotonic(), self._placement.world
        files = on_all_ranks(
            world, lambda: self._write(step, rollouts, batch), other_failed=UserError
        )
        texts = world.gather_text(json.dumps(files))
        all_files = {name: file for text in texts for name, file in json.loads(text).items()}

        def append() -> None:
            if world.is_main:
                self._append(step, {"files": all_files})

        # After the files of all ranks: a line stands for a step that is there as a whole.
        on_all_ranks(world, append, other_failed=UserError)
        num_bytes = sum(file["num_bytes"] for file in all_files.values())
        return {"replay_log_s": time.monotonic() - started, "replay_log_bytes": num_bytes}

    def _begin(self, config: Config, start_step: int) -> None:
        """Remove what is after `start_step` and write down with which options the run goes on."""
        path = self._folder / "steps.jsonl"
        cut_lines(path, start_step or -1)
        with writing(self._folder):
            for folder in self._folder.glob("step_????????"):
                if int(folder.name[5:]) > start_step:
                    remove(folder)
        if not self._is_on:
            return
        toml = to_toml(config).encode()
        with writing(self._folder):
            make_folder(self._folder)
            replace_file(config_path(self._folder, start_step), toml)
        for line in read_lines(path) if path.exists() else ():
            self._chain = line["chain"]
        machine = {"torch": torch.__version__, "device": self._placement.world.device.type}
        sha256 = hashlib.sha256(toml).hexdigest()
        threads = torch.get_num_threads()
        self._append(start_step, {"opened": {"config": sha256, "threads": threads, **machine}})

    def _write(self, step: int, rollouts: Rollouts, batch: TrainBatch) -> dict[str, Any]:
        """Write this rank's files of a step; returns size and SHA-256 by name."""
        folder, rank = step_folder(self._folder, step), self._placement.world.rank
        text = json.dumps(digests_of(batch), separators=(",", ":"))
        files = {rollouts_name(rank): encode(rollouts), batch_name(rank): text.encode()}
        with writing(folder):
            make_folder(folder)
            for name, data in files.items():
                replace_file(folder / name, data)
        return {
            name: {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        }

    def _append(self, step: int, facts: Mapping[str, Any]) -> None:
        """Append a line with `facts`, the ranks, and the digests of the step's version."""
        placement = self._placement
        ranks = {"num_ranks": placement.world.size, "num_trainers": placement.trainers.size}
        line = {"step": step, **facts, **ranks, **version_record(self._store.manifest(step))}
        self._chain = chained(self._chain, line)
        append_lines(self._folder / "steps.jsonl", [{**line, "chain": self._chain}])


def encode(rollouts: Rollouts) -> bytes:
    """Return a rank's rollouts as bytes; the metrics are left out."""
    record = _Kept(tuple(map(encoded, rollouts.groups)), tuple(rollouts.logprobs.items()))
    return zlib.compress(pack(record), _LEVEL)


def decode(data: bytes) -> Rollouts:
    """Return the rollouts of `encode`. Raises UserError when the bytes are none."""
    try:
        record = unpack(zlib.decompress(data), _Kept)
        groups = tuple(
            decoded(group, sys.maxsize) if isinstance(group, bytes) else group
            for group in record.groups
        )
    except (zlib.error, Refused) as error:
        raise UserError(f"the rollouts of a step cannot be read: {error}") from error
    return Rollouts(groups, dict(record.logprobs), {})


def version_record(manifest: Manifest) -> dict[str, Any]:
    """Return the digests of a version by tensor, and the hash of them all."""
    tensors = {name: digest_hex(digest) for name, digest in manifest.digests.items()}
    return {"root": manifest.root, "tensors": tensors}


def chained(previous: str, line: Mapping[str, Any]) -> str:
    """Return the chain of a line: the SHA-256 of it, without its chain, and of the one before."""
    plain = {key: value for key, value in line.items() if key != "chain"}
    return hashlib.sha256(f"{previous}{json.dumps(plain, sort_keys=True)}".encode()).hexdigest()


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's files."""
    return folder / f"step_{step:08d}"


def rollouts_name(rank: int) -> str:
    """Return the name of the file of a rank's rollouts in the folder of a step."""
    return f"rollouts.rank{rank}.z"


def batch_name(rank: int) -> str:
    """Return the name of the file of the digests of a rank's batch in the folder of a step."""
    return f"batch.rank{rank}.json"


def config_path(folder: Path, start_step: int) -> Path:
    """Return the file of the options with which a run began or went on after `start_step`."""
    return folder / f"config.step_{start_step:08d}.toml"
