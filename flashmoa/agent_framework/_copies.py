"""Copy executors, so that a dry run of the copy leaves the original as it is (``copy_stock``,
``copy_included``).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast

from agent_framework import (
    AgentExecutor,
    AgentResponse,
    AgentSession,
    BaseAgent,
    ChatResponse,
    Content,
    Executor,
    Message,
)
from pydantic import BaseModel

from flashmoa.agent_framework._predictability import run_untraced

# Objects that are copied with what they hold; dataclasses are, too.
_RECORDS = (AgentResponse, AgentSession, BaseAgent, BaseModel, ChatResponse, Message)


def copy_stock(executor: AgentExecutor) -> AgentExecutor:
    """Copy an executor whose code is all the framework's, as far as that code changes things.

    The copy's agent is run without the layers that trace it.
    """
    shadow = copy.copy(executor)
    for name, value in list(vars(shadow).items()):
        if isinstance(value, list | dict | set):
            setattr(shadow, name, copy.copy(cast("Any", value)))
    shadow._cache = [copy_message(message) for message in shadow._cache]
    shadow._session = copy.copy(shadow._session)
    shadow._session.state = {
        key: dict(cast("dict[Any, Any]", value)) if isinstance(value, dict) else value
        for key, value in shadow._session.state.items()
    }
    agent: Any = copy.copy(shadow._agent)
    agent.context_providers = list(agent.context_providers)
    agent.run = partial(run_untraced, agent)
    shadow._agent = agent
    return shadow


def copy_message(message: Message) -> Message:
    """Copy a message; its contents stay shared."""
    clone = copy.copy(message)
    clone.contents = list(message.contents)
    clone.additional_properties = dict(message.additional_properties)
    return clone


def copy_included(executor: Executor, message: Any) -> tuple[Executor, Any]:
    """Copy an executor of the user's, and the message that it will receive.

    Copied are its agent, its session with all of its state, and the data that it and its agent
    hold: messages, containers, dataclasses and pydantic models, at any depth. Every other object is
    shared. Raw representations are not copied.

    Raises: Exception, whatever an object raises that cannot be copied.
    """
    copier = _Copier()
    shadow = copier.copy_record(executor, _share)
    if isinstance(shadow, AgentExecutor) and shadow._agent is cast("Any", executor)._agent:
        # An agent need not be of a class of the framework.
        shadow._agent = copier.copy_record(shadow._agent, _share)
    return shadow, copier.copy(message, _share)


def _share(value: Any) -> Any:
    return value


class _Copier:
    """Copies data at any depth; what is held twice is copied once.

    Attributes:
        copies: the copies, by the ids of what they are copies of.
    """

    def __init__(self) -> None:
        self.copies: dict[int, Any] = {}

    def copy(self, value: Any, leaf: Callable[[Any], Any]) -> Any:
        """Copy a value.

        Args:
            leaf: returns what stands for an object in the copy if that object is not data.
        """
        if id(value) in self.copies:
            return self.copies[id(value)]
        if isinstance(value, Content):
            return self._add(value, copy.deepcopy(value))
        if isinstance(value, list | deque | dict | set):
            return self._copy_container(cast("Any", value), leaf)
        if type(value) is tuple:
            return tuple(self.copy(item, leaf) for item in cast("tuple[Any, ...]", value))
        if isinstance(value, AgentSession):
            # Any object in a session's state may change.
            return self.copy_record(value, copy.deepcopy)
        is_record = isinstance(value, _RECORDS) or is_dataclass(value)
        if is_record and not isinstance(value, type):
            return self.copy_record(value, leaf)
        return leaf(value)

    def copy_record(self, value: Any, leaf: Callable[[Any], Any]) -> Any:
        """Copy an object with the data in its attributes."""
        clone = self._add(value, copy.copy(value))
        names = [field.name for field in fields(value)] if is_dataclass(value) else []
        for name in {*names, *getattr(value, "__dict__", ())} - {"raw_representation"}:
            # Dataclasses may be frozen.
            object.__setattr__(clone, name, self.copy(getattr(value, name), leaf))
        return clone

    def _copy_container(self, value: Any, leaf: Callable[[Any], Any]) -> Any:
        clone = self._add(value, copy.copy(value))
        if isinstance(value, dict):
            for key, item in cast("dict[Any, Any]", value).items():
                clone[key] = self.copy(item, leaf)
        elif not isinstance(value, set):  # What is in a set cannot be changed.
            for index, item in enumerate(value):
                clone[index] = self.copy(item, leaf)
        return clone

    def _add(self, value: Any, clone: Any) -> Any:
        self.copies[id(value)] = clone
        return clone
