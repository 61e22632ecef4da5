"""Damaged weight stores: a reader loads the weights that were published, or refuses in words."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from flowtrain.weights import Publisher, PublishOptions, StoreError, WeightReader, WeightStore
from flowtrain.weights.format.files import seal
from tests.attacks.tally import Tally
from tests.weights.weight_samples import chain, empty_like, same_bits

NUM_VERSIONS = 12
NUM_STORES = 80
TEXTS = ("", "-1\n", "9" * 5000, "12 ", "../../v1", "\0", "0x0c", "\ufeff12", "1e1", "12\n13")
JUNK: tuple[Any, ...] = (
    *(None, -1, 0, 2**70, 1.5, True, "", "../../../etc/passwd", "/dev/zero", "a" * 5000),
    *([], {}, [[]], {"a": 1}, ["../x"], "0" * 16),
)


@pytest.fixture(scope="module", params=[1, 2], ids=["level 1", "level 2"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = WeightStore(tmp_path_factory.mktemp("published") / "weights")
    publisher = Publisher(store, PublishOptions(level=request.param))
    for version in range(1, NUM_VERSIONS + 1):
        publisher.publish(chain(version), version)
    return store.root


@dataclass(frozen=True)
class Damage:
    """Ways to damage a store; each takes a random number generator alone."""

    root: Path
    rng: random.Random

    def any_file(self, pattern: str = "*/*") -> Path:
        return self.rng.choice(sorted(path for path in self.root.glob(pattern) if path.is_file()))

    def flip(self) -> None:
        path = self.any_file()
        data = bytearray(path.read_bytes())
        for _ in range(self.rng.choice((1, 1, 9))):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)

    def flip_and_seal(self) -> None:
        """As somebody does who knows the checksums of files."""
        path = self.any_file("*/*.safetensors")
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)
        self._reseal(path)

    def cut(self) -> None:
        path = self.any_file()
        os.truncate(path, self.rng.randrange(path.stat().st_size))

    def cut_and_seal(self) -> None:
        path = self.any_file("*/*.safetensors")
        os.truncate(path, self.rng.randrange(1, path.stat().st_size))
        self._reseal(path)

    def grow(self) -> None:
        with self.any_file().open("ab") as file:
            file.write(self.rng.randbytes(self.rng.randrange(1, 99)))

    def delete(self) -> None:
        self.any_file().unlink()

    def delete_folder(self) -> None:
        shutil.rmtree(self.rng.choice(sorted(self.root.glob("v*"))))

    def swap(self) -> None:
        one, other = self.any_file("*/*.safetensors"), self.any_file("*/*.safetensors")
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    def swap_folders(self) -> None:
        one, other = self.rng.sample(sorted(self.root.glob("v*")), 2)
        one.rename(self.root / "x")
        other.rename(one)
        (self.root / "x").rename(other)

    def link_away(self) -> None:
        path = self.any_file()
        path.unlink()
        path.symlink_to(
            self.rng.choice(("/etc/passwd", "/dev/null", "/dev/zero", "nowhere", str(path)))
        )

    def make_folder(self) -> None:
        path = self.any_file()
        path.unlink()
        path.mkdir()

    def head(self) -> None:
        (self.root / "HEAD").write_text(self.rng.choice(TEXTS))

    def manifest(self) -> None:
        """Put junk in place of a leaf or a branch."""
        path = self.any_file("*/manifest.json")
        text = path.read_text()
        record = json.loads(text)
        node: Any = record
        while True:
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            key = self.rng.choice(keys)
            if self.rng.random() < 0.4 or not isinstance(node[key], dict | list) or not node[key]:
                break
            node = node[key]
        if self.rng.random() < 0.3:
            del node[key]
        else:
            node[key] = self.rng.choice(JUNK)
        path.write_text(json.dumps(record))

    def deep_manifest(self) -> None:
        self.any_file("*/manifest.json").write_text("[" * 10**5)

    def _reseal(self, path: Path) -> None:
        """Write the file's new size and checksum into its manifest."""
        file = seal(path)
        manifest = path.with_name("manifest.json")
        record = json.loads(manifest.read_text())
        for found in _records(record, path.name):
            found |= {"num_bytes": file.num_bytes, "xxh3": file.xxh3}
        manifest.write_text(json.dumps(record))


def _records(node: Any, name: str) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("name") == name:
            yield node
        for each in node.values():
            yield from _records(each, name)
    elif isinstance(node, list):
        for each in node:
            yield from _records(each, name)


WAYS: tuple[Callable[[Damage], None], ...] = tuple(
    way for name, way in vars(Damage).items() if callable(way) and not name.startswith(("_", "any"))
)


def test_a_reader_loads_what_was_published_or_refuses(
    published: Path, campaign: Iterator[int], tally: Tally, tmp_path: Path
) -> None:
    for seed in campaign:
        rng = random.Random(seed)
        through, num_loaded = [], 0
        for number in range(NUM_STORES):
            root = tmp_path / "copy"
            shutil.copytree(published, root, symlinks=True)
            store, own = WeightStore(root), empty_like(chain(1))
            reader, before = WeightReader(store, own), rng.randrange(1, NUM_VERSIONS)
            reader.load(before)
            ways = [rng.choice(WAYS) for _ in range(rng.choice((1, 1, 2)))]
            for way in ways:
                try:
                    way(Damage(root, rng))
                except (OSError, ValueError, IndexError, RecursionError):  # too damaged before
                    continue
            target = rng.randrange(before + 1, NUM_VERSIONS + 1)
            try:
                reader.load(target)
                num_loaded += 1
                is_right = reader.version == target
            except (StoreError, SafetensorError, OSError):
                is_right = reader.version != target
            # None: it says itself that what it holds is no version
            is_right &= reader.version is None or same_bits(own, chain(reader.version))
            if not is_right:
                through.append((number, before, target, [way.__name__ for way in ways]))
            shutil.rmtree(root)
        tally.add("damaged stores", NUM_STORES, len(through))
        assert not through
        assert 0 < num_loaded < NUM_STORES, "some damage does not matter, most does"
