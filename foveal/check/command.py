"""`foveal check`: what is wrong with data and reward function, said before a run and without a GPU."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from foveal.check.findings import Finding, exit_code, in_order, name_rows
from foveal.config import Config, load_config
from foveal.config.rules import missing
from foveal.errors import ConfigError
from foveal.reward.explain import clipped
from foveal.track import console

USAGE = "foveal check [--rows N] [--generate N] [--html FILE] [--parity] [config=FILE] [KEY=VALUE …]"
ROWS = 1000
PARITY_ROWS = 16
LONGEST_PART = 400


def check_command(args: list[str]) -> int:
    """Runs the checks that `args` asks for.

    Returns:
        the exit status: 1 where there is an error, or where engine and trainer differ beyond the bound.

    Raises:
        FovealError: the configuration or the model's folder is such that nothing can be checked.
    """
    parser = argparse.ArgumentParser(prog="foveal check", usage=USAGE, add_help=False)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--generate", type=int, default=0)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--parity", action="store_true")
    options, rest = parser.parse_known_args(args)
    for arg in rest:
        if arg.startswith("-"):
            parser.error(f"no option {arg}")
    for name, least in (("rows", 1), ("generate", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name}: {value} given; allowed: an integer ≥ {least}")
    if options.parity:
        from foveal.parity import check_parity

        return check_parity(load_config([*rest, "trainer.val_only=false"]), options.rows or PARITY_ROWS)
    return check(load_config(rest), options.rows or ROWS, options.generate, options.html)


def check(config: Config, rows: int, generate: int, page: Path | None) -> int:
    """Prints what is found in the configuration, the data and the reward function.

    Args:
        rows: how many rows of each source have their pictures decoded, and how many the reward is tried on.
        generate: to how many prompts the model answers, where no error was found before; 0 loads no model.
        page: an HTML file to write, with prompts and their pictures.
    """
    from foveal.check.data import check_data
    from foveal.check.reward import check_reward
    from foveal.preflight import open_processing

    if not config.worker.actor.model.model_path:
        raise ConfigError("worker.actor.model.model_path is not set. Its tokenizer and processor make the prompts.")
    processing = open_processing(config)
    unset = missing(config)
    findings = [_of_line(line) for line in unset]
    findings += check_data(config, rows, page, processing=processing)
    if not unset:
        told = [finding.text for finding in findings]
        for one in check_reward(config, rows, processing=processing):
            # Where no row can be used, trying the reward ends with what the data has been blamed for.
            if not any(text.startswith(one.text) for text in told):
                findings.append(one)
    if generate and not exit_code(findings):
        from foveal.check.generated import check_generated

        findings += check_generated(config, generate, console.note)
    report(findings)
    return exit_code(findings)


def report(findings: list[Finding]) -> None:
    """Prints the findings, the gravest first, and how many there are."""
    console.note("")
    for one in in_order(findings):
        text, cure = clipped(one.text, LONGEST_PART), clipped(one.cure, LONGEST_PART)
        where = f"\n    {name_rows(one.rows)}" if one.rows else ""
        console.note(f"{one.level}: {one.subject}: {text}{where}\n    → {cure}")
    counts = Counter(one.level for one in findings)
    said = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in ("error", "warning", "note")]
    console.note(f"foveal check: {', '.join(said)}" if findings else "foveal check: nothing to complain about")


def _of_line(line: str) -> Finding:
    text, _, cure = line.partition(": ")
    return Finding("error", "configuration", text, cure)
