"""Layouts of maths problems: metadata `{"answer": the right answer, as text or LaTeX}`."""

from __future__ import annotations

import re

from areal_hpc.data.fields import Fields, Made
from areal_hpc.data.prompts import bad

PROMPT = ("problem", "question", "prompt")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w\\])")


def maths(row: Fields) -> Made:
    """Problem and answer, whatever they are called; the solution, if there is one, may hold the answer in a box."""
    text = row.text(*PROMPT, setting="prompt_field")
    solution = row.optional("solution")
    if row.find("answer", setting="answer_field") is not None:
        answer = row.answer("answer")
        if "####" in answer:
            bad("answer", "is a solution with ####; layout gsm8k takes the answer out of it")
        answer = (boxed(answer) or answer) if _BOX.match(answer) else answer
    else:
        found = boxed(row.text("solution"))
        if found is None:
            bad("solution", "ends without an answer in \\boxed{}, and there is no field answer")
        answer = found
    return Made(text, {"answer": answer}, solution or answer)


def gsm8k(row: Fields) -> Made:
    """GSM8K: the answer is what follows the last ####; thousands are written without a comma."""
    text = row.text("question", setting="prompt_field")
    solution = row.answer("answer")
    _, mark, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        bad(row.find("answer", setting="answer_field") or "answer", "has no answer after ####")
    return Made(text, {"answer": answer}, solution)


def integer(row: Fields) -> Made:
    """AIME and AMC: the answer is a number, 025 is 25."""
    made = maths(row)
    answer = made.metadata["answer"]
    plain = str(int(answer)) if re.fullmatch(r"\d{1,18}", answer) else answer
    return made._replace(metadata={"answer": plain})


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text, braces in it matched; None if there is none that is closed."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start] != "{":
            return re.split(r"[\s$]", text[start:], maxsplit=1)[0] or None
        depth = 0
        for i in range(start, len(text)):
            if text[i] in "{}" and text[i - 1] != "\\":
                depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start + 1 : i].strip() or None
    return None
