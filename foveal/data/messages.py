"""A chat as a row holds it, in any of the usual spellings → messages with role and text, media as marks in the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from foveal.errors import DataError

Message: TypeAlias = dict[str, str]
"""{"role": system, user, assistant or tool; "content": text with `<image>` and `<video>` where media go}."""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""OpenAI's names and ShareGPT's."""


def is_chat(value: Any) -> bool:
    """Whether the value of a prompt column is a list of messages rather than text."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def read_messages(
    value: Any,
    place: str,
    *,
    role_key: str | None = None,
    content_key: str | None = None,
    roles: Mapping[str, str] = ROLES,
) -> list[Message]:
    """The messages of a chat, {"role", "content"} or {"from", "value"}, content as text or as a list of parts.

    Args:
        place: row and column, for messages.
        role_key, content_key: where a message has role and content; None finds out.
        roles: our name for each role that may stand there.

    Raises:
        DataError: no such list, or an unknown role.
    """
    if not is_chat(value):
        raise DataError(
            f"{place} is {_shown(value)}; it must be text, or a list of chat messages with role and content."
        )
    messages = []
    for number, given in enumerate(value):
        role = given.get(role_key or ("role" if given.get("role") is not None else "from"))
        if not isinstance(role, str) or role not in roles:
            raise DataError(
                f"{place}: message {number} has {'no role' if role is None else f'the role {role!r}'}; known are "
                f"{', '.join(roles)}."
            )
        content = given.get(content_key or ("content" if given.get("content") is not None else "value"))
        messages.append({"role": roles[role], "content": _marked(content, f"{place}, message {number}")})
    return messages


def media_inside(chat: Any, kind: str) -> list[Any]:
    """The pictures (kind "image") or videos ("video") that a chat's parts hold themselves, in order.

    They stand as {"type": "image", "image": …}, or as OpenAI's {"type": "image_url", "image_url": {"url": …}}.
    """
    if not is_chat(chat):
        return []
    contents = [content for message in chat for content in message.values() if isinstance(content, list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    held = [part.get(part["type"]) for part in parts if part.get("type") in (kind, f"{kind}_url")]
    return [one.get("url", one) if isinstance(one, dict) else one for one in held if one]


def up_to_question(messages: list[Message], place: str) -> list[Message]:
    """The messages up to the last of the user, which is the one to be answered.

    Raises:
        DataError: there is none.
    """
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        raise DataError(f"{place} has no message of the role user.")
    return messages[: asked[-1] + 1]


def _marked(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_marked_part(part, place) for part in content)
    raise DataError(f"{place}: the content is {_shown(content)}; it must be text or a list of parts.")


def _marked_part(part: Any, place: str) -> str:
    kind, text = (part.get("type") or "text", part.get("text") or "") if isinstance(part, dict) else (None, None)
    if kind in ("image", "image_url", "video", "video_url"):
        return f"<{kind.removesuffix('_url')}>"
    if kind == "text" and isinstance(text, str):
        return text
    raise DataError(
        f'{place} has the part {str(part)[:120]}; allowed are {{"type": "text", "text": …}}, {{"type": "image"}} and '
        f'{{"type": "video"}}, with the media in them, {{"type": "image", "image": "a.png"}}, or in a column '
        f"(data.image_key, data.video_key)."
    )


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, list) else "a list without messages"
