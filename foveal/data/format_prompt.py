"""The Jinja file that wraps each question (`data.format_prompt`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from foveal.errors import DataError

_ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined)


class FormatPrompt:
    """A template whose variables are `content` (the question), every column of the row by its name, and `row` (all of
    them, for names that are no variables: `{{ row["final answer"] }}`).

    A variable that the row lacks is an error, not an empty string; `{{ hint | default("") }}` allows for it.

    Raises:
        DataError: the file is missing, no UTF-8 or no Jinja template, or uses no variable.
    """

    def __init__(self, file: str) -> None:
        path = Path(os.path.expanduser(file))
        if not os.path.isfile(path):  # unlike Path's, without an error where a text is too long for a name
            raise DataError(
                f"data.format_prompt: there is no file {file[:200]} (looked for from {Path.cwd()}). If that is the "
                "text itself, as EasyR1 had it at first, write {{ content }} and the text into a file and name that."
            )
        try:
            self._text = path.read_text(encoding="utf-8").strip()
            self._template = _ENVIRONMENT.from_string(self._text)
            variables = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(self._text))
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"data.format_prompt: {file}, line {error.lineno}: {error.message}.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.format_prompt: cannot read {file} as UTF-8 text ({error}).") from error
        if not variables:
            raise DataError(
                f"data.format_prompt: {file} uses no variable, so every prompt would be the same. Write "
                f"{{{{ content }}}} where the question goes."
            )
        self._file = file

    def __getstate__(self) -> tuple[str, str]:
        return self._file, self._text

    def __setstate__(self, state: tuple[str, str]) -> None:
        """For other machines, where the file need not lie; Jinja's own templates cannot travel."""
        self._file, self._text = state
        self._template = _ENVIRONMENT.from_string(self._text)

    def render(self, content: str, row: dict[str, Any], place: str) -> str:
        """The question `content` as the template wraps it; DataError names the row if the template fails."""
        try:
            return self._template.render({"row": row, **row, "content": content})
        except Exception as error:  # whatever the user's template does
            raise DataError(
                f"{place}: the format prompt {self._file} fails: {error}. Its variables are: "
                f"{', '.join(['content', *(name for name in row if name != 'content')])}."
            ) from error
