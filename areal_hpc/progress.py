"""What people see of a run while it goes: one plain line per step, and RUN/status.json for the live view.

The controller writes both; `areal-hpc run` on a terminal draws its live view from status.json (liveview.py).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from areal_hpc.evaluation import Evaluation
from areal_hpc.rundir import RunDir, write_json


class Progress:
    """Figures of the run so far.

    Args:
        steps: number of steps the run will have.
        say: prints one line.
    """

    def __init__(self, run_dir: RunDir, name: str, steps: int, pid: int, host: str, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.say = say
        self.began_s = time.monotonic()
        self.training_began_s = math.nan
        self.last_step_s = math.nan
        self.consumed_tokens = 0
        self.head_lag_max = 0
        self.pass_at_1: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.num_refused = {"train": 0, "evaluate": 0}
        self.num_bad_lines = 0
        self.status: dict[str, Any] = {
            "name": name,
            "state": "starting",
            "attempt": run_dir.attempt,
            "job_id": os.environ.get("SLURM_JOB_ID"),
            "controller_pid": pid,
            "controller_host": host,
            "version": 0,
            "steps": steps,
            "run_log": str(run_dir.run_log),
        }
        self.write()

    def write(self) -> None:
        write_json(self.run_dir.status, self.status | {"wall_s": round(time.monotonic() - self.began_s, 1)})

    def now(self, state: str) -> None:
        """What the run is doing: starting, evaluating, training."""
        self.status["state"] = state
        self.write()

    def training_begins(self) -> None:
        self.training_began_s = time.monotonic()
        self.now("training")

    @property
    def tokens_per_s(self) -> float:
        """Tokens that steps have consumed, over the time from the first admission to the last finished step."""
        seconds = self.last_step_s - self.training_began_s
        return self.consumed_tokens / seconds if seconds > 0 else 0.0

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is finished; `row` is that of the log's step table."""
        self.last_step_s = time.monotonic()
        self.consumed_tokens += int(row["consumed_tokens"])
        self.head_lag_max = max(self.head_lag_max, int(row["head_lag_max"]))
        shown = (
            "step",
            "reward_mean",
            "loss",
            "entropy",
            "grad_norm",
            "head_lag_mean",
            "head_lag_max",
            "num_filtered",
            "total_s",
            "wait_s",
        )
        self.status |= {name: _plain(row[name]) for name in shown}
        self.status |= {
            "version": int(row["version_after"]),
            "tokens_per_s": round(self.tokens_per_s),
            "mean_response": round(row["response_tokens"] / row["num_sequences"], 1),
            "reward_history": (self.status.get("reward_history", []) + [_plain(row["reward_mean"])])[-120:],
        }
        self.write()
        steps = self.status["steps"]
        learnt = f"loss {row['loss']:+.4f}  entropy {row['entropy']:.3f}  " if math.isfinite(row["loss"]) else ""
        outcome = "SKIPPED, not finite  " if row["skipped"] else learnt  # simulated training has no loss
        self.say(
            f"step {row['step']:>{len(str(steps))}}/{steps}  reward {row['reward_mean']:+.2f}  {outcome}"
            f"length {self.status['mean_response']:.0f}  "
            f"lag mean {row['head_lag_mean']:.1f} max {row['head_lag_max']}  {row['total_s']:.1f} s  "
            f"{self.tokens_per_s:,.0f} tok/s"
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is complete; the first one is the `before`, the last one the `after` of the summary.

        Where there are several data sets, these two are over all their prompts; the others are in `evaluations`.
        """
        self.pass_at_1.append(evaluation.pass_at_1)
        cards = evaluation.cards()
        self.evaluations += [{"version": evaluation.version} | card.as_json() for card in cards.values()]
        self.status["pass_at_1"] = {str(evaluation.version): evaluation.pass_at_1} | self.status.get("pass_at_1", {})
        self.write()
        for name, card in cards.items():
            unscored = f", {card.num_unscored} without a score" if card.num_unscored else ""
            error = f" +- {card.pass_at_1_error:.1%}" if math.isfinite(card.pass_at_1_error) else ""
            which = f"held-out {name}" if len(cards) > 1 else "held-out"
            self.say(
                f"{which} pass@1 at version {evaluation.version}: {card.pass_at_1:.1%}{error} "
                f"({card.num_scored} answers, mean length {card.lengths['mean']:.0f}{unscored})"
            )

    def lost(self, rank: int, host: str, text: str) -> None:
        """The run goes on without a rank; said at once, and kept in status.json."""
        self.status["lost_ranks"] = self.status.get("lost_ranks", {}) | {str(rank): {"host": host, "what": text}}
        self.write()
        self.say(f"areal-hpc: {text}")

    def walltime(self, text: str) -> None:
        """What the time that the job has left means for the run; said at once, and kept in status.json."""
        self.status["walltime"] = [*self.status.get("walltime", []), text]
        self.write()
        if self.status["job_id"] is not None:
            self.say(f"areal-hpc: walltime: {text}")

    def refused(self, purpose: str) -> None:
        """A prompt without an answer: it is empty or longer than rollout.max_prompt_tokens."""
        self.num_refused[purpose] += 1

    def left_out(self, num_lines: int) -> None:
        """Bad lines of the data that the run goes on without."""
        self.num_bad_lines += num_lines

    def ended(self, state: str, why: str, exit_code: int) -> None:
        """The last word: after a healthy end into summary.json, then into status.json, and into a job's output."""
        self.status |= {"state": state, "why_ended": why, "exit_code": exit_code} | self._not_used()
        if exit_code == 0:
            write_json(self.run_dir.summary, self.summary(why))
        self.write()
        if self.status["job_id"] is not None:  # otherwise `areal-hpc run` says it
            if not_used := what_was_not_used(self.status):
                self.say(f"areal-hpc: {not_used}")
            self.say(
                f"areal-hpc: {state}, exit code {exit_code}: {why}\n"
                f"areal-hpc: logs of all ranks are in {self.run_dir.attempt_dir}, the run log is {self.run_dir.run_log}"
            )

    def summary(self, why: str) -> dict[str, Any]:
        before = self.pass_at_1[0] if self.pass_at_1 else None
        after = self.pass_at_1[-1] if len(self.pass_at_1) > 1 else None
        return {
            "pass1_before": before,
            "pass1_after": after,
            "wall_s": round(time.monotonic() - self.began_s, 1),
            "train_s": _plain(self.last_step_s - self.training_began_s),
            "consumed_tokens": self.consumed_tokens,
            "consumed_tokens_per_s": round(self.tokens_per_s, 1),
            "head_staleness_max": self.head_lag_max,
            "versions": self.status["version"],
            "why_ended": why,
            "evaluations": self.evaluations,
        } | self._not_used()

    def _not_used(self) -> dict[str, int]:
        return {
            "prompts_refused": self.num_refused["train"],
            "heldout_refused": self.num_refused["evaluate"],
            "bad_lines": self.num_bad_lines,
        }


def what_was_not_used(figures: Mapping[str, Any]) -> str:
    """What a status or a summary says about data that was left out; "" if all was used."""
    said = {
        "prompts_refused": "prompts refused (empty or longer than rollout.max_prompt_tokens)",
        "heldout_refused": "held-out answers refused for the same reason",
        "bad_lines": "bad lines left out",
    }
    return ", ".join(f"{figures[name]:,} {what}" for name, what in said.items() if figures.get(name))


def _plain(value: Any) -> Any:
    """A JSON number; null for what is not finite."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and isinstance(value, int) else round(number, 6)
