"""Control tokens: the tokens of a vocabulary that are markers for the model, not text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from ..calls.records import MARKERS, REASONING_MARKERS
from .byte_tokens import fallback_byte

# Marks around each character of a control token in the text of a message: the character between them is plain text.
# They are private-use characters of plane 15. No message needs them, so they are removed from messages.
PROTECT = "\U000fff00"
RELEASE = "\U000fff01"

_BARS = re.compile(r"<[|｜].+[|｜]>|<[|｜].*\w.*>|<.*\w.*[|｜]>|\[\|.+\|\]|◁.+▷")  # <|im_start|>, [|user|]
_TAG = re.compile(r"</?(?=[^>]*[^\W\d])([\w:.▁-]+)/?>")  # <tool_response>, <start_of_turn>
_BRACKETS = re.compile(r"\[/?@?(?=\w*[A-Z]{2})\w+@?\]")  # [INST], [/TOOL_RESULTS], [gMASK]
# Words and punctuation without words: templates also write them, and they do not control the model.
_ORDINARY = re.compile(r"[\w\s'’.,-]*|\W*")
# Elements of HTML. Some vocabularies (Gemma) have them as added tokens, and an answer may contain them.
_HTML = frozenset(
    "a abbr acronym address applet area article aside audio b base basefont bdi bdo big blockquote body br "
    "button canvas caption center cite code col colgroup data datalist dd del details dfn dialog dir div dl dt "
    "em embed fieldset figcaption figure font footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup "
    "hr html i iframe img input ins kbd label legend li link main map mark menu meta meter nav noframes "
    "noscript object ol optgroup option output p param picture pre progress q rp rt ruby samp script search "
    "section select small span strike strong style sub summary sup svg table tbody td template textarea tfoot "
    "th thead time title tr track tt u ul var video wbr".split()
)


def looks_like_control(text: str) -> bool:
    """Whether an added token with this text is a marker by its form, and no tag of HTML and no byte."""
    text = text.strip(" ▁")
    if fallback_byte(text):
        return False
    tag = _TAG.fullmatch(text)
    if tag is not None:
        return tag[1] not in _HTML
    return bool(_BARS.fullmatch(text) or _BRACKETS.fullmatch(text))


def is_ordinary(text: str) -> bool:
    """Whether the text is words, or punctuation without words."""
    return bool(_ORDINARY.fullmatch(text))


def control_ids(
    added: Mapping[int, str], special: AbstractSet[int], templates: Iterable[str], parsed: AbstractSet[str] = MARKERS
) -> frozenset[int]:
    """The added tokens that are markers. The text of a message never becomes a marker, and an answer does not show one.

    `added`: the texts of the added tokens. `special`: tokens that the files of the model declare as special. Other
    tokens are markers if a parser acts on them (`parsed`), if their form is that of a marker, or if a chat template
    writes them and they are neither words nor punctuation.
    """
    templates = tuple(templates)

    def is_control(token: int, text: str) -> bool:
        if token in special or text in parsed or looks_like_control(text):
            return True
        return not is_ordinary(text) and any(text in template for template in templates)

    return frozenset(token for token, text in added.items() if is_control(token, text))


def own_markers(added: Mapping[int, str], special: AbstractSet[int], parsed: AbstractSet[str]) -> frozenset[int]:
    """The markers that stay in an earlier answer: those of the parser, unless the files of the model declare them as
    special. Markers of reasoning always stay, because templates look for them."""
    return frozenset(
        token for token, text in added.items() if text in parsed and (token not in special or text in REASONING_MARKERS)
    )
