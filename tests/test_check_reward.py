"""`foveal check`, the reward half: finds seeded misconfigurations, and is silent where all is well."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from foveal.check.answers import contents
from foveal.check.asked import read_asked
from foveal.check.findings import Finding
from foveal.check.reward import check_reward
from foveal.check.tries import add_wrong_answers, all_tries, make_case
from foveal.config import load_config
from foveal.quickstart.tiny import build_tiny
from foveal.types import Prompt
from tests.data_support import encoded, noise
from tests.misconfigurations import Case, cases

THINK = "Think between <think> and </think>, then write the answer between <answer> and </answer>."
READ = """
import json, re, time
REWARD_TYPE = "sequential"
def get(text):
    found = re.findall("<answer>(.*?)</answer>", text, re.S)
    return found[-1].strip() if found else None
"""
EQUAL = "def compute_score(x): return float(get(x['response']) == x['ground_truth'])"
SUMS = [{"problem": f"What is {n} + {3 * n + 2}?", "answer": str(4 * n + 2)} for n in range(5, 25)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def alarming(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "note"]


def check_case(case: Case, folder: Path, model: Path) -> list[Finding]:
    return alarming(check_reward(load_config(case.write(folder, model)), say=lambda line: None))


def quick(case: Case) -> Any:
    return pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.id == "slow_reward" else [])


@pytest.mark.parametrize("case", [quick(case) for case in cases("open") if not case.sound])
def test_fault_is_found(case: Case, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.id == "slow_reward":
        monkeypatch.setattr("foveal.check.reward.BUDGET", 5.0)
    assert check_case(case, tmp_path, model)


@pytest.mark.parametrize("case", [quick(case) for case in cases("open") if case.sound])
def test_sound_set_up_raises_no_alarm(case: Case, tmp_path: Path, model: Path) -> None:
    assert check_case(case, tmp_path, model) == []


def check(
    folder: Path, model: Path, reward: str, *keys: str, prompt: str | None = THINK, rows: list[dict[str, Any]] = SUMS
) -> list[Finding]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(READ + reward)
    overrides = [
        f"data.train_files={folder}/rows.jsonl",
        "data.prompt_key=problem",
        "data.answer_key=answer",
        "data.max_response_length=1024",
        "data.rollout_batch_size=4",
        "worker.actor.global_batch_size=4",
        "worker.rollout.n=4",
        f"worker.actor.model.model_path={model}",
        f"worker.reward.reward_function={folder}/reward.py:compute_score",
    ]
    if prompt is not None:
        (folder / "prompt.jinja").write_text("{{ content }}\n\n" + prompt)
        overrides.append(f"data.format_prompt={folder}/prompt.jinja")
    return alarming(check_reward(load_config([*overrides, *keys]), say=lambda line: None))


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("def compute_score(x): return 0.0", "every one of"),
        ("def compute_score(x): return float('<answer>' in x['response'])", "scores no more than a wrong one"),
        ("def compute_score(x): return -float(get(x['response']) == x['ground_truth'])", "less than wrong ones"),
        ("def compute_score(x): return float(x['ground_truth'] in (get(x['response']) or ''))", "one digit more"),
        (
            "def compute_score(x): return float(re.search('<answer>(.*)<', x['response'])[1] == x['ground_truth'])",
            "'NoneType' object is not subscriptable",
        ),
        (
            "def compute_score(x): return float(get(x['response']) == x['ground_truth']) if get(x['response']) "
            "else float('nan')",
            "gives nan",
        ),
        (
            "def compute_score(x): return 'right' if get(x['response']) == x['ground_truth'] else 'wrong'",
            "returned str",
        ),
        (
            "def compute_score(x): return float(get(x['response']) == x['ground_truth']) - len(x['response']) / 512",
            "half of data.max_response_length",
        ),
        (
            "def compute_score(x):\n    formed = re.fullmatch('<think>.*</think><answer>.*</answer>', x['response'])\n"
            "    return 0.5 * bool(formed) + 0.5 * (get(x['response']) == x['ground_truth'])",
            "re.DOTALL",
        ),
        ("def compute_score(x, factor): return 1.0", "cannot be used"),
    ],
)
def test_a_broken_reward_is_told_in_words(reward: str, said: str, tmp_path: Path, model: Path) -> None:
    findings = check(tmp_path, model, reward)
    assert any(said in f"{finding.text} {finding.cure}" for finding in findings), findings


@pytest.mark.parametrize(
    ("keys", "subject"),
    [
        (["data.max_response_length=16"], "data.max_response_length"),
        (["algorithm.online_filtering=true", "algorithm.filter_key=accuracy"], "algorithm.filter_key"),
        (["data.answer_key=id"], "data.answer_key"),
        (["data.answer_key=source"], "data.answer_key"),
        (["worker.reward.reward_function_kwargs={max_response_length: 99}"], "worker.reward.reward_function_kwargs"),
    ],
)
def test_a_key_that_does_not_fit_is_named(keys: list[str], subject: str, tmp_path: Path, model: Path) -> None:
    rows = [{**row, "id": f"sum-{number}", "source": "made"} for number, row in enumerate(SUMS)]
    reward = "def compute_score(x, max_response_length=1024): return float(get(x['response']) == x['ground_truth'])"
    assert subject in {finding.subject for finding in check(tmp_path, model, reward, *keys, rows=rows)}


MANY = [{"problem": f"What is {n} + {3 * n + 2}?", "answer": str(4 * n + 2)} for n in range(5, 205)]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (EQUAL, None),
        ("def compute_score(x): return float(x['response'].endswith('{' + x['ground_truth'] + '}'))", "boxed"),
        (
            "def compute_score(x):\n    formed = re.fullmatch('<think>.*</think>[ \\n]*<answer>.*>', x['response'])\n"
            "    return 0.5 * bool(formed) + 0.5 * (get(x['response']) == x['ground_truth'])",
            "re.DOTALL",
        ),
        (
            "def compute_score(x): return float(get(x['response']) == x['ground_truth']) - len(x['response']) / 512",
            "half of data.max_response_length",
        ),
    ],
)
def test_rows_beyond_those_on_which_all_is_tried(reward: str, said: str | None, tmp_path: Path, model: Path) -> None:
    findings = check(tmp_path, model, reward, rows=MANY)
    assert any(said in f"{finding.text} {finding.cure}" for finding in findings) if said else not findings


def test_a_first_call_that_takes_long_is_no_timeout(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foveal.check.scoring.TIME_LIMIT", 0.3)
    slow = EQUAL.replace("return", "time.sleep(0.6 * FIRST.pop() if FIRST else 0); return")
    assert alarming(check(tmp_path, model, f"FIRST = [1]\n{slow}")) == []


def test_a_function_that_never_returns_is_told_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foveal.check.scoring.TIME_LIMIT", 0.1)
    monkeypatch.setattr("foveal.check.scoring.FIRST_LIMIT", 0.1)
    found = alarming(check(tmp_path, model, "def compute_score(x):\n    while True: pass"))
    assert len(found) == 1 and "ran longer" in found[0].text and not found[0].rows


ASKS_A_SERVER = EQUAL.replace("def ", "async def ").replace("return", "await asyncio.sleep(0.25); return")


def test_a_server_is_rated_by_what_it_does_at_a_time(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foveal.check.scoring.TIME_LIMIT", 0.1)
    monkeypatch.setattr("foveal.check.reward.SLOW", 0.02)
    monkeypatch.setattr("foveal.check.reward.BUDGET", 1.0)
    reward = f"import asyncio\n{ASKS_A_SERVER}"
    assert alarming(check(tmp_path, model, reward, "worker.reward.concurrency=32")) == []
    (slow,) = alarming(check(tmp_path, model, reward, "worker.reward.concurrency=4"))
    assert "at 4 at a time" in slow.text and "worker.reward.concurrency" in slow.cure
    assert 60 <= float(re.findall(r"slow: (\d+) s per 1,000", slow.text)[0]) < 120


def test_a_server_for_which_a_run_would_wait_longer_is_no_error(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foveal.check.scoring.SERVER_LIMIT", 0.1)
    found = alarming(check(tmp_path, model, f"import asyncio\n{ASKS_A_SERVER}"))
    assert [one.level for one in found] == ["warning"] and "longer than this check" in found[0].text


@pytest.mark.parametrize(
    ("body", "cure"),
    [
        ("return float(get(x['response']) == x['answer'])", "which keys it reads"),
        ("return float(get(x['response']).strip() == x['ground_truth'])", "a number for any text"),
    ],
)
def test_a_fault_on_right_answers_is_no_matter_of_odd_ones(body: str, cure: str, tmp_path: Path, model: Path) -> None:
    found = check(tmp_path, model, f"def compute_score(x):\n    {body}")
    assert cure in next(one for one in found if "raised" in one.text).cure


def test_a_function_of_one_dict_that_does_not_say_so_is_told(tmp_path: Path, model: Path) -> None:
    found = check(tmp_path, model, f"del REWARD_TYPE\n{EQUAL}")
    assert 'needs REWARD_TYPE = "sequential"' in found[0].cure


def test_only_the_number_of_a_truth_with_a_unit_is_a_right_answer(tmp_path: Path, model: Path) -> None:
    rows = [{**row, "answer": f"{row['answer']} dots"} for row in SUMS]
    prompt = THINK.replace("the answer between", "only the number between")
    reward = "def compute_score(x): return float(get(x['response']) == x['ground_truth'].split()[0])"
    assert alarming(check(tmp_path, model, reward, prompt=prompt, rows=rows)) == []


def test_a_picture_that_cannot_be_read_is_given_to_the_reward_once(tmp_path: Path, model: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = [{"images": [str(tmp_path / "broken.png")], **row, "problem": f"<image>{row['problem']}"} for row in SUMS]
    reward = EQUAL.replace("return", "assert len(x['images']) == 1; return")
    assert alarming(check(tmp_path, model, reward, rows=rows)) == []


def test_a_prompt_that_gives_the_answer_away_is_found(tmp_path: Path, model: Path) -> None:
    findings = check(tmp_path, model, EQUAL, prompt=THINK + " It is {{ answer }}.")
    assert [finding.subject for finding in findings] == ["data.format_prompt"]


def test_rows_whose_truth_cannot_be_reached_are_named(tmp_path: Path, model: Path) -> None:
    rows = [
        {**row, "answer": "$" + row["answer"] + "$"} if number in (4, 17) else row for number, row in enumerate(SUMS)
    ]
    assert [finding.rows for finding in check(tmp_path, model, EQUAL, rows=rows)] == [(4, 17)]


def test_tags_that_are_special_tokens_are_named(tmp_path: Path, model: Path) -> None:
    prompt = "Write the answer between <|begin_of_box|> and <|end_of_box|>."
    reward = "def compute_score(x): return float(f'<|begin_of_box|>{x[\"ground_truth\"]}<' in x['response'])"
    assert check(tmp_path, model, reward, prompt=prompt) == []
    tokenizer = tmp_path / "tokenizer"
    build_tiny(tokenizer, "qwen2_5_vl")
    from transformers import AutoTokenizer

    changed = AutoTokenizer.from_pretrained(tokenizer)
    changed.add_special_tokens({"additional_special_tokens": ["<|begin_of_box|>", "<|end_of_box|>"]})
    changed.save_pretrained(tokenizer)
    key = f"worker.actor.model.tokenizer_path={tokenizer}"
    findings = check(tmp_path, model, reward, key, prompt=prompt)
    assert "worker.reward.skip_special_tokens" in {finding.subject for finding in findings}
    assert check(tmp_path, model, reward, key, "worker.reward.skip_special_tokens=false", prompt=prompt) == []


@pytest.mark.parametrize(
    ("reward", "prompt"),
    [
        (EQUAL, THINK),
        ("def compute_score(x): return {None: -0.5}.get(get(x['response']), 1.0 if get(x['response']) == "
         "x['ground_truth'] else -1.0)", THINK),
        ("def compute_score(x): return float(get(x['response']) == x['ground_truth']) + 100 / "
         "(200 + x['response_length'])", THINK),
        ("def compute_score(x): return float(re.findall(r'\\d+', x['response'] + '-0')[-2] == x['ground_truth'] "
         "if re.search(r'\\d', x['response']) else 0)", None),
        ("def compute_score(x):\n    try: return float(json.loads(x['response'])['answer'] == int(x['ground_truth']))\n"
         "    except Exception: return 0.0", 'Answer with a JSON object: {"reasoning": "…", "answer": 12}'),
        ("def compute_score(x): return float(x['response'].strip() == x['ground_truth'])",
         "Reply with the number and nothing else."),
    ],
)  # fmt: skip
def test_other_sound_rewards_raise_no_alarm(reward: str, prompt: str | None, tmp_path: Path, model: Path) -> None:
    assert check(tmp_path, model, reward, prompt=prompt) == []


@pytest.mark.parametrize(
    ("text", "described", "kind"),
    [
        ("Put the final answer within \\boxed{}.", "\\boxed{…}", "free"),
        (THINK, "<think>…</think> <answer>…</answer>", "free"),
        ("Reply as <answer>A</answer>.", "<answer>…</answer>", "letter"),
        ("Reply <answer>yes</answer> or <answer>no</answer>.", "<answer>…</answer>", "words"),
        ("Box: <answer>[x1, y1, x2, y2]</answer>", "<answer>…</answer>", "box"),
        ("Click: <answer>(x, y)</answer>", "<answer>…</answer>", "point"),
        ("最后一行写出“答案：X”", "答案：…", "free"),
        ("End with a line that begins with \"Answer:\".", "Answer:…", "free"),
        ('As JSON: {"count": 3}', "JSON", "number"),
        ("Describe the picture.", "an answer without tags", "free"),
    ],
)  # fmt: skip
def test_what_a_prompt_asks_for(text: str, described: str, kind: str) -> None:
    asked = read_asked(f"What is it?\n\n{text}", "What is it?")
    assert (asked.describe(), asked.kind) == (described, kind)


@pytest.mark.parametrize(
    ("truth", "prompt", "question", "first"),
    [
        ("222 km", "Give only the number, like <answer>12</answer>.", "", "222"),
        ("\\frac{1}{4}", "As a decimal, like <answer>0.5</answer>.", "", "0.25"),
        ("blue", "The letter, as <answer>A</answer>.", "What?\nA. red\nB. blue", "B"),
        ([10, 20, 30, 60], "As <answer>(x, y)</answer> in pixels.", "", "(20, 40)"),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], "How many? <answer>N</answer>", "", "2"),
        ("We add. \n#### 72", "Put it in \\boxed{}.", "", "72"),
        (["B", "D"], "As <answer>A,C</answer>.", "", "B,D"),
        (True, "<answer>Yes or No</answer>", "", "Yes"),
    ],
)
def test_how_a_truth_is_written_where_the_prompt_wants_it(truth: Any, prompt: str, question: str, first: str) -> None:
    assert contents(truth, read_asked(f"{question}\n{prompt}", question), question, {})[0] == first


@pytest.mark.parametrize(
    "prompt",
    [
        "Give only the number, like <answer>12</answer>.",
        "With one decimal place, in \\boxed{}.",
        "The letter, as <answer>A</answer>.",
        "Click: <answer>(x, y)</answer>, between 0 and 1000.",
        "Box: <answer>[x1, y1, x2, y2]</answer>",
        "<answer>Yes or No</answer>",
        'As JSON: {"answer": …}',
        "Describe the picture.",
    ],
)
def test_any_truth_makes_answers_to_try(prompt: str) -> None:
    nan = float("nan")
    for truth in (nan, [nan] * 4, float("inf"), "9" * 400, 10**400, "①", "²", "192.168.0.0/16", "./.", "[" * 5000):
        row = Prompt("check-0-0", [], [], [], {"answer": truth}, 0, truth)
        case = make_case(row, f"How many?\n{prompt}", "How many?", [(100, 100)])
        add_wrong_answers([case, case])
        assert len(list(all_tries(0, case, 64))) >= 4


def test_a_chat_of_parts_as_parquet_has_them_is_read(tmp_path: Path, model: Path) -> None:
    """Each part has the keys of all."""
    picture = {"type": "image", "text": None, "image": base64.b64encode(encoded(noise(56, 56))).decode()}
    rows = [
        {**row, "problem": [{"role": "user", "content": [picture, {"type": "text", "text": row["problem"]}]}]}
        for row in SUMS
    ]
    assert alarming(check(tmp_path, model, EQUAL, rows=rows)) == []


def test_half_a_character_in_a_truth_is_no_obstacle(tmp_path: Path, model: Path) -> None:
    rows = [{**row, "answer": f"\ud83d{row['answer']}"} for row in SUMS]
    assert check(tmp_path, model, EQUAL, rows=rows) == []


def counts(split: str, folder: Path, model: Path) -> tuple[int, int]:
    """(faults that are found, sound set-ups that raise an alarm) of a half of the set."""
    found = alarms = 0
    for case in cases(split):
        home = folder / case.id
        home.mkdir()
        findings = check_case(case, home, model)
        found += bool(findings) and not case.sound
        alarms += bool(findings) and case.sound
    return found, alarms


@pytest.mark.slow
def test_count_on_the_half_that_was_held_out(tmp_path: Path, model: Path) -> None:
    found, alarms = counts(
        "held_out", tmp_path, model
    )  # 19 of 20 and 0 of 10, at both counts; rules changed for others between
    assert found >= 19
    assert alarms == 0
