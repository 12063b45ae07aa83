"""The command line: `foveal train | eval | check | plan | merge | view | quickstart`.

Nothing heavy is imported until a command needs it, so that `foveal --help` and mistakes in a command answer at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

from foveal import __version__
from foveal.errors import FovealError
from foveal.track import console

_USAGE = """\
usage: foveal COMMAND [ARGUMENTS]

Reinforcement fine-tuning for vision-language models.

commands:
  train [config=FILE] [KEY=VALUE …]          train; --print-config checks and prints the configuration alone
  eval MODEL [config=FILE] [KEY=VALUE …]     score a Hugging Face folder, hub id or checkpoint on data.val_files
  check [config=FILE] [KEY=VALUE …]          look for faults in data and reward function before a run, without a GPU
  plan [config=FILE] [KEY=VALUE …]           memory and time of a run, from the model's config.json alone
  merge --local_dir …/global_step_N/actor    turn a checkpoint into a Hugging Face folder
  view RUN…                                  show runs in the browser: curves, times, settings, answers
  quickstart                                 build a tiny model and a picture task, and improve it with GRPO (CPU)

KEY=VALUE overrides the configuration file, with dotted keys and YAML values:
  foveal train config=examples/config.yaml worker.rollout.n=8 data.train_files=my_rows.jsonl

foveal COMMAND --help says more.
"""

_TRAIN_HELP = """\
usage: foveal train [--print-config] [config=FILE] [KEY=VALUE …]

Trains a model with the configuration in FILE, changed by the overrides. examples/config.yaml is a place to start.

  --print-config   check the configuration alone and print it whole; no data and no model is opened
"""

_EVAL_HELP = """\
usage: foveal eval MODEL [config=FILE] [KEY=VALUE …]

Scores MODEL on data.val_files with worker.reward.reward_function, with the metrics and sample files of a training run.
MODEL is a Hugging Face folder, a hub id, a checkpoint (…/global_step_N), or `latest` or `best` of the run that the
configuration names. Files go to the folder `eval` in trainer.save_checkpoint_path.
"""

_CHECK_HELP = """\
usage: foveal check [--rows N] [--generate N] [--html FILE] [config=FILE] [KEY=VALUE …]
       foveal check --parity [--rows N] [config=FILE] [KEY=VALUE …]

Looks at every row of data.train_files and data.val_files, decodes pictures of some, shows prompts as the model will get
them, and tries the reward function on right, wrong, empty and truncated answers. It needs no GPU and no weights of a
model. Exit status 1: there is an error, which would stop a run or spoil it.

  --rows N      rows whose pictures are decoded, and which the reward is tried on (1000)
  --generate N  let the model answer N prompts too, and score the answers (0)
  --html FILE   write a page with prompts and their pictures

--parity samples worker.rollout.n answers to the first rows of data.train_files, scores the same answers with the
trainer's forward pass, and prints how far the two sides' log-probabilities are apart: mean, max and the worst token.
Then it changes every weight a little in memory, hands the weights over again, and does the same once more. Nothing is
written and no reward function is needed. Exit status 1: beyond the bound (max 1e-4 in float32, mean 0.03 in bf16).

  --rows N      prompts to take (16); numbers in the output count from 0
"""

_PLAN_HELP = """\
usage: foveal plan [--gpu NAME] [--json] [--rows N] [--prompt N] [--visual N] [--answer N] [config=FILE] [KEY=VALUE …]

Says how much memory each phase of a run takes of a GPU, part by part, whether it fits, what to change where it doesn't,
and how long a step may take. Of the model only config.json is read (worker.actor.model.model_path: a folder, that file
itself, or a hub id); no GPU is needed. Exit status 1: it does not fit.

  --gpu NAME    as h100-80, or a number of gigabytes: 24, 40, 48, 80, 141; the GPU that is here, or a table of these
  --json        print everything as JSON
  --rows N      training rows, from which the number of steps follows
  --prompt N    tokens of a prompt (data.max_prompt_length), and --visual N: those of its pictures (nearly all)
  --answer N    mean tokens of an answer, for times (half of data.max_response_length)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        the exit status: 0 done; 1 something the user can cure, printed without a traceback; 2 wrong usage; 130 Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        console.note(_USAGE)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        console.note(f"foveal {__version__}")
        return 0
    command = _COMMANDS.get(args[0])
    if command is None:
        console.error(f"foveal: no command {args[0]!r}; there are: {', '.join(_COMMANDS)}.")
        return 2
    if not sys.stderr.isatty():  # the libraries' loading bars would fill a log file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # torchao, which transformers imports where it is there, registers what torch knows by itself
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        return command(args[1:])
    except FovealError as error:
        console.error(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        console.error("stopped.")
        return 130


def _train(args: list[str]) -> int:
    if _wants_help(args) or not args:
        console.note(_TRAIN_HELP)
        return 0 if args else 2
    from foveal.config import load_config, render

    print_only = "--print-config" in args
    config = load_config([arg for arg in args if arg != "--print-config"])
    if print_only:
        from foveal.config.rules import missing, unsupported

        console.note(render(config).rstrip("\n"))
        for line in missing(config) + unsupported(config):
            console.warn(f"not yet ready to run: {line}")
        return 0
    if config.trainer.val_only:
        from foveal.evaluate import evaluate

        return evaluate(config)
    from foveal.restart import train

    return train(config)


def _eval(args: list[str]) -> int:
    if _wants_help(args) or not args or "=" in args[0]:
        console.note(_EVAL_HELP)
        return 0 if _wants_help(args) else 2
    from foveal.config import load_config
    from foveal.evaluate import evaluate

    model, *rest = args
    return evaluate(load_config([*rest, "trainer.val_only=true"]), model)


def _check(args: list[str]) -> int:
    if _wants_help(args) or not args:
        console.note(_CHECK_HELP)
        return 0 if args else 2
    from foveal.check.command import check_command

    return check_command(args)


def _plan(args: list[str]) -> int:
    if _wants_help(args) or not args:
        console.note(_PLAN_HELP)
        return 0 if args else 2
    from foveal.plan.command import plan_command

    return plan_command(args)


def _merge(args: list[str]) -> int:
    from foveal.train.merge_command import merge_command

    return merge_command(args)


def _view(args: list[str]) -> int:
    from foveal.view.command import view_command

    return view_command(args)


def _quickstart(args: list[str]) -> int:
    from foveal.quickstart.run import quickstart_command

    return quickstart_command(args)


def _wants_help(args: list[str]) -> bool:
    return bool({"-h", "--help"} & set(args))


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "check": _check,
    "plan": _plan,
    "merge": _merge,
    "view": _view,
    "quickstart": _quickstart,
}

if __name__ == "__main__":
    sys.exit(main())
