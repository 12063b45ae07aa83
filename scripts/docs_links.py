"""A hook of MkDocs: links from a page to files outside docs/, which the site does not have, become the files' paths.

On a code host `[script](../benchmarks/plan.py)` leads to the file; the site says "script (`benchmarks/plan.py`)".
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the links of a page; called by MkDocs with its Markdown."""
    folder = posixpath.dirname(page.file.src_uri)

    def outside(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        return f"{found[1]} (`{target.removeprefix('../')}`)" if target.startswith("../") else found[0]

    return _LINK.sub(outside, markdown)
