"""A flame graph as one HTML file: time downwards through calls; a click widens a frame."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field

_SMALLEST = 5e-4
"""Frames with a smaller share of the whole are left out."""
_PAGE = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 12px system-ui, sans-serif; margin: 8px }}
.row {{ display: flex }}
.frame {{ flex: 0 0 calc(var(--share) * 100%); min-width: 0; overflow: hidden }}
.frame > span {{ display: block; overflow: hidden; white-space: nowrap; cursor: pointer;
  border: 1px solid #fff; padding: 0 2px; background: hsl(var(--hue) 70% 75%) }}
.wide {{ flex-basis: 100% }}
.hidden {{ display: none }}
</style>
<p>{title}. A frame is as wide as its share of the time; a click widens it, one on the top frame
shows all again.</p>
<div class="row">{frames}</div>
<script>
document.addEventListener("click", (event) => {{
  let frame = event.target.closest(".frame");
  if (!frame) return;
  const clear = (name) => document.querySelectorAll("." + name)
    .forEach((each) => each.classList.remove(name));
  clear("wide");
  clear("hidden");
  for (; frame; frame = frame.parentElement.closest(".frame")) {{
    for (const each of frame.parentElement.children)
      each.classList.add(each === frame ? "wide" : "hidden");
  }}
}});
</script>
"""


@dataclass(slots=True)
class Frame:
    """A function or operator in one place of the call tree."""

    seconds: float = 0.0
    """Time in it, callees included."""
    callees: dict[str, Frame] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> Frame:
        """Count a call, and return the callee's frame."""
        callee = self.callees.setdefault(name, Frame())
        callee.seconds += seconds
        return callee


def flame_html(title: str, root: Frame) -> str:
    """Draw the callees of `root`, which lasts as long as they do."""
    root.seconds = sum(frame.seconds for frame in root.callees.values())
    frames = "".join(_draw("all threads", root, whole=root, caller=root))
    return _PAGE.format(title=html.escape(title), frames=frames)


def _draw(name: str, frame: Frame, whole: Frame, caller: Frame) -> Iterator[str]:
    total, text = max(whole.seconds, 1e-9), html.escape(name)
    share = frame.seconds / max(caller.seconds, 1e-9)
    hue = sum(map(ord, name)) % 60
    about = f"{text}: {frame.seconds:.3f} s, {frame.seconds / total:.1%}"
    yield f'<div class="frame" style="--share:{share:.5f};--hue:{hue}">'
    yield f'<span title="{about}">{text}</span><div class="row">'
    slowest_first = sorted(frame.callees.items(), key=lambda item: -item[1].seconds)
    for callee_name, callee in slowest_first:
        if callee.seconds >= _SMALLEST * total:
            yield from _draw(callee_name, callee, whole=whole, caller=frame)
    yield "</div></div>"
