"""The tree of messages: branches, the current branch, and the request for an answer."""

from __future__ import annotations

import json

import pytest

from localllm.app.errors import InvalidRequest, StorageFailed
from localllm.app.tui import export
from localllm.app.tui.conversation import Conversation


def talk() -> Conversation:
    """0 user ─┬─ 1 assistant ── 2 user ── 3 assistant; └─ 4 assistant."""
    conversation = Conversation("guide", "Be brief.")
    first = conversation.add("user", "What is a daemon?\nTell me.", parent=None)
    answer = conversation.add("assistant", "A process.", parent=first.index)
    second = conversation.add("user", "Whose?", parent=answer.index)
    conversation.add("assistant", "Yours.", parent=second.index)
    conversation.add("assistant", "A spirit.", parent=first.index)
    for message in conversation.messages:
        message.finish = "stop" if message.role == "assistant" else ""
    return conversation


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.path()]


def test_path_and_alternatives() -> None:
    conversation = talk()
    assert contents(conversation)[1:] == ["A spirit."]
    first, other = conversation.messages[1], conversation.messages[4]
    assert conversation.alternatives(first) == [first, other]
    conversation.show(first)
    assert contents(conversation)[1:] == ["A process.", "Whose?", "Yours."]
    conversation.show(other)
    assert contents(conversation)[1:] == ["A spirit."]


def test_edited_question_is_an_alternative_of_the_original() -> None:
    conversation = talk()
    edited = conversation.add("user", "What is a demon?", parent=None)
    assert [message.index for message in conversation.alternatives(edited)] == [0, 5]
    assert contents(conversation) == ["What is a demon?"]


def test_title_is_the_start_of_the_first_question() -> None:
    assert talk().title == "What is a daemon? Tell me."


def test_request_has_the_messages_before_the_answer() -> None:
    conversation = talk()
    sent = conversation.request(conversation.messages[3])
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert sent[-1]["content"] == "Whose?"


def test_request_omits_a_question_with_an_empty_answer() -> None:
    conversation = Conversation("guide")
    for question, answer in (("far too long", ""), ("stopped in the middle", "half"), ("next", "")):
        message = conversation.add("user", question, parent=conversation.leaf)
        last = conversation.add("assistant", answer, parent=message.index)
    assert [message["content"] for message in conversation.request(last)] == ["stopped in the middle", "half", "next"]


def test_export(tmp_path) -> None:
    conversation = talk()
    written = export.write(conversation, "", tmp_path).read_text()
    assert "## You\n\nWhat is a daemon?" in written
    assert "A spirit." in written
    assert "Yours." not in written
    data = json.loads(export.write(conversation, "json all.json", tmp_path).read_text())
    assert [message["content"] for message in data["messages"]][3:] == ["Yours.", "A spirit."]
    with pytest.raises(InvalidRequest, match="exists"):
        export.write(conversation, "json all.json", tmp_path)
    with pytest.raises(StorageFailed, match="Cannot write"):
        export.write(conversation, "md missing/folder.md", tmp_path)
    with pytest.raises(InvalidRequest, match="nothing"):
        export.write(Conversation("guide"), "", tmp_path)


def test_code_blocks() -> None:
    text = "a\n```py\nx = 1\n```\n> ~~~\n> quoted\n> ~~~\n1. item\n   ```\n   inner\n   ```\n"
    assert export.code_blocks(text) == ["x = 1", "quoted", "inner"]
