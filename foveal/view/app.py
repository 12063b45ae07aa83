"""The pages of the viewer and their addresses."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from foveal.track.lines import number
from foveal.track.sample_files import ANSWERS, IMAGES, TOKENS, part_name
from foveal.view import charts
from foveal.view.answers import FINISHES, PAGE, SEARCH_SECONDS, SORTS, Filter, Place
from foveal.view.guard import Guard
from foveal.view.runs import Run, alarms, differences
from foveal.view.tokens import COLOURS, available, pieces

STATIC = {
    "style.css": "text/css",
    "uPlot.min.css": "text/css",
    "view.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
PICTURE_TYPES = {f".{kind}": f"image/{kind}" for kind in ("png", "gif", "bmp", "webp")} | {".jpg": "image/jpeg"}
MARK = re.compile(r"<\|im_start\|>\w*\n|<\|[^|<>]*\|>")
FINISH_WORDS = {"stop": "ended by itself", "length": "cut off at the limit", "abort": "stopped from outside"}
TOKENS_SHOWN = 2000
"""Of each answer of a group; one answer alone shows up to fifty thousand."""
TOKENS_SHOWN_ALONE = 50_000
FOLLOWED = 200
"""Answers on the page of one prompt, the newest."""


def templates() -> Environment:
    """Jinja2 that escapes everything."""
    made = Environment(
        loader=PackageLoader("foveal.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"number": _number, "finish": _finish, "gist": _gist}
    made.globals |= {"TITLES": charts.TITLES, "ALARMS": charts.ALARMS, "IMAGES": IMAGES}
    return made


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _finish(reason: str) -> str:
    return FINISH_WORDS.get(reason, reason)


def _gist(prompt: str) -> str:
    """A prompt in a line: its beginning, without the marks of the chat template."""
    words = " ".join(MARK.sub(" ", prompt[:4000]).split())
    return f"{words[:160]} …" if len(words) > 160 else words


def static_file(name: str) -> bytes:
    return (files("foveal.view") / "static" / name).read_bytes()


def make_app(runs: list[Run], host: str = "127.0.0.1") -> Guard:
    """The web application.

    Args:
        runs: at least one.
        host: what the server listens on.
    """
    pages = Pages(runs)
    routes = [
        Route("/", pages.curves),
        Route("/curves.json", pages.curves_json),
        Route("/time", pages.time),
        Route("/time.json", pages.time_json),
        Route("/settings", pages.settings),
        Route("/runs/{run:int}/samples", pages.samples),
        Route("/runs/{run:int}/samples.json", pages.samples_json),
        Route("/runs/{run:int}/follow/{split}/{row:int}", pages.follow),
        Route("/runs/{run:int}/images/{name}", pages.image),
        Route("/runs/{run:int}/{split}/{step:int}/{number:int}", pages.group),
    ]
    for name, kind in STATIC.items():
        headers = {"Cache-Control": "no-cache"}
        content = Response(static_file(name), media_type=kind, headers=headers)
        routes.append(Route(f"/static/{name}", partial(_same, content)))
    app = Starlette(routes=routes, exception_handlers={404: pages.not_found, Exception: pages.failed})
    return Guard(app, host)  # outermost, so that pages about errors are guarded too


async def _same(content: Response, request: Request) -> Response:
    return content


class Pages:
    """One method per page; Starlette runs them in threads."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self._templates = templates()

    def _show(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        values = {"runs": self.runs, "run": None, "live": any(run.is_live for run in self.runs), **values}
        page = self._templates.get_template(template).render(values)
        # names of folders and metrics may hold what is no text
        return HTMLResponse(page.encode(errors="backslashreplace"), status)

    def _run(self, request: Request) -> Run:
        number = request.path_params["run"]
        if number >= len(self.runs):
            raise HTTPException(404)
        self.runs[number].read_on()
        return self.runs[number]

    def _read_on(self) -> str:
        """Reads what is new of all runs; returns what changes when there is something new."""
        for run in self.runs:
            run.read_on()
        return "-".join(str(run.version) for run in self.runs)

    # -- curves, times, settings ------------------------------------------------------------------------------------

    def curves(self, request: Request) -> Response:
        self._read_on()
        chosen = request.query_params.getlist("m")
        names = chosen or charts.usual(self.runs)
        return self._show(
            "curves.html",
            page="curves",
            names=names,
            sections=charts.by_section(self.runs),
            alarms=[alarm for run in self.runs for alarm in alarms(run)],
            data=f"/curves.json?{urlencode([('m', name) for name in names], errors='replace')}",
        )

    def curves_json(self, request: Request) -> Response:
        version = self._read_on()
        if request.query_params.get("since") == version:
            return _json({"version": version})
        shown = charts.curves(self.runs, request.query_params.getlist("m"))
        return _json({"version": version, "charts": shown})

    def time(self, request: Request) -> Response:
        self._read_on()
        tables = [(run, charts.time_table(run)) for run in self.runs]
        return self._show("time.html", page="time", tables=tables, data="/time.json?")

    def time_json(self, request: Request) -> Response:
        version = self._read_on()
        if request.query_params.get("since") == version:
            return _json({"version": version})
        return _json({"version": version, "times": [charts.times(run) for run in self.runs]})

    def settings(self, request: Request) -> Response:
        self._read_on()
        differing, same = differences(self.runs)
        return self._show("settings.html", page="settings", differing=differing, same=same)

    # -- samples ----------------------------------------------------------------------------------------------------

    def samples(self, request: Request) -> Response:
        run = self._run(request)
        wanted = Filter.read(request.query_params)
        answers = run.answers
        numbers, left = answers.find(wanted)
        last_page = max(0, (len(numbers) - 1) // PAGE)
        page = min(_whole(request.query_params.get("page", "")), last_page)
        places = answers.places(numbers[page * PAGE : (page + 1) * PAGE])
        query = wanted.query()

        def page_address(other: int) -> str:
            return f"/runs/{run.number}/samples?{urlencode({**query, 'page': other})}"

        return self._show(
            "samples.html",
            page="samples",
            run=run,
            answers=answers.fetch(places),
            wanted=wanted,
            sorts=list(SORTS),
            finishes=FINISHES,
            found=len(numbers),
            left=left,
            search_seconds=SEARCH_SECONDS,
            total=len(answers),
            shown_page=page,
            last_page=last_page,
            earlier=page_address(page - 1) if page else None,
            later=page_address(page + 1) if page < last_page else None,
            data=f"/runs/{run.number}/samples.json?",
        )

    def samples_json(self, request: Request) -> Response:
        run = self._run(request)
        return _json({"version": str(run.version), "answers": len(run.answers)})

    def group(self, request: Request) -> Response:
        run = self._run(request)
        found = request.path_params
        place = Place(found["split"], found["step"], found["number"])
        index = run.answers
        places = index.group(place)
        alone = request.query_params.get("alone") == "yes"
        answers = index.fetch([place] if alone and places else places, tokens=True)
        if not answers:
            raise _lacking(run, places)
        colours = available(answers)
        colour = request.query_params.get("colour", "")
        if colour not in (*colours, "none"):
            colour = colours[0] if colours else "none"
        limit = TOKENS_SHOWN_ALONE if alone else TOKENS_SHOWN
        vocabulary = run.vocabulary.read()
        for answer in answers:
            answer["pieces"] = pieces(answer, colour, vocabulary, limit)
        unknown = {token for answer in answers for token in (answer["token_ids"] or [])[:limit]} - vocabulary.keys()
        return self._show(
            "group.html",
            page="samples",
            run=run,
            answers=answers,
            first=answers[0],
            place=place,
            alone=alone,
            limit=limit,
            colour=colour,
            colours={name: COLOURS[name] for name in colours},
            lacking=f"{TOKENS} lacks the text of some tokens: it is damaged or incomplete" if unknown else "",
        )

    def follow(self, request: Request) -> Response:
        run = self._run(request)
        split, row = request.path_params["split"], request.path_params["row"]
        if split not in ("train", "val"):
            raise HTTPException(404)
        index = run.answers
        numbers = index.follow(split, row)
        places = index.places(numbers[-FOLLOWED:])
        answers = index.fetch(places)
        if not answers:
            raise _lacking(run, places)
        return self._show(
            "follow.html", page="samples", run=run, answers=answers, first=answers[0], total=len(numbers), row=row
        )

    def image(self, request: Request) -> Response:
        """A picture by its hash."""
        path = self._run(request).picture(request.path_params["name"])
        if path is None:
            raise HTTPException(404)
        headers = {"Cache-Control": "private, max-age=86400, immutable"}
        return FileResponse(path, media_type=PICTURE_TYPES[path.suffix], headers=headers)

    # -- what went wrong --------------------------------------------------------------------------------------------

    def not_found(self, request: Request, error: Exception) -> Response:
        title, text = "There is no such page", "It may have been removed."
        if isinstance(error, Lacking):
            title, text = "These answers cannot be read", error.detail
        return self._show("error.html", 404, page="", title=title, text=text)

    def failed(self, request: Request, error: Exception) -> Response:
        text = f"{type(error).__name__}: {error}. The terminal in which foveal view runs says where."
        return self._show("error.html", 500, page="", title="This page could not be made", text=text)


class Lacking(HTTPException):
    """Answers that are there, but cannot be read."""


def _lacking(run: Run, places: list[Place]) -> HTTPException:
    names = {part_name(place.split, place.step) for place in places} & run.answers.unreadable
    return Lacking(404, f"{ANSWERS}/{min(names)} is damaged.") if names else HTTPException(404)


def _json(values: Any) -> Response:
    return Response(json.dumps(values, allow_nan=False), media_type="application/json")


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
