"""Failures of one request, and whether another attempt may help."""

from __future__ import annotations

import email.utils
import random
import re
import ssl
import time
from collections.abc import Mapping

import httpx

from .policy import Policy

RATE_LIMIT = re.compile(r";\s*t=(\d{1,9})(?:;|$)")
OVERLOADED = frozenset({429, 503})
TRANSIENT = frozenset({408, 416, 423, 425}) | OVERLOADED
EXPIRED = frozenset({400, 401, 403, 404, 410})  # a redirect target with one of these is requested again from the hub


class Transient(Exception):
    """A failure that may end by itself: the network, an overloaded server, an incomplete reply."""

    def __init__(self, message: str, *, retry_after: float | None = None, overloaded: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, as the server asks
        self.overloaded = overloaded


class Refused(Exception):
    """A failure that another attempt at the same address does not change: 401, 403, 404, a bad certificate."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # the reason as Hugging Face names it, such as GatedRepo


class Changed(Exception):
    """The file at the address is not the file that the transfer began with."""


class WithoutRanges(Exception):
    """The server replied with the complete file to a request for a range."""


class Interrupted(Exception):
    """The transfer was paused, cancelled or has failed elsewhere. The connection was closed on this side."""


def check_status(response: httpx.Response, policy: Policy, *, redirected: bool) -> None:
    """Accept 200 and 206. Raises Transient or Refused for every other status."""
    status = response.status_code
    if status in (200, 206):
        return
    message = f"{server_of(response.request.url)} returned status {status}"
    code = response.headers.get("x-error-code", "")
    if code == "GatedRepo":
        message = "the repository is gated: you do not have access"
    if status >= 500 or status in TRANSIENT or (redirected and status in EXPIRED):
        wait = parse_retry_after(response.headers)
        if wait is None and status == 429:
            wait = parse_rate_limit(response.headers)
        if wait is not None and wait > policy.longest_retry_after:
            raise Refused(f"{message} and asks to wait {wait:.0f} s", status=status)
        raise Transient(message, retry_after=wait, overloaded=status in OVERLOADED)
    raise Refused(message, status=status, code=code)


def server_of(url: httpx.URL) -> str:
    """The server of an address, for people: its host, and a port that is not the usual one."""
    return url.netloc.decode("ascii")


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header: a number or a date. None if it is missing or malformed."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, moment.timestamp() - time.time())


def parse_rate_limit(headers: Mapping[str, str]) -> float | None:
    """Seconds to the next window of a RateLimit header, which Hugging Face sends in place of Retry-After."""
    match = RATE_LIMIT.search(headers.get("ratelimit", ""))
    return None if match is None else float(match[1])


def translate(error: httpx.HTTPError | httpx.InvalidURL, host: str) -> Transient | Refused:
    """The failure for an error of httpx."""
    if isinstance(error, httpx.TimeoutException):
        return Transient(f"{host} sent no data for too long")
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return Refused(f"malformed address of {host} or of its proxy: {error}")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Refused(f"the certificate of {host} is not valid: {cause.verify_message}")
        cause = cause.__cause__ or cause.__context__
    return Transient(f"cannot reach {host}: {error or type(error).__name__}")


def wait_before(attempt: int, failure: Transient, policy: Policy) -> float:
    """Seconds to wait before attempt number `attempt` (2 is the first repetition), with jitter."""
    doubled = policy.first_wait * 2.0 ** min(attempt - 2, 30)
    jittered = min(doubled, policy.longest_wait) * random.uniform(0.5, 1.0)
    return max(jittered, failure.retry_after or 0.0)
