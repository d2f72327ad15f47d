"""The record of an evaluation: what is in it comes back, what is damaged is told, other settings are refused."""

from __future__ import annotations

import json
import math

import pytest

from areal_hpc.answers import AnswerFile, check_settings, num_on_record
from areal_hpc.exits import Exit, RunError
from tests.unit.test_scorecard import answer

SETTINGS = {"seed": 1, "rollout.temperature": 0.6}


def test_answers_come_back_without_their_times(tmp_path):
    given = [answer("a", 0, "correct", "7", text="so 7 \u2028\n\x00ä"), answer("a", 1, "timeout")]
    with AnswerFile(tmp_path, SETTINGS) as record:
        for one in given:
            record.append(one)
    lines = [json.loads(line) for line in record.path.read_bytes().split(b"\n")[:-1]]
    assert lines[0]["text"] == given[0].text and lines[0]["seconds"] == 1.5 and lines[0]["tokens"] == 10
    assert lines[1]["reward"] is None and lines[1]["outcome"] == "timeout"
    with AnswerFile(tmp_path, SETTINGS) as again:
        assert [one.key for one in again.answers] == [one.key for one in given] and again.num_torn == 0
        assert again.answers[0].text == given[0].text and again.answers[0].answer == "7"
        assert math.isnan(again.answers[1].reward) and math.isnan(again.answers[0].finish_s)
    assert num_on_record(tmp_path) == 2 and num_on_record(tmp_path / "elsewhere") == 0


@pytest.mark.parametrize("torn", [b'{"data": "d", "prom', b"\x00\xff", b"{}\n"])
def test_a_torn_last_line_is_cut_off_and_counted(torn, tmp_path):
    with AnswerFile(tmp_path, SETTINGS) as record:
        record.append(answer("a", 0, "correct"))
    whole = record.path.read_bytes()
    record.path.write_bytes(whole + torn)
    with AnswerFile(tmp_path, SETTINGS) as again:
        assert len(again.answers) == 1 and again.num_torn == 1
        again.append(answer("a", 1, "wrong"))
    assert record.path.read_bytes().startswith(whole + b'{"data"')
    with AnswerFile(tmp_path, SETTINGS) as third:
        assert [one.sample for one in third.answers] == [0, 1] and third.num_torn == 0


def test_damage_in_the_middle_is_no_accident(tmp_path):
    with AnswerFile(tmp_path, SETTINGS) as record:
        record.append(answer("a", 0, "correct"))
    record.path.write_bytes(b"{broken\n" + record.path.read_bytes())
    with pytest.raises(RunError, match=r"answers.jsonl:1 is no answer") as caught:
        AnswerFile(tmp_path, SETTINGS)
    assert caught.value.code == Exit.DISK


def test_other_settings_are_named_one_by_one(tmp_path):
    AnswerFile(tmp_path, SETTINGS).close()
    check_settings(tmp_path, dict(reversed(SETTINGS.items())))
    with pytest.raises(RunError) as caught:
        AnswerFile(tmp_path, {"seed": 2, "rollout.temperature": 0.6, "evaluation.samples": 8})
    assert caught.value.code == Exit.CONFIG
    assert "evaluation.samples was null, is 8; seed was 1, is 2; name another --out" in caught.value.reason
    check_settings(tmp_path / "elsewhere", {"seed": 2})
