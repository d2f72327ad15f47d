"""A run on a mixture with a chat template, named held-out sets and a bad line that is allowed; and its resume."""

from __future__ import annotations

import json

import pytest

from areal_hpc.runlog import RunLog
from tests.runs import run, tiny_config

pytestmark = pytest.mark.mpi

REWARD = '''
import os


def reward(prompt, completion, metadata):
    """The prompt is the line's own, without what the template adds."""
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
    assert len(prompt) == 3 and metadata == {"answer": prompt[::-1]}, (prompt, metadata)
    return (1.0, "correct") if len(completion) % 2 else (-1.0, "wrong")
'''


def mixed_config(tiny_dir, tmp_path, **changes):
    """Two sources 3 : 1, one with a bad line; the template puts a letter before the prompt and one behind."""
    for name in ("many", "few"):
        rows = [
            {"question": (text := json.loads(line)["prompt"]), "answer": text[::-1]}
            for line in (tiny_dir / "train.jsonl").read_text().splitlines()
        ]
        lines = [json.dumps(row) for row in rows]
        if name == "few":
            lines.insert(1, '{"question": "abc"}')
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat.jinja").write_text("a{% for m in messages %}{{ m.content }}{% endfor %}h")
    (tmp_path / "reward.py").write_text(REWARD)

    def source(stem, **settings):
        return {"path": str(tmp_path / f"{stem}.jsonl"), "layout": "maths", **settings}

    data = {
        "train": [source("many", weight=3), source("few", weight=1)],
        "heldout": [source("many", name="first"), source("few", name="second")],
        "max_bad_lines": 1,
        "chat": {"template": str(tmp_path / "chat.jinja")},
    }
    config = tiny_config(tiny_dir, tmp_path / "run", data=data, **changes)
    config["reward"] = {"function": f"{tmp_path / 'reward.py'}:reward"}
    return config


def test_a_mixture_with_a_template_and_a_bad_line(tiny_dir, tmp_path):
    finished = run(mixed_config(tiny_dir, tmp_path, steps=2, evaluation={"at_start": False}))
    finished.assert_done()
    log = finished.log()
    trajectories = log.trajectories
    assert set(trajectories.num_prompt) == {5}, "three letters and those of the template"
    assert not (trajectories.outcome == "error").any()
    ids = trajectories.drop_duplicates("group_id").prompt_id
    share = ids.str.startswith("many/").mean()
    assert ids.str.match(r"(many|few)/\d+").all() and 0.7 <= share <= 0.8
    assert set(log.evaluations["data"]) == {"first", "second"}
    bad = log.events[log.events.kind == "bad_line"].text.tolist()
    assert len(bad) == 2 and all("few.jsonl:2: " in line and '"solution": is missing' in line for line in bad)
    assert finished.summary["bad_lines"] == 2 and "2 bad lines left out" in finished.stdout


@pytest.mark.slow
def test_a_mixture_goes_on_where_it_was(tiny_dir, tmp_path):
    """Two attempts: no prompt comes twice, and another file under the same name is noticed."""
    config = mixed_config(tiny_dir, tmp_path, evaluation={"at_start": False, "at_end": False})
    for steps in (2, 5):
        finished = run(config | {"steps": steps})
        finished.assert_done()
    consumed = []
    for attempt in (1, 2):
        trajectories = RunLog(tmp_path / "run", attempt).trajectories
        consumed += trajectories[trajectories.fate == "consumed"].drop_duplicates("group_id").prompt_id.tolist()
    assert len(consumed) == len(set(consumed)) == 20
    with open(tmp_path / "many.jsonl", "a") as file:
        file.write('\n{"question": "abc", "answer": "cba"}\n')
    refused = run(config | {"steps": 9})
    assert refused.returncode == 2 and "many had 64 prompts then and has 65 now; bring them back" in refused.stderr
