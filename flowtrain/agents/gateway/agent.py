"""The agent `gateway`: a program of somebody else's, trained token by token.

The program knows nothing of training. It gets a task, the URL of an OpenAI-compatible endpoint and
a key of its own for every rollout; what is sampled under the key is recorded in this process, where
it is sampled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from flowtrain.agents.base import AgentContext
from flowtrain.agents.conversation import ChatTemplate
from flowtrain.agents.gateway import shared
from flowtrain.agents.gateway.programs import Command, Function, Program, task_record
from flowtrain.agents.gateway.recorder import Recorder
from flowtrain.agents.gateway.rollout import Outcome, Rollout
from flowtrain.agents.gateway.server import Gateway, new_key
from flowtrain.agents.session import RolloutEnded, Session, SessionAgent
from flowtrain.types import UserError
