"""ECMA-262 patterns for the string formats of JSON Schema for which llguidance allows invalid texts.

llguidance allows February 29 in every year, a leap second at any time, and host names of any length. These patterns
allow a leap second only at 23:59:60 UTC, and in `date-time` only on June 30 and December 31.
"""

from __future__ import annotations

# Formats for which llguidance has a correct pattern.
BUILT_IN = frozenset({"duration", "ipv4", "uri", "uuid"})

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LEAP_SECOND = f"23:59:60{_FRACTION}(?:[zZ]|[+-]00:00)"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"

_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(  # RFC 3986, section 3.2.2: each line allows one number of groups after the ::
    [
        f"(?:{_H16}:){{6}}{_LS32}",
        f"::(?:{_H16}:){{5}}{_LS32}",
        *(
            f"(?:(?:{_H16}:){{0,{before}}}{_H16})?::{f'(?:{_H16}:){{{4 - before}}}' if before < 4 else ''}{_LS32}"
            for before in range(5)
        ),
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)

_HEX = "[0-9a-fA-F]"


def _uuid(version: int) -> str:
    return f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"


def _base64(letters: str) -> str:
    return f"^(?:[{letters}]{{4}})*(?:[{letters}]{{2}}==|[{letters}]{{3}}=)?$"


# Format → patterns. A text is valid if it matches all of them.
PATTERNS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^(?:{_TIME}|{_LEAP_SECOND})$",),
    "date-time": (f"^(?:{_DATE}[Tt]{_TIME}|{_YEAR}-(?:06-30|12-31)[Tt]{_LEAP_SECOND})$",),
    "hostname": (f"^{_DOMAIN}$", "^.{1,253}$"),
    "email": (rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_DOMAIN}|\[{_IPV4}\])$", "^[^@]{1,64}@.{1,253}$"),
    "ipv6": (f"^(?:{_IPV6})$",),
    # Not in JSON Schema: formats of pydantic, and of OpenAPI (byte).
    **{f"uuid{version}": (_uuid(version),) for version in range(1, 9)},
    **dict.fromkeys(("base64", "byte"), (_base64("A-Za-z0-9+/"),)),
    "base64url": (_base64("A-Za-z0-9_-"),),
}
