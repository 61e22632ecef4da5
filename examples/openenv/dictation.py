"""An OpenEnv environment and its server: it orders "digits" or "letters" three times. Each reply
earns the share of its characters that are what was ordered.

python examples/openenv/dictation.py --port 8000
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

ORDERS = {"digits": str.isdecimal, "letters": str.isalpha}
NUM_STEPS = 3


class Reply(Action):
    """A reply to an order."""

    text: str


class Order(Observation):
    """What to write next."""

    order: str = ""


class Dictation(Environment[Reply, Order, State]):
    """The seed says what is ordered."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Order:
        self._order = random.Random(seed).choice(list(ORDERS))
        self._state = State(episode_id=episode_id)
        return Order(order=self._order)

    def step(self, action: Reply, timeout_s: float | None = None, **_: Any) -> Order:
        share = sum(map(ORDERS[self._order], action.text)) / max(len(action.text), 1)
        self._state.step_count += 1
        is_last = self._state.step_count == NUM_STEPS
        return Order(order=self._order, reward=share / NUM_STEPS, done=is_last)

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000)
    app = create_fastapi_app(Dictation, Reply, Order, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
