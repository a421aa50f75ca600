"""Requests of metadata: JSON replies of a hub, repeated after temporary failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Thread
from time import sleep
from typing import Any, TypeVar

import msgspec

from ....engine.files import json_text
from ...errors import DownloadFailed
from ..transfer.failures import Transient, wait_before
from ..transfer.http import get_json
from ..transfer.policy import Policy
from .hubs import RETRY_HINT, credentials

Result = TypeVar("Result")

MAX_REPLY = 64 * 2**20  # bytes


def fetch_json(task: str, url: str, policy: Policy) -> Any:
    """The JSON value at an address. `task` completes the message "cannot …".

    Raises DownloadFailed (network, malformed reply), or Refused with the status of the server.
    """
    tokens = credentials()
    return attempt(task, policy, lambda: get_json(url, policy, tokens, json_text.parse, MAX_REPLY))


def attempt(task: str, policy: Policy, request: Callable[[], Result]) -> Result:
    """The result of a request, which is repeated a few times. Obeys Retry-After up to a limit of the policy.

    Raises DownloadFailed with the last reason, or Refused.
    """
    for number in itertools.count(2):
        try:
            return _once(policy, request)
        except Transient as failure:
            if number > policy.lookup_attempts:
                raise DownloadFailed(f"cannot {task}: {failure}", hint=RETRY_HINT) from failure
            sleep(wait_before(number, failure, policy))
    raise AssertionError("the loop ends with a result or an error")


def convert(task: str, value: Any, type: type[Result]) -> Result:
    """The value of a reply as a record. Raises DownloadFailed for a value of another form."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        message = f"cannot {task}: the reply is malformed: {str(error)[:200]}"
        raise DownloadFailed(message, hint="try again later, or set HF_ENDPOINT") from error


def _once(policy: Policy, request: Callable[[], Result]) -> Result:
    try:
        return _within(policy.lookup_timeout, request)
    except FutureTimeout as error:
        raise Transient(f"no reply within {policy.lookup_timeout:.0f} s") from error
    except ValueError as error:
        raise Transient(f"the reply is malformed: {str(error)[:200]}") from error


def _within(seconds: float, function: Callable[[], Result]) -> Result:
    """The result of a function, which runs in a thread. Raises TimeoutError: a server may send one byte per second."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result(seconds)
