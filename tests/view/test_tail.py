"""A log that grows, is cut and is replaced between reads: what was read is what is there."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.view.tail import Line, Tail

ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 120)),
    st.tuples(st.just("cut"), st.integers(0, 300)),
    st.tuples(st.just("replace"), st.just(0)),
    st.tuples(st.just("read"), st.just(0)),
)


def line(number: int) -> bytes:
    """Some longer, some beyond ASCII, some no record at all; no two alike."""
    if number % 7 == 3:
        return f"torn {number}\n".encode()
    text = "é" * (number % 5)
    return (
        json.dumps({"step": number // 3, "n": number, "x": text}, ensure_ascii=False).encode()
        + b"\n"
    )


def whole(path: Path) -> list[Line]:
    """What a reader that begins now finds."""
    return Tail(path).read().lines


@given(st.lists(ACTIONS, max_size=40), st.integers(1, 200))
def test_any_split_gives_the_records_that_are_there(
    actions: list[tuple[str, int]], most_bytes: int
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.touch()
        tail, found = Tail(path, most_bytes), list[Line]()
        number, ahead = 0, b""

        def read() -> None:
            nonlocal found
            has_more = True
            while has_more:
                news = tail.read()
                found = [*([] if news.is_restart else found), *news.lines]
                has_more = news.has_more

        for action, size in actions:
            if action == "append":
                while len(ahead) < size:
                    ahead, number = ahead + line(number), number + 1
                with path.open("ab") as file:
                    file.write(ahead[:size])
                ahead = ahead[size:]
            elif action == "cut":
                with path.open("rb+") as file:
                    file.truncate(max(path.stat().st_size - size, 0))
                ahead = b""
            elif action == "replace":
                new = path.with_name("new")
                new.write_bytes(line(number))
                new.rename(path)
                number, ahead = number + 1, b""
            else:
                read()
        read()
        assert found == whole(path)
        assert tail.num_damaged == _damaged(path)


def _damaged(path: Path) -> int:
    """Whole lines less those that are records."""
    return path.read_bytes().count(b"\n") - len(whole(path))


def test_a_line_is_read_once_it_has_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert tail.read().lines == [], "not there yet"
    for part, expected in ((b'{"step": 1', []), (b"}", []), (b"\n", [1]), (b"", [])):
        with path.open("ab") as file:
            file.write(part)
        assert [each.record["step"] for each in tail.read().lines] == expected


def test_a_file_that_was_cut_and_has_grown_beyond_is_read_anew(tmp_path: Path) -> None:
    """As a resumed run leaves it between two looks: the same file, as long as before."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"step": {n}, "s": 1.5}}\n' for n in range(1, 5)))
    tail = Tail(path)
    assert len(tail.read().lines) == 4
    with path.open("rb+") as file:
        file.truncate(2 * 22)
        file.seek(0, 2)
        file.write(b"".join(b'{"step": %d, "s": 2.5}\n' % n for n in (3, 4, 5)))
    news = tail.read()
    assert news.is_restart and [each.record["step"] for each in news.lines] == [1, 2, 3, 4, 5]
    path.unlink()
    assert tail.read().is_restart and not tail.read().is_restart


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(line(n) for n in range(20_000)))
    tail = Tail(path)
    tail.read()
    parsed = list[bytes]()
    import flowtrain.view.tail as module

    monkeypatch.setattr(module, "_parse", lambda data: parsed.append(data))
    with path.open("ab") as file:
        file.write(line(1) + line(2))
    tail.read()
    assert parsed == [line(1), line(2)]
