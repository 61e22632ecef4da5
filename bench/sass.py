"""Instructions of an NVIDIA GPU, read from the output of its disassembler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    opcode: str
    """With its suffixes, as LDG.E.128."""
    written: frozenset[str]
    read: frozenset[str]
    target: int | None
    """Address that a branch goes to."""
    where: tuple[str, int] | None
    """(file, line) of the source, or None."""

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def num_bytes(self) -> int:
        """Bytes that a thread moves, for what reads or writes memory."""
        return memory_bytes(self.opcode)


def memory_bytes(opcode: str) -> int:
    for suffix, size in (
        (".128", 16),
        (".64", 8),
        (".U16", 2),
        (".S16", 2),
        (".U8", 1),
        (".S8", 1),
    ):
        if suffix in opcode:
            return size
    return 4


_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\b(U?R)(\d+)((?:\.\w+)*)")
_NO_RESULT = {"STG", "STS", "STL", "BRA", "EXIT", "BAR", "RED", "ST", "NOP", "WARPSYNC", "MEMBAR"}


def parse(text: str) -> list[Instruction]:
    """The instructions of a kernel, from `nvdisasm -c -g`."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: list[tuple[int, str, str, tuple[str, int] | None]] = []
    where = None
    for line in text.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif source := _LINE.search(line):
            where = (source[1], int(source[2]))
        elif match := _INSTRUCTION.search(line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            found.append((address, match[3], match[4], where))
    return [_instruction(*parts, labels) for parts in found]


def _instruction(
    address: int, opcode: str, operands: str, where: tuple[str, int] | None, labels: dict[str, int]
) -> Instruction:
    kind = opcode.partition(".")[0]
    jump = re.search(r"\(?(\.L_x_\d+)\)?", operands) if kind in ("BRA", "BSSY") else None
    parts = operands.split(",")
    results = [] if kind in _NO_RESULT else parts[:1]
    written = {
        f"{bank}{int(number) + i}"
        for part in results
        for bank, number, _ in _REGISTER.findall(part)
        for i in range(_result_width(opcode))
    }
    read = {
        f"{bank}{int(number) + i}"
        for part in parts[len(results) :]
        for bank, number, suffixes in _REGISTER.findall(part)
        for i in range(_source_width(kind, part, opcode, suffixes))
    }
    return Instruction(
        address,
        opcode,
        frozenset(written),
        frozenset(read),
        labels.get(jump[1]) if jump and kind == "BRA" else None,
        where,
    )


def _result_width(opcode: str) -> int:
    kind = opcode.partition(".")[0]
    if kind in ("LDG", "LDS", "LDL", "LD", "LDC", "ULDC"):
        return max(1, memory_bytes(opcode) // 4)
    return 2 if ".WIDE" in opcode else 1


def _source_width(kind: str, part: str, opcode: str, suffixes: str) -> int:
    if ".64" in suffixes:
        return 2
    if kind in ("STG", "STS", "STL", "ST") and "[" not in part:
        return max(1, memory_bytes(opcode) // 4)
    return 1


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a compiled kernel, by the disassembler in Triton's wheel."""
    program = Path(triton.backends.nvidia.__path__[0]) / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", "-g", file.name], capture_output=True, text=True, check=True
        )
    return parse(done.stdout)
